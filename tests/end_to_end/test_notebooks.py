"""Every notebook runs from top to bottom, offline and without a warning, in seconds, and its outputs are committed."""

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import nanoinfer

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
PACKAGE = Path(nanoinfer.__file__).parent
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def classes_in(source):
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}


def test_they_are_numbered_from_01():
    assert [path.stem[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(1, 13)]


@notebooks
def test_a_notebook_runs_anew_without_a_warning(path, tmp_path):
    notebook = read(path)
    first = nbformat.v4.new_code_cell("import warnings\nwarnings.simplefilter('error')")
    notebook.cells.insert(0, first)
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})  # the other core is another test process's
    assert all("traceback" not in output for cell in code_of(notebook) for output in cell.outputs)
    assert not list(tmp_path.iterdir())  # what a notebook writes, it writes to a temporary folder


@notebooks
def test_what_a_notebook_shows_is_committed_with_it(path):
    """Run once, in order; no error, nothing on stderr, no path of the machine that ran it."""
    cells = code_of(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not re.search(r"[\"' (](/(home|root|work|tmp|usr|var|Users)/|[A-Z]:\\\\)", path.read_text(encoding="utf-8"))


@notebooks
def test_a_notebook_tells_more_than_it_shows_and_asks_at_the_end(path):
    notebook = read(path)
    text = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    paragraphs = [paragraph for source in text for paragraph in source.split("\n\n")]
    assert len(paragraphs) >= 1.5 * len(code_of(notebook))
    assert text[0].startswith(f"# {path.stem[:2]}")
    assert any(line.startswith("## Questions") for source in text for line in source.splitlines())
    assert any(line.startswith("## Exercises") for line in text[-1].splitlines())


def test_the_notebooks_take_the_package_apart_and_copy_none_of_it():
    of_the_package = set().union(*(classes_in(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")))
    assert len(of_the_package) > 100
    for path in NOTEBOOKS:
        assert not of_the_package & set().union(*(classes_in(cell.source) for cell in code_of(read(path)))), path.stem
