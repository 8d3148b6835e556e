"""The core imports nothing of features, the folders have no circle, bookkeeping imports no torch, functions are short."""

import ast
import glob
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import nanoinfer
from tests.helpers import scripts, shape_checks
from tools.structure import (
    BUILDERS,
    FILES,
    MODULES,
    PACKAGE,
    PARTS,
    base_classes,
    files_of,
    folder_of,
    imports_of,
    leaving,
    part_of,
)

# The parts of docs/architecture.md -> those that a file of the part may import, in functions and for type checkers too.
MAY_IMPORT = {
    "interface": {"interface", "machine"},
    "machine": {"interface", "machine"},
    "features": {"interface", "machine", "features", "fast"},
    "fast": {"interface", "machine", "features", "fast"},
    "users": PARTS.keys(),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PACKAGES = [PACKAGE, PACKAGE.with_name("nanoinfer_lab"), PACKAGE.with_name("nanoinfer_course")]
ALL_FILES = {path.relative_to(PACKAGE.parent).as_posix(): path for one in PACKAGES for path in files_of(one)}


def test_every_file_is_in_a_part_or_builds_an_engine():
    assert {name for name, module in MODULES.items() if part_of(module) is None} | {"__init__.py", "__main__.py"} == set(
        BUILDERS
    )


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_file_imports_only_from_the_parts_that_the_table_allows(part):
    files = [name for name, module in MODULES.items() if part_of(module) == part]
    wrong = {(name, one) for name in files for one in imports_of(FILES[name]) if part_of(one) not in MAY_IMPORT[part] | {None}}
    assert wrong == (base_classes() if part == "interface" else set())


def test_llm_has_at_most_four_base_classes_of_features():
    assert 0 < len(base_classes()) <= 4
    assert base_classes() <= set(leaving())


def arrows(names):
    """Which folders the files of each folder import when they run, or when a function of theirs does."""
    graph = {}
    for name in names:
        folder = folder_of(MODULES[name])
        graph.setdefault(folder, set()).update(map(folder_of, imports_of(FILES[name], for_types=False)))
        graph[folder] -= {None, folder}
    return graph


def test_the_folders_import_each_other_without_a_circle():
    names = [name for name, module in MODULES.items() if folder_of(module) is not None]
    graph = arrows(names)
    *_, last = TopologicalSorter(graph).static_order()
    assert last in PARTS["users"]
    assert "scheduling" in graph["engine"] & graph["execution"]
    with pytest.raises(CycleError):  # an import that closes a circle is seen
        TopologicalSorter(graph | {"scheduling": {"engine"}}).prepare()


def test_only_build_opens_the_entry_point_to_fast():
    assert {module for module in imports_of(FILES["build.py"]) if folder_of(module) == "fast"} == {"nanoinfer.fast.accelerate"}


def test_every_folder_of_the_package_belongs_to_a_part_and_every_folder_of_code_has_its_line():
    structure, root = scripts.load("structure"), PACKAGE.parent
    entries = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir()}
    entries = {name for name in entries if name[0] not in "_." and name != "py.typed"}
    assert entries == set(" ".join(structure.PARTS.values()).split())
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    parts = page.partition("\n## The parts of the package\n")[2].partition("\n## ")[0]
    assert entries - set(re.findall(r"`(\w+(?:\.py|/)?)`", parts)) == set()
    listed = set(re.findall(r"^- \[([^]]+)/\]", structure.page(), re.MULTILINE))
    folders = {path.parent.relative_to(root).as_posix() for path in ALL_FILES.values()}
    paths_alone = "nanoinfer/compat/vllm/modules", "nanoinfer/compat/moved"  # of vLLM, and of modules that have moved
    assert {one for one in folders if not one.startswith(paths_alone)} - {"nanoinfer"} == listed
    for folder in filter(Path.is_dir, (PACKAGE / "features").glob("[!_]*")):
        readme = (folder / "README.md").read_text(encoding="utf-8")
        assert [readme.count(part) for part in ("What it does: ", "Hooks: ", "Where to change what:")] == [1, 1, 1], folder


def test_every_module_that_a_setting_of_the_tools_names_exists():
    """A move would otherwise switch off a check of types, shapes or lines, and no command would say so."""
    root = PACKAGE.parent
    tool = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    named = [f"nanoinfer.{name}" for name in shape_checks.ARITHMETIC] + tool["mypy"]["packages"]
    named += tool["coverage"]["run"]["source"] + tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    named += [name for override in tool["mypy"]["overrides"] for name in override["module"] if name.startswith("nanoinfer")]
    places = [root / name.removesuffix(".*").replace(".", "/") for name in named]
    assert [str(path) for path in places if not path.is_dir() and not path.with_suffix(".py").exists()] == []
    for pattern in tool["ruff"]["lint"]["per-file-ignores"]:
        before, among, after = re.fullmatch(r"([^{]*)(?:{(.*)})?(.*)", pattern).groups(default="")
        assert [one for one in among.split(",") if not glob.glob(before + one + after, root_dir=root)] == []


@pytest.mark.slow
def test_no_function_is_longer_than_60_lines():
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in ALL_FILES.items()}
    functions = [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    assert [f"{name}: {node.name}" for name, node in functions if node.end_lineno - node.lineno >= 60] == []


# What fast/ needs of a backend, model or sampler is a method or an attribute of their protocols, so a user's own class is as
# good as one of ours. (dense.py and reference.py are definitions, which features/hybrid extends.)
BACKEND_FILES = [name for name in FILES if re.match(r"attention/(?!__init__|base|kv_cache|dense|reference)", name)]
CONCRETE = {
    node.name
    for name, path in FILES.items()
    if name in BACKEND_FILES or name.startswith("fast/")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.ClassDef)
}


def questions_for_types(source: str) -> list[str]:
    """The expressions that ask whether something is of a concrete class of a backend or of fast/, or who defined it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "__module__":
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            names |= {part.attr for part in ast.walk(node.args[1]) if isinstance(part, ast.Attribute)}
            found += [ast.unparse(node)] * bool(names & CONCRETE)
    return found


def test_nobody_asks_for_a_concrete_backend_or_compiled_class():
    files = [name for name in ALL_FILES if not name.startswith("nanoinfer/fast/")]
    found = {name: questions_for_types(ALL_FILES[name].read_text(encoding="utf-8")) for name in files}
    assert {name: questions for name, questions in found.items() if questions} == {}
    # A question would be seen.
    assert {"CPUBackend", "TritonBackend"} <= CONCRETE
    source = "isinstance(a, cpu.CPUBackend | int)\ntype(a).__module__ == 'nanoinfer'\nisinstance(a, int)"
    assert sorted(questions_for_types(source)) == ["isinstance(a, cpu.CPUBackend | int)", "type(a).__module__"]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_bookkeeping_imports_no_torch():
    light = ("vocabulary", "tokenization", "scheduling", "features.chat", "engine")
    modules = [module for module in MODULES.values() if folder_of(module) in light]
    assert len(modules) > 15
    assert run_python(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)").strip() == "False"


def test_importing_the_package_imports_nothing_else_that_takes_time():
    """Which is why it takes milliseconds: BENCHMARKS.md."""
    imported = {name.split(".")[0] for name in run_python("import sys, nanoinfer; print(*sys.modules)").split()}
    assert "nanoinfer" in imported
    assert not imported & {"torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "jaxtyping", "tqdm", "typer"}


@pytest.mark.slow
def test_running_a_model_imports_no_modelling_code_of_transformers_no_cuda_library_nothing_of_vllms_and_nothing_of_learn():
    run = "LLM(kv_cache_memory=2**22).generate('Once', use_tqdm=False)"
    names = "LLM, AsyncLLM, EngineArgs, SamplingParams"
    imported = run_python(f"import sys; from nanoinfer import {names}; {run}; print(*sys.modules)").split()
    assert "nanoinfer.models.qwen" in imported
    assert not [name for name in imported if "compat" in name.split(".") or name.startswith("nanoinfer_course.learn")]
    assert "transformers.modeling_utils" not in imported
    assert not [name for name in imported if re.match(r"transformers\.models\.(gpt2|qwen\d)\.modeling", name)]
    assert not [name for name in imported if name.split(".")[0] in ("triton", "flash_attn", "nvidia")]


def test_public_names_resolve_and_an_unknown_one_is_an_attribute_error():
    for name in nanoinfer.__all__:
        assert getattr(nanoinfer, name) is not None
    assert set(dir(nanoinfer)) == set(nanoinfer.__all__)
    with pytest.raises(AttributeError, match="LLMs"):
        nanoinfer.LLMs  # noqa: B018
