"""The house stands as its map says: floors hold, there is no circle, every file is on the map, the light floors stay light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanoinfer

PACKAGE = Path(nanoinfer.__file__).parent
ENTRANCES = {
    "__init__.py",
    "__main__.py",
    "attention/__init__.py",
    "sampling/__init__.py",
    "bench/__init__.py",
}  # words and a door, no rooms


def read_map() -> dict[str, tuple[int, int]]:
    """file -> (floor, place on the map), from the package docstring."""
    places, floor = {}, None
    for line in nanoinfer.__doc__.splitlines():
        if heading := re.match(r"    floor (\d)", line):
            floor = int(heading[1])
        elif room := re.match(r"      (\S+\.py)  ", line):
            places[room[1]] = (floor, len(places))
    return places


def imports_of(path: Path, at_run_time_only: bool = True) -> set[str]:
    """The package files that a file imports, functions' imports included, TYPE_CHECKING blocks left out."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoinfer"):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("nanoinfer")]
        for name in names:
            relative = "/".join(name.split(".")[1:])
            for candidate in (f"{relative}.py", f"{relative}/__init__.py"):
                if relative and (PACKAGE / candidate).is_file():
                    found.add(candidate)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found - ENTRANCES


PLACES = read_map()
FILES = {
    str(path.relative_to(PACKAGE)): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "checkpoints"
}


def test_every_file_is_on_the_map_and_every_room_on_the_map_exists():
    assert set(PLACES) == set(FILES) - ENTRANCES


@pytest.mark.parametrize("name", PLACES)
def test_a_file_imports_only_from_lower_floors_or_from_above_it_on_its_own(name):
    floor, place = PLACES[name]
    for imported in imports_of(FILES[name]):
        other_floor, other_place = PLACES[imported]
        assert other_floor < floor or (other_floor == floor and other_place < place), f"{name} imports {imported}"


def test_the_reader_of_imports_sees_them():
    assert {"scheduler.py", "models/__init__.py", "attention/base.py"} <= imports_of(FILES["engine.py"])


def test_no_room_is_too_large_to_read():
    assert [name for name, path in FILES.items() if len(path.read_text().splitlines()) > 400] == []


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_floors_of_words_and_bookkeeping_import_no_torch():
    modules = [f"nanoinfer.{name[:-3]}" for name, (floor, _) in PLACES.items() if floor < 2]
    assert len(modules) > 10
    assert run_python(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)").strip() == "False"


def test_importing_the_package_imports_nothing_else_that_takes_time():
    """Which is why it takes milliseconds: BENCHMARKS.md."""
    imported = {name.split(".")[0] for name in run_python("import sys, nanoinfer; print(*sys.modules)").split()}
    assert "nanoinfer" in imported
    assert not imported & {"torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "jaxtyping", "tqdm", "typer"}


def test_running_a_model_imports_no_modelling_code_of_transformers_and_no_cuda_library():
    run = "LLM(kv_cache_memory=2**22).generate('Once', use_tqdm=False)"
    imported = run_python(f"import sys; from nanoinfer import LLM; {run}; print(*sys.modules)").split()
    assert "nanoinfer.models.qwen" in imported
    assert "transformers.modeling_utils" not in imported
    assert not [name for name in imported if re.match(r"transformers\.models\.(gpt2|qwen\d)\.modeling", name)]
    assert not [name for name in imported if name.split(".")[0] in ("triton", "flash_attn", "nvidia")]


def test_public_names_resolve_and_an_unknown_one_is_an_attribute_error():
    for name in nanoinfer.__all__:
        assert getattr(nanoinfer, name) is not None
    assert set(dir(nanoinfer)) == set(nanoinfer.__all__)
    with pytest.raises(AttributeError, match="LLMs"):
        nanoinfer.LLMs  # noqa: B018
