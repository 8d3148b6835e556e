"""The reading path points at the right lines. `python tests/docs/test_reading_path.py` puts them right after a change."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reading.md"
# | [engine.py 2-4](../nanoinfer/engine.py#L2-L4) `step` | ... : from the first line of the names to the last
ROW = re.compile(
    r"^\| \[(?P<file>\S+) \d+-\d+\]\(\.\./nanoinfer/(?P=file)#L\d+-L\d+\) (?P<names>`[\w.]+`(?:, `[\w.]+`)*) \|", re.MULTILINE
)


def lines_of(file, name):
    """First and last line of a class, function, method or module-level name, given as it is called inside its file."""
    body = ast.parse((ROOT / "nanoinfer" / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        node = next(node for node in body if part in names_of(node))
        body = getattr(node, "body", [])
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]), node.end_lineno


def names_of(node):
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    return {getattr(node, "name", None)}


def with_lines(text):
    def row(match):
        file, names = match["file"], re.findall(r"`([\w.]+)`", match["names"])
        spans = [lines_of(file, name) for name in names]
        first, last = min(span[0] for span in spans), max(span[1] for span in spans)
        return f"| [{file} {first}-{last}](../nanoinfer/{file}#L{first}-L{last}) {match['names']} |"

    return ROW.sub(row, text)


def test_the_reading_path_points_at_the_lines_it_names():
    text = PAGE.read_text(encoding="utf-8")
    assert len(ROW.findall(text)) == text.count("\n| [") > 20
    assert with_lines(text) == text, "run: python tests/docs/test_reading_path.py"


def test_a_line_that_is_off_by_one_is_noticed():
    text = PAGE.read_text(encoding="utf-8")
    number = re.search(r"\[engine/llm_engine.py (\d+)", text)[1]
    moved = text.replace(f"[engine/llm_engine.py {number}", f"[engine/llm_engine.py {int(number) + 1}")
    assert with_lines(moved) == text != moved


if __name__ == "__main__":
    PAGE.write_text(with_lines(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
