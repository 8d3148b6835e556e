"""Where the time of the tests goes: `python -m tests.seconds [junit.xml]`, by folder and by kind, as tables of Markdown.

`make test` writes the file, build/tests.xml. The kind of a test is what its file needs that takes long; a file that needs
several counts for the first of KINDS.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {
    "notebooks and examples": r"test_notebooks|test_examples",
    "browsers and terminals": r"\bbrowser\b|pexpect|pty\.|script -q",
    "new interpreters": r"sys\.executable|forkserver|forked",
    "servers": r"http_server|TestClient|serving|create_app",
    "interpreted Triton": r"triton_interpreter|simulated_device|fake_cuda|emulated_gpu|tests/attention/test_triton",
    "compiled kernels": r"\bkernels\b|precompiled|native",
    "reference models": r"transformers",
    "the rest": "",
}


@cache
def kind_of(file: str) -> str:
    path = ROOT / file
    text = file + (path.read_text(encoding="utf-8") if path.exists() else "")
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, text))


def folder_of(file: str) -> str:
    return "/".join(file.split("/")[1:-1][:2]) or "."


def read(junit: Path) -> list[tuple[str, str, float]]:
    """The file, the name and the seconds of each test."""
    cases = ElementTree.parse(junit).iter("testcase")
    return [
        (case.attrib["classname"].replace(".", "/") + ".py", case.attrib["name"], float(case.attrib["time"])) for case in cases
    ]


def table(tests: list[tuple[str, float]], title: str, key: Callable[[str], str]) -> str:
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for file, took in tests:
        seconds[key(file)] += took
        number[key(file)] += 1
    rows = [f"| {name} | {number[name]} | {took:.1f} |" for name, took in seconds.most_common()]
    return "\n".join([f"| {title} | tests | seconds |", "|---|---|---|", *rows])


def main(junit: Path) -> None:
    if not junit.exists():
        sys.exit(f"there is no {junit}; make test writes build/tests.xml")
    tests = [(file, took) for file, _, took in read(junit)]
    print(f"{len(tests)} tests, {sum(took for _, took in tests):.0f} s, the sum of all processes\n")
    print(table(tests, "kind", kind_of), table(tests, "folder", folder_of), sep="\n\n")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]) if sys.argv[1:] else ROOT / "build/tests.xml")
