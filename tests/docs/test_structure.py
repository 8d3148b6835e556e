"""docs/structure.md has a line for each folder, from its docstring or README: `python tests/docs/test_structure.py`."""

import ast
import glob
import re
import tomllib
from pathlib import Path

from tests.helpers import shape_checks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "structure.md"
PARTS = {
    "The public interface": "llm.py config.py sampling_params.py outputs.py errors.py arguments.py",
    "The machine": "engine/ scheduling/ execution/ attention/ models/ sampling/ tokenization/ loading/ system/",
    "What puts them together": "build.py load.py",
    "The features": "features/",
    "What makes it fast": "fast/",
    "Who uses them": "server/ cli/ testing/ compat/",
}
INTRODUCTION = """\
# The folders

[architecture.md](architecture.md) says how they fit together, [reading.md](reading.md) where to begin.
"""


def lines_of(path: Path) -> list[str]:
    """The lines of a file, or of a folder and the folders below it: what its docstring says before a colon, or its README."""
    name = path.relative_to(ROOT).as_posix()
    init, readme = path / "__init__.py" if path.is_dir() else path, path / "README.md"
    if not init.exists():
        return []
    text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))).replace("\n", " ")
    line = f"- [{name}{'/' * path.is_dir()}](../{name}): {re.split(r'[.:] | [(]', text.rstrip('.'))[0]}"
    if path.parent.name == "features":
        line = f"- [{name}/](../{name}/README.md): {readme.read_text(encoding='utf-8').splitlines()[0].removeprefix('# ')}"
    below = sorted(one for one in path.iterdir() if one.is_dir() and one.name != "modules") if path.is_dir() else []
    return [line, *(line for one in below for line in lines_of(one))]


def page() -> str:
    places = {title: [ROOT / "nanoinfer" / name for name in names.split()] for title, names in PARTS.items()}
    places["In the same wheel"] = [ROOT / "nanoinfer_lab", ROOT / "nanoinfer_course"]
    lists = (
        f"\n## {title}\n\n" + "\n".join(line for path in paths for line in lines_of(path)) for title, paths in places.items()
    )
    return INTRODUCTION + "\n".join(lists) + "\n"


def test_the_page_is_that_of_todays_docstrings():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/docs/test_structure.py"


def test_every_folder_of_the_package_belongs_to_a_part_and_every_folder_of_code_its_docstring():
    entries = {path.name + "/" * path.is_dir() for path in (ROOT / "nanoinfer").iterdir()}
    assert {name for name in entries if name[0] not in "_." and name != "py.typed"} == set(" ".join(PARTS.values()).split())
    listed = set(re.findall(r"^- \[([^]]+)/\]", page(), re.MULTILINE))
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for one in ("nanoinfer", "nanoinfer_lab", "nanoinfer_course")
        for path in ROOT.joinpath(one).rglob("*.py")
    }
    paths_alone = "nanoinfer/compat/vllm/modules", "nanoinfer/compat/moved"  # of vLLM, and of modules that have moved
    assert {one for one in folders if not one.startswith(paths_alone)} - {"nanoinfer"} == listed


def test_every_module_that_a_setting_of_the_tools_names_exists():
    """A move would otherwise switch off a check of types, shapes or lines, and no command would say so."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    named = (
        [f"nanoinfer.{name}" for name in shape_checks.ARITHMETIC] + tool["mypy"]["packages"] + tool["coverage"]["run"]["source"]
    )
    named += tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    named += [name for override in tool["mypy"]["overrides"] for name in override["module"] if name.startswith("nanoinfer")]
    places = [ROOT / name.removesuffix(".*").replace(".", "/") for name in named]
    assert [str(path) for path in places if not path.is_dir() and not path.with_suffix(".py").exists()] == []
    for pattern in tool["ruff"]["lint"]["per-file-ignores"]:
        before, among, after = re.fullmatch(r"([^{]*)(?:{(.*)})?(.*)", pattern).groups(default="")
        assert [one for one in among.split(",") if not glob.glob(before + one + after, root_dir=ROOT)] == []


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
