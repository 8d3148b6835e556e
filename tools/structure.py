"""Print the figures of the package's structure, from the sources alone: `python -m tools.structure`.

docs/architecture.md says what the parts are. tests/docs/test_architecture.py checks the imports by the functions here.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nanoinfer"
VOCABULARY = ("errors", "sampling_params", "outputs", "config", "arguments")  # of the interface, what needs no torch
PARTS = {
    "interface": ("llm", *VOCABULARY),
    "machine": ("engine", "scheduling", "execution", "attention", "models", "sampling", "tokenization", "loading", "system"),
    "features": ("features",),
    "fast": ("fast",),
    "users": ("server", "cli", "testing", "compat"),
}
BUILDERS = ("build.py", "load.py", "__init__.py", "__main__.py")  # they may name every feature
# Words that tell that a file knows of a feature, looked for without docstrings and comments, where a step is planned and run.
WORDS = {
    "drafts": r"draft|speculat",
    "adapters": r"\badapter|lora",
    "grammar": r"grammar",
    "reasoning": r"thought|thinking",
    "tracing": r"\btracer\b|tracing",
    "disk cache": r"\bstore\b|stored_blocks",
    "states": r"state_slot|\bstates\b",
    "windows": r"\bwindows?\b",
    "beam search": r"\bbeam",
    "MTP": r"\bmtp\b|hidden_slots",
    "prompt log-probabilities": r"prompt_logprobs|wants_prompt_rows",
}
REACHED = ("engine/", "scheduling/", "execution/", "sampling/")


def files_of(folder: Path, *kinds: str) -> list[Path]:
    """The files below a folder, in order. kinds: endings, by default Python's."""
    return sorted(path for kind in kinds or ("py",) for path in folder.rglob(f"*.{kind}") if "__pycache__" not in path.parts)


FILES = {path.relative_to(PACKAGE).as_posix(): path for path in files_of(PACKAGE)}
MODULES = {
    name: "nanoinfer." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name in FILES
    if not name.startswith("__")
}
ENTRIES = sorted(path.name for path in PACKAGE.iterdir() if path.name[0] != "_" and path.name != "py.typed")


def part_of(module: str) -> str | None:
    """nanoinfer.models.qwen -> machine. None: a builder, or a name that nanoinfer/__init__.py passes on."""
    first = module.split(".")[1:2]
    return next((part for part, names in PARTS.items() if first and first[0] in names), None)


def folder_of(module: str) -> str | None:
    """nanoinfer.models.qwen -> models, nanoinfer.features.drafts.ngram -> features.drafts, nanoinfer.errors -> vocabulary."""
    _, *parts = module.split(".")
    if part_of(module) is None or parts == ["features"] or parts[-1] == "LoadedLLM":
        return None
    return "vocabulary" if parts[0] in VOCABULARY else ".".join(parts[: 2 if parts[0] == "features" else 1])


def imports_of(path: Path, *, for_types: bool = True) -> set[str]:
    """The package's modules that a file imports, in functions too. for_types: whether those under TYPE_CHECKING count."""
    found = set[str]()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            return
        if isinstance(node, ast.ImportFrom) and node.module in ("nanoinfer", "nanoinfer.features"):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoinfer."):
            found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("nanoinfer."))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def core_files() -> dict[str, Path]:
    """The files of the public interface and of the machine."""
    return {name: FILES[name] for name, module in MODULES.items() if part_of(module) in ("interface", "machine")}


def leaving() -> Iterator[tuple[str, str]]:
    """The imports by which the core names other parts: (file, module)."""
    for name, path in core_files().items():
        yield from ((name, one) for one in sorted(imports_of(path)) if part_of(one) not in (None, "interface", "machine"))


def base_classes() -> set[tuple[str, str]]:
    """The imports that bring LLM its base classes."""
    tree = ast.parse(FILES["llm.py"].read_text(encoding="utf-8"))
    (llm,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LLM")
    bases = {ast.unparse(base) for base in llm.bases}
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return {("llm.py", str(node.module)) for node in imports if bases & {alias.name for alias in node.names}}


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def main() -> None:
    text = {name: path.read_text(encoding="utf-8") for name, path in core_files().items()}
    code = {name: re.sub(r'(?s:""".*?""")|#.*', "", one) for name, one in text.items()}
    others = [edge for edge in leaving() if edge not in base_classes()]
    print(f"imports by which the core names other parts: {len(others)}, and LLM's {len(base_classes())} base classes")
    print(*(f"    {name} -> {module}" for name, module in others), sep="\n", end="\n" * bool(others))
    print("files of the public interface and of engine, scheduling, execution, sampling with the word of a feature:")
    for feature, word in WORDS.items():
        reached = [name for name in code if "/" not in name or name.startswith(REACHED)]
        found = [name for name in reached if re.search(word, code[name], re.IGNORECASE)]
        print(f"    {feature} {len(found)}: {', '.join(found)}")
    num_none = sum(len(re.findall(r"\bis (?:not )?None\b", one)) for name, one in text.items() if name.startswith(REACHED))
    print(f"`is None` in engine, scheduling, execution, sampling: {num_none}")
    for tangler in (
        path for path in files_of(ROOT / "nanoinfer_course") + files_of(ROOT / "tools") if path.name == "tangle.py"
    ):
        facts = re.search(r"(?ms)^FACTS\b[^=]*= *(\{\}|.*?^\})", tangler.read_text(encoding="utf-8"))
        print(f"FACTS of {tangler.relative_to(ROOT)}: {len(ast.literal_eval(facts[1])) if facts else 'absent'}")
    for template in sorted(ROOT.glob("*/**/engine.py.txt")):
        print(f"lines of {template.relative_to(ROOT)}: {lines([template])}")
    print(f"words of docs/architecture.md: {len((ROOT / 'docs/architecture.md').read_text(encoding='utf-8').split())}")
    print(f"entries of nanoinfer/: {len(ENTRIES)}")
    kinds = ("py", "cpp", "h", "html", "js", "css")
    for part, names in PARTS.items():
        sizes = {name: lines(files_of(PACKAGE / name, *kinds) or [PACKAGE / f"{name}.py"]) for name in names}
        print(f"lines of {part}: {sum(sizes.values()):,} ({', '.join(f'{name} {size:,}' for name, size in sizes.items())})")
    for folder in ("nanoinfer", "nanoinfer_lab", "nanoinfer_course", "one_file", "tests"):
        print(f"lines of {folder}/: {lines(files_of(ROOT / folder, *kinds)):,}")


if __name__ == "__main__":
    main()
