"""What pages show of one_file/engine.py: its parts as chapters of the site, its sizes, and LLM.step.

`python docs/one_file.py` writes the lines and sizes of today's files into the pages of PAGES.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = "one_file/engine.py"
README = ROOT / "one_file" / "README.md"
MACHINE = ("engine", "scheduling", "execution", "attention", "models", "sampling", "tokenization")
HEADING = re.compile(r"^# ---- (\d+)\. (.+)$", re.MULTILINE)
# | [3. The scheduler](engine.py#L10-L20) | what a reader can answer | the files that grew from it |
ROW = re.compile(r"^\| \[(\d+)\. [^]]*\]\([^)]*\) \| (.+) \| (.+) \|$", re.MULTILINE)
STEP = re.compile(r"(<!-- python docs/one_file.py -->\n\n```python\n).*?(```\n)", re.DOTALL)
# Sentences of pages with sizes. In place of {file}, {first}, {machine} and {all} stands a number.
PAGES = {
    "one_file/README.md": "It has {file} lines, and parts 1 to 8, which are the engine, have {first}",
    "README.md": "has {file} lines, the machine that grew from it {machine}, and all of it,\n"
    "with features, kernels, lab and course, {all}.",
    "README.zh.md": "{file} 行，由它长成的核心代码 {machine} 行，连同各项功能、内核、测量工具和课程共 {all} 行",
    "docs/reading.md": "The one file has {file} lines, parts 1 to 8 have {first}, and the folders of the machine {machine}",
}


@dataclass(frozen=True)
class Part:
    """A part of the file. first, last: its lines, counted from 1. code: the first line after the heading."""

    number: int
    title: str
    first: int
    code: int
    last: int
    source: str


def parts() -> list[Part]:
    text = (ROOT / FILE).read_text(encoding="utf-8")
    found = list(HEADING.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    made = []
    for match, end in zip(found, ends, strict=True):
        after = text[match.end() : end].split("\n# ---- ")[0]  # without a separator that has no number
        source, num_blank = after.strip("\n"), len(after) - len(after.lstrip("\n"))
        first = text.count("\n", 0, match.start()) + 1
        made.append(Part(int(match[1]), match[2], first, first + num_blank, first + num_blank + source.count("\n"), source))
    return made


def chapters() -> str:
    """Return the page with all parts, each with the question that it answers and the files that grew from it."""
    text = (ROOT / FILE).read_text(encoding="utf-8")
    rows = {int(number): words for number, *words in ROW.findall(README.read_text(encoding="utf-8"))}
    lines = ["# engine.py, part by part", "[README](README.md) says how to run it and what it is.", "## The head { #part-0 }"]
    lines.append(_code(text[: HEADING.search(text).start()].strip("\n"), 1))  # type: ignore[union-attr]
    for part in parts():
        question, grown = rows[part.number]
        lines.append(f"## {part.number}. {part.title} {{ #part-{part.number} }}")
        lines.append(f"{question[0].upper()}{question[1:]} In the package: {grown}.")
        lines.append(_code(part.source, part.code))
    return "\n\n".join(lines)


def _code(source: str, first: int) -> str:
    return f'```python linenums="{first}"\n{source}\n```'


def anchor(lines: str | None) -> str:
    """Return the anchor of the chapter that begins at a link's lines, "#L10-L20". No lines: the page's beginning."""
    found = re.match(r"#L(\d+)", lines or "")
    return next((f"#part-{part.number}" for part in parts() if found and part.first == int(found[1])), "")


def sizes() -> dict[str, str]:
    def num_lines(files: Iterator[Path]) -> int:
        return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)

    numbered = {part.number: part for part in parts()}
    machine = (file for folder in MACHINE for file in (ROOT / "nanoinfer" / folder).rglob("*.py"))
    all_files = (file for file in ROOT.glob("nanoinfer*/**/*.*") if file.suffix in (".py", ".cpp", ".h"))
    numbers = {
        "file": num_lines(iter([ROOT / FILE])),
        "first": numbered[9].first - numbered[1].first,
        "machine": num_lines(machine),
        "all": round(num_lines(all_files), -3),
    }
    return {name: f"{number:,}" for name, number in numbers.items()}


def step() -> str:
    """Return the source of LLM.step, as a function, to where the tokens are known."""
    text = (ROOT / FILE).read_text(encoding="utf-8")
    (llm,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "LLM")
    (method,) = (node for node in ast.walk(llm) if getattr(node, "name", "") == "step")
    (loop,) = (node for node in method.body if isinstance(node, ast.For))  # type: ignore[attr-defined]
    lines = text.splitlines()[method.lineno - 1 : loop.lineno - 1]
    return (
        "".join(f"{line[4:]}\n" for line in lines)
        + "    ...  # append the tokens to their sequences, and end the answers that are complete\n"
    )


def written(page: str) -> str:
    """Return a page's text with today's lines and sizes, and with LLM.step where the page shows it."""
    sentence, numbered = PAGES[page], {part.number: part for part in parts()}

    def row(match: re.Match[str]) -> str:
        part = numbered[int(match[1])]
        link = f"[{part.number}. {part.title}](engine.py#L{part.first}-L{part.last})"
        return f"| {link} | {match[2]} | {match[3]} |"

    text = (ROOT / page).read_text(encoding="utf-8")
    text = pattern(sentence).sub(lambda _: sentence.format(**sizes()), text)
    text = STEP.sub(lambda match: f"{match[1]}{step()}{match[2]}", text)
    return ROW.sub(row, text) if page == "one_file/README.md" else text


def pattern(sentence: str) -> re.Pattern[str]:
    """Return the pattern of a sentence with any numbers."""
    return re.compile(re.sub(r"\\\{\w+\\\}", r"[\\d,]+", re.escape(sentence)))


if __name__ == "__main__":
    for each in PAGES:
        (ROOT / each).write_text(written(each), encoding="utf-8")
