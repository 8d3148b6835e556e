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

# The public interface and the machine: a folder -> what its files may import. "common" are VOCABULARY, which needs no torch.
CORE = {
    "common": set(),
    "system": {"common"},
    "tokenization": {"common"},
    "scheduling": {"common"},
    "attention": {"common", "system"},
    "models": {"common", "attention"},
    "loading": {"common", "system", "tokenization", "models"},
    "sampling": {"common", "system", "scheduling"},
    "execution": {"common", "system", "tokenization", "scheduling", "attention", "models", "loading", "sampling"},
    "engine": {"common", "system", "tokenization", "scheduling", "loading", "sampling", "execution"},
    "llm": {"common", "engine"},
}
# The features, with a folder of features/ or of the package, and fast/. They may import the machine. A folder -> what else.
FEATURES = {
    "features.chat": {"features.structured"},
    "features.drafts": {"features.tracing"},
    "features.reasoning": {"features.chat"},
    "fast": {"features.adapters"},
    "features.distributed": {"fast"},
    "features.training": {"fast", "features.logprobs"},
}
# Who uses all of them -> which of these it may import besides.
USERS = {
    "compat": {"server"},
    "server": {"compat"},
    "cli": {"server"},
    "testing": set(),
}

# The files that put an engine together, and may name every feature.
BUILDERS = {"build.py", "load.py"}
# What other files of the core name of features, in functions and for type checkers too. The list may only become shorter.
NAMED = {
    "engine/inputs.py": {"nanoinfer.features.chat.messages"},
    "llm.py": {
        "nanoinfer.features.chat.messages",
        "nanoinfer.features.chat.tools",
        "nanoinfer.features.embedding",
        "nanoinfer.features.embedding.pooling",
        "nanoinfer.features.adapters.request",
        "nanoinfer.features.beam_search.search",
        "nanoinfer.features.training",
        "nanoinfer.features.training.rollouts",
    },
}


def folder_of(module: str) -> str | None:
    """nanoinfer.models.qwen -> models, nanoinfer.features.drafts.ngram -> features.drafts; the package itself -> None."""
    _, *folders = module.split(".")
    if not folders or folders == ["features"]:
        return None
    if folders[0] == "features":
        return ".".join(folders[:2])
    return "common" if folders[0] in VOCABULARY else folders[0]


def imports_of(path: Path, *, for_types: bool = False) -> set[str]:
    """The package's modules that a file imports, in functions too, and, if asked, those for type checkers alone."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            return
        if isinstance(node, ast.ImportFrom) and node.module in ("nanoinfer", "nanoinfer.features"):
            found.update(f"{node.module}.{alias.name}" for alias in node.names if not alias.name.startswith("__"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoinfer."):
            found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("nanoinfer"))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


PACKAGES = [PACKAGE, PACKAGE.with_name("nanoinfer_lab"), PACKAGE.with_name("nanoinfer_course")]
ALL_FILES = {path.relative_to(PACKAGE.parent).as_posix(): path for one in PACKAGES for path in sorted(one.rglob("*.py"))}
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {
    name: "nanoinfer." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name in FILES
    if not name.startswith("__")
}
FOLDERS = {folder for module in MODULES.values() if (folder := folder_of(module))}
MACHINE = CORE.keys() - {"llm"}


def allowed(folder: str) -> set[str | None]:
    """The folders that a folder's files may import."""
    if folder in CORE:
        return {None, folder} | CORE[folder]
    if folder in USERS:
        return {None, folder} | (FOLDERS - USERS.keys()) | USERS[folder]
    return {None, folder} | MACHINE | FEATURES.get(folder, set())


def test_the_tables_have_every_folder_and_no_other():
    features = {folder for folder in FOLDERS if folder.startswith("features.")} | FEATURES.keys()
    assert features | CORE.keys() | USERS.keys() == FOLDERS


def test_the_tables_have_no_circle():
    order = [*TopologicalSorter({folder: allowed(folder) - {None, folder} for folder in FOLDERS}).static_order()]
    assert order[0] == "common"


@pytest.mark.parametrize("name", MODULES)
def test_a_file_imports_only_from_the_folders_that_the_tables_allow(name):
    folder = folder_of(MODULES[name])
    if name not in BUILDERS and folder is not None:
        outside = {module for module in imports_of(FILES[name]) if folder_of(module) not in allowed(folder)}
        assert outside <= NAMED.get(name, set())


def test_the_core_names_no_features_but_those_of_the_list():
    named = {}
    for name in MODULES.keys() - BUILDERS:
        if folder_of(MODULES[name]) in CORE:
            named[name] = {one for one in imports_of(FILES[name], for_types=True) if folder_of(one) not in {None} | CORE.keys()}
    assert {name: modules for name, modules in named.items() if modules} == NAMED


def test_an_import_that_points_upwards_would_be_seen():
    imported = {folder_of(module) for module in imports_of(FILES["engine/llm_engine.py"])}
    assert {"scheduling", "execution"} <= imported
    assert not imported <= allowed("scheduling")
    assert "chat" not in allowed("engine")


def test_only_build_opens_the_entry_point_to_fast():
    assert {module for module in imports_of(FILES["build.py"]) if folder_of(module) == "fast"} == {"nanoinfer.fast.accelerate"}


def test_the_page_names_every_file_and_folder():
    listing = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if not path.name.startswith(("_", "py.typed"))}
    listing |= {path.name for path in (PACKAGE / "features").iterdir() if path.is_dir() and not path.name.startswith("_")}
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    parts = page.partition("\n## The parts of the package\n")[2].partition("\n## ")[0]
    assert listing - set(re.findall(r"`(\w+(?:\.py|/)?)`", parts)) == set()


def test_models_are_python_alone():
    files = [path for path in (PACKAGE / "models").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} == {".py"}


def test_no_function_is_longer_than_60_lines():
    long = [
        f"{name}: {node.name} has {num_lines} lines"
        for name, path in ALL_FILES.items()
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


@pytest.mark.parametrize("name", [name for name in ALL_FILES if not name.startswith("nanoinfer/fast/")])
def test_nobody_asks_for_a_concrete_backend_or_compiled_class(name):
    assert questions_for_types(ALL_FILES[name].read_text(encoding="utf-8")) == []


def test_a_question_for_a_concrete_class_would_be_seen():
    assert {"CPUBackend", "TritonBackend"} <= CONCRETE
    source = "isinstance(a, cpu.CPUBackend | int)\ntype(a).__module__ == 'nanoinfer'\nisinstance(a, int)"
    assert sorted(questions_for_types(source)) == ["isinstance(a, cpu.CPUBackend | int)", "type(a).__module__"]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_bookkeeping_imports_no_torch():
    light = ("common", "tokenization", "scheduling", "chat", "engine")
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
