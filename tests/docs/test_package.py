"""What a package index shows: README's links, the changelog, renamed modules, the version."""

import re
import tomllib
from pathlib import Path

import pytest

import nanoinfer
from nanoinfer.compat.moved_modules import MOVED
from tools import address

ROOT = Path(__file__).parents[2]
PUBLIC = "https://github.com/owner/name"


@pytest.mark.parametrize("repository", [None, PUBLIC])
def test_on_an_index_the_links_of_the_readme_lead_to_files_of_the_repository_or_are_gone(repository):
    text = address.with_blocks((ROOT / "README.md").read_text(encoding="utf-8"), repository)
    project = tomllib.loads(address.with_blocks((ROOT / "pyproject.toml").read_text(encoding="utf-8"), repository))
    for change in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    if repository is None:
        assert targets == []
        assert "First the engine in one file." in text
        return
    assert len(targets) > 30
    raw = "https://raw.githubusercontent.com/owner/name/main/"
    assert [target for target in targets if not target.startswith("https://")] == []
    paths = [target.removeprefix(raw).removeprefix(f"{PUBLIC}/blob/main/") for target in targets]
    assert [path for path in paths if not path.startswith("https://") and not (ROOT / path.partition("#")[0]).exists()] == []
    assert f"{raw}docs/pictures/replay-light.gif" in text


def test_a_release_has_at_most_15_lines_for_users_in_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = {part.split("]")[0]: part.splitlines()[1:] for part in text.split("\n## [")[1:]}
    lines = {name: [line for line in part if line and not line.startswith("### ")] for name, part in releases.items()}
    assert {name: len(found) for name, found in lines.items() if not 0 < len(found) <= 15} == {}
    assert [line for found in lines.values() for line in found if len(line) > 140] == []
    assert "](docs/names.md)" in text


def test_a_renamed_module_is_gone_and_its_new_place_exists():
    modules = (ROOT / "docs" / "names.md").read_text(encoding="utf-8").split("## Names")[0]
    lines = [line.split(": ") for block in re.findall(r"```\n(.*?)```", modules, re.DOTALL) for line in block.splitlines()]

    def exists(module):
        paths = [folder / module.replace(".", "/") for folder in (ROOT / "nanoinfer", ROOT)]
        return any((path / "__init__.py").exists() or path.with_suffix(".py").exists() for path in paths)

    old, new = ([name for line in lines for name in line[side].removeprefix("in ").split(", ")] for side in (0, 1))
    assert len(old) > 25
    assert [name for name in old if exists(name)] == []
    assert [name for name in new if not exists(name) and name != "removed"] == []
    working = modules.split("says the new one: ")[1].split(".\n")[0]
    assert {f"nanoinfer.{name}" for name in re.findall(r"`([\w.]+)`", working)} == set(MOVED)


def test_the_changelog_and_the_citation_have_the_version():
    version = nanoinfer.__version__
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == ("Unreleased" if "dev" in version else version)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_wheel_has_every_file_of_the_packages():
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    included = {file.distribution_path for file in builder.recurse_included_files()}
    files = [path for path in ROOT.glob("nanoinfer*/**/*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 200
    assert {path.relative_to(ROOT).as_posix() for path in files} - included == set()
