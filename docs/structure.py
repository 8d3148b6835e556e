"""structure.md has a line for each folder, from its docstring or README. `python docs/structure.py` writes it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
