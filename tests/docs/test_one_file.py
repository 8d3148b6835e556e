"""The pages of the one file have today's lines, sizes and LLM.step. `python docs/one_file.py` writes them."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def one_file():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import one_file

        return one_file
    finally:
        sys.path.remove(str(ROOT / "docs"))


@pytest.mark.parametrize("page", ["one_file/README.md", "README.md", "README.zh.md", "docs/reading.md"])
def test_a_page_has_todays_lines_and_sizes(one_file, page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(one_file.pattern(one_file.PAGES[page]).findall(text)) == 1
    assert one_file.written(page) == text, "run: python docs/one_file.py"


def test_every_part_has_its_row_and_its_chapter(one_file):
    numbers = [part.number for part in one_file.parts()]
    text = one_file.README.read_text(encoding="utf-8")
    assert [int(number) for number, *_ in one_file.ROW.findall(text)] == numbers == list(range(1, len(numbers) + 1))
    page = one_file.chapters()
    assert re.findall(r"{ #part-(\d+) }", page) == [str(number) for number in (0, *numbers)]
    code = "\n".join(re.findall(r"^```python linenums=\"\d+\"\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    lines = (ROOT / one_file.FILE).read_text(encoding="utf-8").splitlines()
    assert [line for line in code.splitlines() if line] == [line for line in lines if line and not line.startswith("# ---- ")]


def test_a_chapter_counts_the_lines_of_the_file(one_file):
    lines = (ROOT / one_file.FILE).read_text(encoding="utf-8").splitlines()
    for first, code in re.findall(r'^```python linenums="(\d+)"\n(.*?)\n', one_file.chapters(), re.MULTILINE):
        assert lines[int(first) - 1] == code
    part = one_file.parts()[3]
    assert one_file.anchor(f"#L{part.first}-L{part.last}") == "#part-4"
    assert one_file.anchor(None) == one_file.anchor("#L1") == ""


def test_readme_shows_the_step(one_file):
    for page in ("README.md", "README.zh.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert one_file.step() in text
