"""Which notebooks, solutions and examples have run as they are now. The tests run the others.

notebooks/ran.json has a digest of each: of its own text, and of the modules, folders of features, of lab and of course that
it imports. `python -m tests.ran` runs all of them, and then writes the file.
"""

import ast
import json
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "notebooks" / "ran.json"
EVERYTHING = [
    *sorted(ROOT.glob("notebooks/[0-9d]*.ipynb")),
    *sorted(ROOT.glob("notebooks/solutions/[0-9d][0-9]*.py")),
    *sorted(ROOT.glob("examples/*.py")),
]
PACKAGES = ("nanoinfer", "nanoinfer_lab", "nanoinfer_course")
TESTS = ["tests/end_to_end/test_notebooks.py", "tests/end_to_end/test_examples.py"]


@cache
def digest_of(path: Path) -> str:
    """The digest of a script or a notebook, with all that it imports of this repository."""
    text = path.read_text(encoding="utf-8")
    used, scripts = set(), [text]
    while scripts:
        for place in places_of(code_of(path, scripts.pop()), path.parent) - used:
            used.add(place)
            if place.is_file() and place.parent.name in ("notebooks", "solutions", "examples"):
                scripts.append(place.read_text(encoding="utf-8"))
    shown = path.with_suffix(".txt")  # what a solution prints
    parts = [text, *map(digest_of_place, sorted(used)), shown.read_text(encoding="utf-8") if shown.exists() else ""]
    return sha256("".join(parts).encode()).hexdigest()[:16]


def code_of(path: Path, text: str) -> str:
    """The Python of a script, or of all cells of a notebook."""
    if not text.startswith("{"):
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


def places_of(code: str, folder: Path) -> set[Path]:
    """The files and folders of this repository that a source imports."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {place for name in names if (place := place_of(name.split("."), folder))}


def place_of(parts: list[str], folder: Path) -> Path | None:
    """The room of a package (nanoinfer/sampling, nanoinfer/features/drafts, nanoinfer_lab/bench), or a file."""
    if parts[0] in PACKAGES:
        depth = 3 if parts[1:2] == ["features"] else 2
        if len(parts) < depth:
            return None
        place = ROOT.joinpath(*parts[:depth])
    elif parts[0] in ("tests", "benchmarks", "tools"):
        place = ROOT.joinpath(*parts)
    else:  # a file beside the script, or one that notebooks share
        files = [one / f"{parts[0]}.py" for one in (folder, ROOT / "notebooks", ROOT / "examples")]
        return next((file for file in files if file.exists()), None)
    while place != ROOT and not place.is_dir() and not place.with_suffix(".py").exists():
        place = place.parent  # the last part is a name of a module
    is_root = place in (ROOT, *(ROOT / name for name in PACKAGES))
    return None if is_root else place if place.is_dir() else place.with_suffix(".py")


@cache
def digest_of_place(place: Path) -> str:
    files = sorted(place.rglob("*")) if place.is_dir() else [place]
    files = [file for file in files if file.is_file() and "__pycache__" not in file.parts]
    whole = b"".join(file.name.encode() + file.read_bytes().replace(b"\r\n", b"\n") for file in files)
    return sha256(whole).hexdigest()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def recorded() -> dict[str, str]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def is_due(path: Path) -> bool:
    """Whether something has changed since the run that the record is of."""
    return recorded().get(name_of(path)) != digest_of(path)


if __name__ == "__main__":
    for marked in ("not long", "long"):  # "long" are those that are not due
        done = subprocess.run([sys.executable, "-m", "pytest", "-m", marked, *TESTS, *sys.argv[1:]], cwd=ROOT)
        if done.returncode:
            sys.exit(done.returncode)
    lines = {name_of(path): digest_of(path) for path in EVERYTHING}
    RECORD.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
