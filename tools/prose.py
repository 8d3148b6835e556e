"""Lists semicolons and words that the glossary has replaced: `python tools/prose.py [FILE ...]`."""

import ast
import io
import json
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = [ROOT / name for name in ("nanoinfer", "nanoinfer_lab", "nanoinfer_course")]

# Words of the project's old voice, which the words of docs/glossary.md and HINTS replace.
OLD_WORDS = re.compile(
    r"\b(told|owed|why_not|can_be_recorded|Recording|recorded\.py|StageWatch|is_wanted_now|_under_way|under way|_last_asked"
    r"|best_cards|hands?|ruler|_what_left_nothing|errors_for_people|naming_the_prompt|(?:is|are|not|be) covered"
    r"|in the box|bytes_of_a_step|blocks_that_fit|sizes_up_to|let out|tell\(\)"
    r"|in turns|played|played_\w+|PLAY_TILES|(?:the|a|one|front) doors?|at_the_door|DOORS|way[ _]out|WayOut|twins?|TwinProposer"
    r"|moving pictures?|test_planted_\w+|random[ _]run|[Hh]ostile|[Dd]amaged|kept_files|KeptFiles"
    r"|work_threads|WorkThreads|held_weights|HeldWeights|[Pp]eers?|(?:a|each|its) thoughts?|WitnessedCommand)\b"
)

# Old words, with the field's. Issues that were written before are read through this table. OLD_WORDS finds some of them.
HINTS = {
    "in turns": "interleaved (measurements), round-robin (requests)",
    "played, played_gpu, PLAY_TILES": "emulated",
    "the door, front door": "entry point, public interface",
    "way out, way_out, WayOut": "hint: what an error suggests",
    "twin, TwinProposer": "draft sequence, DrafterProposer. In a test: negative control",
    "promise": "invariant, InvariantError",
    "moving picture": "animation",
    "planted, test_planted_faults": "injected",
    "random run, random_run": "fuzz test, tests.fuzz",
    "hostile": "adversarial (grammars), malicious (files)",
    "damaged": "corrupted, truncated",
    "kept_files, KeptFiles": "disk cache, DiskCache",
    "work_threads, WorkThreads": "worker threads",
    "held_weights, HeldWeights": "loaded weights",
    "peer": "baseline: another engine that a benchmark compares with",
    "edition": "template",
    "a thought": "reasoning, ReasoningState",
    "conservation": "leak check",
    "floor": "minimum",
    "seam": "interface",
    "fast wing": "fast/",
    "WitnessedCommand": "ChildProcessCommand",
    "house": "package layout",
    "room": "folder of the package",
    "guest": "feature module",
    "wall": "rule of imports",
    "net": "regression tests",
    "bar": "acceptance criterion",
    "crib": "notes",
    "grid of chunks": "chunk boundaries: the multiples of chunk_size",
}


def prose_of(path: Path) -> str:
    """The docstrings and comments of a Python file, or the Markdown of a page or notebook without its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    if path.suffix != ".py":
        return re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    tree = ast.parse(text)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    parts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, owners)]
    parts = [re.sub(r"^\s*(>>>|\.\.\.) .*$", "", part, flags=re.MULTILINE) for part in parts]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(parts + [token.string for token in tokens if token.type == tokenize.COMMENT])


def semicolons_per_1000_words(prose: str) -> float:
    return 1000 * prose.count(";") / max(len(prose.split()), 1)


PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "benchmarks" / "README.md",
    ROOT / "one_file" / "README.md",
    ROOT / "notebooks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
FILES = [
    *sorted(path for package in PACKAGES for path in package.rglob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted(path for folder in ("benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")),
    *PAGES,
]


if __name__ == "__main__":
    for file in [Path(name) for name in sys.argv[1:]] or FILES:
        prose = prose_of(file)
        rate, words = semicolons_per_1000_words(prose), len(prose.split())
        print(f"{file}: {words} words, {prose.count(';')} semicolons ({rate:.1f} per 1,000)")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if match := OLD_WORDS.search(line):
                hint = next((new for old, new in HINTS.items() if match[0] in old), "")
                print(f"  {number}: {match[0]!r} in {line.strip()[:100]} -> {hint}")
