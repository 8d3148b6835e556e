"""The table "Checkpoints that have run" in checkpoints.md, made of checkpoints.jsonl.

`python docs/checkpoints.py build/real/results.jsonl` takes over the lines that `make test-real` has written, each in place of
the line for the same form on the same machine, and writes the table. Without a file it only writes the table.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
LINES = PAGE.with_suffix(".jsonl")
MARKED = re.compile(r"(<!-- python docs/checkpoints.py -->\n)[\s\S]*?(\n<!-- end -->)")
COLUMNS = ("model", "revision", "date", "machine")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def merged(lines: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put new lines in the place of those of the same model, form and machine, or at the end."""
    by_key = {tuple(line[key] for key in ("model", "form", "machine")): line for line in [*lines, *new]}
    return list(by_key.values())


def table(lines: list[dict[str, Any]]) -> str:
    """Write the lines as Markdown: a table for each model, revision, date and machine."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        rows = groups.setdefault(", ".join(line[name] for name in COLUMNS), [])
        perplexity = ", ".join(f"{name} {value:.2f}" for name, value in line["perplexity"].items())
        rows.append(f"| {line['form']} | {line['equal']} | {perplexity} |")
    head = "| form | tokens equal | perplexity |\n|---|---|---|\n"
    return "\n\n".join(f"{caption}:\n\n{head}" + "\n".join(rows) for caption, rows in groups.items())


def with_table(text: str, lines: list[dict[str, Any]]) -> str:
    """Return the text of checkpoints.md with its table."""
    text, count = MARKED.subn(lambda found: found[1] + table(lines) + found[2], text)
    assert count == 1
    return text


def main(*files: str) -> None:
    lines = read(LINES)
    for file in files:
        lines = merged(lines, read(Path(file)))
    LINES.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
