"""What is published: README's links on an index, versions, renamed modules, the wheel, the container."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import nanoinfer
from nanoinfer.compat.moved_modules import MOVED
from tests.docs.test_coming_from import parsed
from tools import address

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
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


@pytest.mark.parametrize(
    ("name", "extras"), [("constraints-smoke.txt", ["server", "structured"]), ("constraints-lowest.txt", [])]
)
def test_the_oldest_versions_that_are_tested_are_the_lower_bounds(name, extras):
    """Those to run with, and of the extra "test" those to test with."""
    optional = PROJECT["project"]["optional-dependencies"]
    lists = [PROJECT["project"]["dependencies"], *(optional[extra] for extra in extras)]
    names = {Requirement(line).name for lines in lists for line in lines}
    lines = [*(line for each in lists for line in each), *(optional["test"] if name == "constraints-lowest.txt" else [])]
    bounds = {one.name: specifier.version for one in map(Requirement, lines) for specifier in one.specifier}
    pins = dict(line.split("==") for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line[0] != "#")
    wrong = {one for one in names & bounds.keys() if not re.fullmatch(rf"{re.escape(bounds[one])}(\.0)*", pins[one])}
    assert (wrong, len(names & bounds.keys()) > 4) == (set(), True)


def test_the_container_copies_what_the_wheel_is_made_of_and_starts_a_command_that_exists():
    lines = re.sub(r"\\\n *", "", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
    said = {
        word: [line.partition(" ")[2] for line in lines if line.startswith(f"{word} ")] for word in ("COPY", "EXPOSE", "CMD")
    }
    copied = {name for line in said["COPY"] for name in line.split()[:-1]}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"} | set(
        PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ) == copied
    [install] = [shlex.split(line) for line in lines if line.startswith("RUN pip install")]
    extras = re.fullmatch(r"\.\[(.*)\]", install[-1])[1].split(",")
    assert set(extras) <= PROJECT["project"]["optional-dependencies"].keys()
    [command] = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith("ENTRYPOINT ")]
    assert command[0] in PROJECT["project"]["scripts"]
    context = parsed([*command[1:], *json.loads(said["CMD"][-1])])
    assert str(context.params["port"]) == said["EXPOSE"][0]
    assert any(f"127.0.0.1:{said['EXPOSE'][0]}/health" in line for line in lines)
    order = [line.split()[0] if line[:3] != "RUN" else line.split()[1] for line in lines if line and line[0] != "#"]
    last_copy = len(order) - 1 - order[::-1].index("COPY")
    assert last_copy < order.index("pip") < order.index("useradd") < order.index("USER")  # each needs what is before it
    assert next(line for line in lines if line.startswith("USER ")) != "USER root"
