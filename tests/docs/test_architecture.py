"""The folders import each other as the table says, without a circle. Bookkeeping imports no torch. No file is too long."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nanoinfer

PACKAGE = Path(nanoinfer.__file__).parent
VOCABULARY = ("errors", "sampling_params", "structured_outputs", "inputs", "outputs", "config")

# folder -> the folders that its files may import. "words" are VOCABULARY, the public names that need no torch.
ALLOWED = {
    "words": set(),
    "tracing": {"words"},
    "devices": {"words"},
    "tokenization": {"words"},
    "scheduling": {"words", "tracing"},
    "attention": {"words", "devices"},
    "models": {"words", "devices", "tokenization", "attention"},
    "sampling": {"words", "tracing", "devices", "tokenization", "scheduling"},
    "execution": {"words", "tracing", "devices", "tokenization", "scheduling", "attention", "models", "sampling"},
    "distributed": {"words", "devices", "tokenization", "scheduling", "attention", "models", "sampling", "execution"},
    "speculative": {"words", "tracing", "scheduling", "execution"},
    "engine": {"words", "tracing", "tokenization", "scheduling", "models", "execution", "speculative"},
    "llm": {"words", "tracing", "tokenization", "sampling", "engine"},
    "async_llm": {"words", "engine", "llm"},
    "server": {"words", "tracing", "tokenization", "engine", "async_llm"},
    "bundled": {"words", "llm"},
    "bench": {"words", "tracing", "devices", "scheduling", "attention", "models", "sampling", "engine", "llm", "server"},
    "cli": {
        "words",
        "tracing",
        "devices",
        "scheduling",
        "attention",
        "models",
        "execution",
        "llm",
        "async_llm",
        "server",
        "bench",
    },
}


def folder_of(module: str) -> str | None:
    """nanoinfer.models.qwen -> models; the package itself, which imports nothing by itself -> None."""
    first = [*module.split("."), ""][1]
    return "words" if first in VOCABULARY else first or None


def imports_of(path: Path) -> set[str]:
    """The package's modules that a file imports, in functions too, those for type checkers alone left out."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.ImportFrom) and node.module == "nanoinfer":
            found.update(f"nanoinfer.{alias.name}" for alias in node.names if not alias.name.startswith("__"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoinfer."):
            found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("nanoinfer"))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {name: "nanoinfer." + name.removesuffix(".py").replace("/", ".") for name in FILES if not name.startswith("__")}


def test_the_table_has_every_folder_and_no_other():
    assert {folder_of(module) for module in MODULES.values()} == set(ALLOWED)


def test_the_table_has_no_circle():
    assert next(iter(TopologicalSorter(ALLOWED).static_order())) == "words"


@pytest.mark.parametrize("name", MODULES)
def test_a_file_imports_only_from_the_folders_that_the_table_allows(name):
    folder = folder_of(MODULES[name])
    for imported in imports_of(FILES[name]):
        assert folder_of(imported) in {folder, None} | ALLOWED[folder], f"{name} imports {imported}"


def test_an_import_that_points_upwards_would_be_seen():
    imported = {folder_of(module) for module in imports_of(FILES["engine/llm_engine.py"])}
    assert {"scheduling", "execution"} <= imported
    assert not imported <= ALLOWED["scheduling"]


def test_the_listing_is_short():
    assert len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]) <= 25


def test_no_file_is_too_long_to_read():
    assert [name for name, path in FILES.items() if len(path.read_text(encoding="utf-8").splitlines()) > 400] == []


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_bookkeeping_imports_no_torch():
    light = ("words", "tracing", "tokenization", "scheduling", "speculative", "engine")
    modules = [module for module in MODULES.values() if folder_of(module) in light and not module.endswith("__init__")]
    assert len(modules) > 15
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
