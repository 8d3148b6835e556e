"""Prose is plain: few semicolons, the field's words. `python tests/docs/test_prose.py [FILE ...]` lists what to change."""

import ast
import io
import json
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nanoinfer"
MAX_SEMICOLONS = 3.0  # per 1,000 words

# Words of the project's old voice, which docs/glossary.md replaces.
OLD_WORDS = re.compile(
    r"\b(told|owed|why_not|can_be_recorded|Recording|recorded\.py|StageWatch|is_wanted_now|_under_way|under way|_last_asked"
    r"|best_cards|hands?|ruler|_what_left_nothing|errors_for_people|naming_the_prompt|(?:is|are|not|be) covered"
    r"|in the box|bytes_of_a_step|blocks_that_fit|sizes_up_to|let out|tell\(\))\b"
)


def prose_of(path: Path) -> str:
    """The docstrings and comments of a Python file, or the Markdown of a page or notebook without its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    if path.suffix != ".py":
        return re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    tree = ast.parse(text)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    parts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, owners)]
    parts = [re.sub(r"^\s*(>>>|\.\.\.) .*$", "", part, flags=re.MULTILINE) for part in parts]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(parts + [token.string for token in tokens if token.type == tokenize.COMMENT])


def semicolons_per_1000_words(prose: str) -> float:
    return 1000 * prose.count(";") / max(len(prose.split()), 1)


def old_words_in(path: Path) -> list[str]:
    """The words that path should not have. In Python files names count, too. On pages "by hand" is allowed."""
    if path.suffix == ".py":
        return OLD_WORDS.findall(path.read_text(encoding="utf-8"))
    return OLD_WORDS.findall(re.sub(r"(?i)\bby hand\b", "", prose_of(path)))


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]
STORIES = {"plots.py", "sentences.py"}  # the sentences that the bundled models learned from
FILES = [
    *sorted(path for path in PACKAGE.rglob("*.py") if path.name not in STORIES),
    *sorted((ROOT / "examples").glob("*.py")),
    *PAGES,
]


def test_the_counter_reads_docstrings_comments_and_markdown(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""One; two.\n\n>>> f(); g()\n"""\nx = "not; prose"  # three; four\n')
    assert prose_of(file).count(";") == 2
    page = tmp_path / "page.md"
    page.write_text("a; b `c; d`\n```\ne; f\n```\n")
    assert prose_of(page).count(";") == 1
    notebook = tmp_path / "notebook.ipynb"
    cells = [{"cell_type": "markdown", "source": ["a; b\n", "c"]}, {"cell_type": "code", "source": ["d; e  # f; g"]}]
    notebook.write_text(json.dumps({"cells": cells}))
    assert prose_of(notebook).count(";") == 1


def test_semicolons_are_few():
    outside = {"notebooks", "examples"}
    package_and_docs = [path for path in FILES if path.parent.name not in outside]
    assert semicolons_per_1000_words("\n".join(map(prose_of, package_and_docs))) <= MAX_SEMICOLONS


def test_semicolons_are_few_on_the_pages():
    assert semicolons_per_1000_words("\n".join(map(prose_of, PAGES))) <= MAX_SEMICOLONS


def test_no_word_of_the_old_voice_is_left():
    found = {str(path.relative_to(ROOT)): old_words_in(path) for path in FILES}
    assert {name: words for name, words in found.items() if words} == {}


if __name__ == "__main__":
    for file in [Path(name) for name in sys.argv[1:]] or FILES:
        prose = prose_of(file)
        rate, words = semicolons_per_1000_words(prose), len(prose.split())
        print(f"{file}: {words} words, {prose.count(';')} semicolons ({rate:.1f} per 1,000)")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if match := OLD_WORDS.search(line):
                print(f"  {number}: {match[0]!r} in {line.strip()[:100]}")
