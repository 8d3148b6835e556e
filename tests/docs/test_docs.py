"""The pages name files that exist, and link to pages that exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [
    "README.md",
    "README.zh.md",
    "AGENTS.md",
    "BENCHMARKS.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/README.md",
    "one_file/README.md",
]
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = [ROOT, ROOT / "nanoinfer", *(path for path in ROOT.glob("nanoinfer*/*") if path.is_dir()), *ROOT.glob("tests/*")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_files_that_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = set(re.findall(r"`([\w./-]+\.(?:py|html))`", text))
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in FOLDERS)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_links_to_files_and_headings_that_exist(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles]


def test_the_commands_and_folders_for_agents_exist():
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    assert set(re.findall(r"\bmake ([\w-]+)", page)) <= set(targets)
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert set(re.findall(r"\bmake (\w+)", container["postCreateCommand"])) == {"demo"}
    paths = re.findall(r"`([\w./]+/[\w.]*)`", page)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_lesson_fills_its_time_and_every_notebook_is_in_a_lesson():
    page = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
    lessons = [part for part in page.split("\n## ") if part[0].isdigit()]
    assert len(lessons) == 4
    for lesson in lessons:
        assert sum(int(minutes) for minutes in re.findall(r"^\| (\d+) \|", lesson, re.MULTILINE)) == 90
        assert (ROOT / "docs" / re.search(r"\]\((pictures/[\w-]+\.svg)\)", lesson)[1]).exists()
    chapters = (ROOT / "notebooks").glob("[0-9d]*.ipynb")
    assert set(re.findall(r"notebooks/(\S+\.ipynb)\)", page)) == {path.name for path in chapters}


def test_what_the_other_engines_of_the_table_run_on_is_missing_here_by_name():
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    (ours,) = [row for row in rows if row[0] == "nanoinfer"]
    vendors = {word for row in rows[1:] for word in re.findall(r"\b[A-Z]\w+", row[4]) if row is not ours}
    missing = page.split("### What other engines have and nanoinfer does not")[1].split("\n## ")[0]
    assert vendors - set(re.findall(r"\w+", ours[4])) == {"AMD", "Apple"} <= set(re.findall(r"\w+", missing))
    assert "(#what-other-engines-have-and-nanoinfer-does-not)" in ours[-1]
