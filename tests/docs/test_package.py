"""What a package index and GitHub show: addresses, README's links, the version."""

import re
import sys
import tomllib
from pathlib import Path

import nanoinfer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))
from header import REPOSITORY  # noqa: E402

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RAW = REPOSITORY.replace("github.com", "raw.githubusercontent.com") + "/main/"


def test_every_address_is_that_of_the_repository():
    pages = ["pyproject.toml", "CITATION.cff", "SECURITY.md", *map(str, (ROOT / ".github").rglob("*.yml"))]
    owner = REPOSITORY.removeprefix("https://github.com/").split("/")[0]
    found = [address for page in pages for address in re.findall(r"https://[\w.]*github\S*", (ROOT / page).read_text("utf-8"))]
    site = f"https://{owner}.github.io/"
    assert len(found) > 8
    assert [address for address in found if not address.startswith((REPOSITORY, RAW, site))] == []
    assert PYPROJECT["project"]["urls"]["Repository"] == REPOSITORY


def test_on_an_index_the_links_of_the_readme_lead_to_files_of_the_repository():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for change in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    assert len(targets) > 30
    assert [target for target in targets if not target.startswith("https://")] == []
    paths = [target.removeprefix(RAW).removeprefix(f"{REPOSITORY}/blob/main/") for target in targets]
    assert [path for path in paths if not path.startswith("https://") and not (ROOT / path.partition("#")[0]).exists()] == []
    assert f"{RAW}docs/pictures/replay-light.gif" in text


def test_a_release_has_at_most_15_lines_for_users_in_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = {part.split("]")[0]: part.splitlines()[1:] for part in text.split("\n## [")[1:]}
    lines = {name: [line for line in part if line and not line.startswith("### ")] for name, part in releases.items()}
    assert {name: len(found) for name, found in lines.items() if not 0 < len(found) <= 15} == {}
    assert [line for found in lines.values() for line in found if len(line) > 140] == []
    assert "](docs/names.md)" in text


def test_a_renamed_module_is_gone_and_its_new_place_exists():
    modules = (ROOT / "docs" / "names.md").read_text(encoding="utf-8").split("## Names")[0]
    rows = re.findall(r"^\| [\d.]+ \| (.+) \| (.+) \|$", modules, re.MULTILINE)

    def exists(module):
        path = ROOT / "nanoinfer" / module.replace(".", "/")
        return (path / "__init__.py").exists() or path.with_suffix(".py").exists()

    old, new = ([name for row in rows for name in re.findall(r"`([\w.]+)`", row[side])] for side in (0, 1))
    assert len(old) > 25
    assert [name for name in old if exists(name)] == []
    assert [name for name in new if not exists(name)] == []


def test_the_changelog_and_the_citation_have_the_version():
    version = nanoinfer.__version__
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == ("Unreleased" if "dev" in version else version)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
