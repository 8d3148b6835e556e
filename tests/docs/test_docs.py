"""The pages name files, symbols and commands that exist, and link to pages that exist."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = "README.md README.zh.md AGENTS.md BENCHMARKS.md CONTRIBUTING.md SECURITY.md".split()
NAMES += ["benchmarks/README.md", "examples/README.md", "one_file/README.md"]
PAGES = [
    *(ROOT / name for name in NAMES),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("nanoinfer/features/*/README.md")),
]
READING = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
FOLDERS = [ROOT, ROOT / "nanoinfer", *(path for path in ROOT.glob("nanoinfer*/*") if path.is_dir()), *ROOT.glob("tests/*")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_and_links_to_files_and_headings_that_exist(page):
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w./-]+\.(?:py|html))`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in (page.parent, *FOLDERS))] == []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        file = page.parent / target if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles]


def test_the_reading_path_names_what_its_files_define():
    rows = re.findall(r"^\| \[\S+\]\((\S+\.py)\) ((?:`[\w.]+`(?:, )?)+) \|", READING, re.MULTILINE)
    assert len(rows) == READING.count("\n| [") > 20
    for file, names in rows:
        tree = ast.parse((ROOT / "docs" / file).read_text(encoding="utf-8"))
        for name in re.findall(r"`([\w.]+)`", names):
            body = tree.body
            for part in name.split("."):
                [body] = [getattr(node, "body", []) for node in body if part in names_of(node)]


def names_of(node):
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    return {getattr(target, "id", getattr(target, "name", None)) for target in targets}


def test_the_chinese_readme_has_commands_and_links_of_the_english_one():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.zh.md", "README.md")]
    for pattern in (r"^(?:source|make|pip|nanoinfer) [a-z.-]+[^#\n]*", r"\]\((?!README)([^)]+)\)"):
        chinese, english = ({one.strip() for one in re.findall(pattern, text, re.MULTILINE)} for text in texts)
        assert len(chinese) > 4
        assert chinese - english == set()


def test_the_commands_and_folders_for_agents_exist():
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    assert set(re.findall(r"\bmake ([\w-]+)", page)) <= set(targets)
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert set(re.findall(r"\bmake (\w+)", container["postCreateCommand"])) == {"demo"}
    paths = re.findall(r"`([\w./]+/[\w.]*)`", page)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []
