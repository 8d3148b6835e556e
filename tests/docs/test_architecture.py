"""The folders import each other as the table says, without a circle. Bookkeeping imports no torch. Functions are short."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nanoinfer

PACKAGE = Path(nanoinfer.__file__).parent
VOCABULARY = ("errors", "sampling_params", "outputs", "config", "arguments")

# folder -> the folders that its files may import. "common" are VOCABULARY, which needs no torch.
ALLOWED = {
    "common": set(),
    "system": {"common"},
    "tracing": {"common"},
    "tokenization": {"common"},
    "scheduling": {"common", "tracing"},
    "attention": {"common", "system"},
    "models": {"common", "attention"},
    "loading": {"common", "system", "tokenization", "models"},
    "sampling": {"common", "system", "tracing", "tokenization", "scheduling"},
    "chat": {"common", "system", "tokenization", "sampling"},
    "execution": {"common", "system", "tracing", "tokenization", "scheduling", "attention", "models", "loading", "sampling"},
    "fast": {"common", "system", "scheduling", "attention", "models", "loading", "sampling", "execution", "lora"},
    "lora": {"common", "system", "scheduling", "loading", "execution"},
    "engine": {
        *("common", "system", "tracing", "tokenization", "scheduling", "loading", "sampling", "chat", "execution"),
        *("lora", "fast"),
    },
    "distributed": {
        *("common", "system", "scheduling", "attention", "models", "loading", "sampling", "execution", "fast"),
        "engine",
    },
    "training": {"common", "system", "scheduling", "attention", "models", "loading", "sampling", "execution", "fast", "engine"},
    "embedding": {"common", "scheduling", "loading", "execution", "engine"},
    "llm": {"common", "tracing", "sampling", "chat", "engine", "training", "embedding"},
    "testing": {"common", "tracing", "scheduling", "engine", "llm"},
    "async_llm": {"common", "system", "lora", "engine", "training", "embedding", "llm"},
    "server": {"common", "system", "tracing", "tokenization", "chat", "lora", "engine", "training", "embedding", "async_llm"},
    "compat": {"common", "lora", "sampling", "engine", "distributed", "embedding", "llm", "async_llm"},
    "lab": {
        *("common", "tracing", "scheduling", "attention", "loading", "sampling", "execution", "fast"),
        *("engine", "llm", "server"),
    },
    "cli": {
        *("common", "system", "tracing", "scheduling", "attention", "models", "loading", "execution", "lora", "fast", "engine"),
        *("llm", "testing", "async_llm", "server", "lab"),
    },
}

# The import that the table does not allow: rank 0 starts the other ranks while it loads, and each of them builds its runner.
EXCEPTIONS = {"engine/load.py": {"nanoinfer.distributed.launch"}}


def folder_of(module: str) -> str | None:
    """nanoinfer.models.qwen -> models; the package itself, which imports nothing by itself -> None."""
    first = [*module.split("."), ""][1]
    return "common" if first in VOCABULARY else first or None


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
    assert next(iter(TopologicalSorter(ALLOWED).static_order())) == "common"


@pytest.mark.parametrize("name", MODULES)
def test_a_file_imports_only_from_the_folders_that_the_table_allows(name):
    folder = folder_of(MODULES[name])
    for imported in imports_of(FILES[name]) - EXCEPTIONS.get(name, set()):
        assert folder_of(imported) in {folder, None} | ALLOWED[folder], f"{name} imports {imported}"


def test_an_import_that_points_upwards_would_be_seen():
    imported = {folder_of(module) for module in imports_of(FILES["engine/llm_engine.py"])}
    assert {"scheduling", "execution"} <= imported
    assert not imported <= ALLOWED["scheduling"]


def test_only_build_opens_the_entry_point_to_fast():
    importers = {name for name in MODULES if name.startswith("engine/") and fast_imports(FILES[name])}
    assert importers == {"engine/build.py"}
    assert fast_imports(FILES["engine/build.py"]) == {"nanoinfer.fast.accelerate"}


def fast_imports(path: Path) -> set[str]:
    return {module for module in imports_of(path) if folder_of(module) == "fast"}


def test_the_table_of_the_page_names_every_file_and_folder():
    listing = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if not path.name.startswith(("_", "py.typed"))}
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("\n| folder | what it does")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+(?:\.py|/))`", table)) == listing


def test_models_are_python_alone():
    files = [path for path in (PACKAGE / "models").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} == {".py"}


def test_no_function_is_longer_than_60_lines():
    long = [
        f"{name}: {node.name} has {num_lines} lines"
        for name, path in FILES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (num_lines := node.end_lineno - node.lineno + 1) > 60
    ]
    assert long == []


# What fast/ needs of a backend, model or sampler is a method or an attribute of their protocols, so a user's own class is as
# good as one of ours.
BACKEND_FILES = [name for name in FILES if re.match(r"attention/(?!__init__|base|kv_cache)", name)]
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


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("fast/")])
def test_nobody_asks_for_a_concrete_backend_or_compiled_class(name):
    assert questions_for_types(FILES[name].read_text(encoding="utf-8")) == []


def test_a_question_for_a_concrete_class_would_be_seen():
    assert {"CPUBackend", "TritonBackend"} <= CONCRETE
    source = "isinstance(a, cpu.CPUBackend | int)\ntype(a).__module__ == 'nanoinfer'\nisinstance(a, int)"
    assert sorted(questions_for_types(source)) == ["isinstance(a, cpu.CPUBackend | int)", "type(a).__module__"]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_bookkeeping_imports_no_torch():
    light = ("common", "tracing", "tokenization", "scheduling", "chat", "engine")
    modules = [module for module in MODULES.values() if folder_of(module) in light and not module.endswith("__init__")]
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
