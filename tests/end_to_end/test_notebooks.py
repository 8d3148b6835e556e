"""Every notebook runs from top to bottom, offline and without a warning, in seconds, and its outputs are committed.

Those of the core run always, the others where they or what they import have changed (tests/ran.py), and with `-m long`.
"""

import ast
import itertools
import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.device import checks
from benchmarks.device.parts import PARTS
from nanoinfer.attention.base import BACKENDS
from tests import ran
from tests.helpers import forked

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9d]*.ipynb"))
SOLUTIONS = sorted((FOLDER / "solutions").glob("[0-9d][0-9]*.py"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
ALWAYS = {"00a_attention_primer", "00b_an_engine_in_60_lines", "01_a_tokens_journey", "03_pages"}
EMULATED = "d9_inside_a_gpu_kernel"  # compiles kernels, for which Triton's interpreter must be off in the process
ON_A_GPU = "d11_on_a_gpu"  # imports Triton, and without a GPU its interpreter
BEFORE = {  # smaller products than those that measure a machine, and one round of training
    "04_prefill_and_decode": "from nanoinfer_lab.bench import roofline\nroofline.GEMM_SIZE['cpu'] = 256",
    "d8_reinforcement_learning_with_an_engine": "import os\nos.environ['ROUNDS'] = '1'",
}
LESS = tomllib.loads(Path(__file__).with_name("notebooks.toml").read_text(encoding="utf-8"))  # smaller measurements
UNCOMPARED = {
    "06_serving",  # tokens of a stream arrive together or apart
    "d2_why_the_same_prompt_can_give_other_bits",  # the last bits of torch's kernels decide about words
    "d8_reinforcement_learning_with_an_engine",  # a student of fewer rounds writes other stories
    EMULATED,  # a kernel in Triton's cache names the lines of the checkout in which it was compiled
}


def read(path):
    return nbformat.read(path, as_version=4)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def due(paths):
    """Each path as a parameter. Those that have run as they are now are marked long."""
    rest = {path: path.stem not in ALWAYS and not ran.is_due(path) for path in paths}
    return [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * rest[path]) for path in paths]


def requirements_of(*extras):
    """The packages that nanoinfer with these extras asks for, by their names."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    requirements = [Requirement(one) for one in itertools.chain(*lists)]
    nested = {extra for one in requirements if one.name == "nanoinfer" for extra in one.extras} - {*extras}
    return requirements_of(*extras, *nested) if nested else {canonicalize_name(one.name) for one in requirements}


def distributions_of(modules):
    installed = packages_distributions()
    return {canonicalize_name(name) for module in modules for name in installed.get(module.partition(".")[0], ())}


def text_of(output):
    """What an output prints in a terminal."""
    return output.text if output.output_type == "stream" else output.data["text/plain"] + "\n"


def words_of(text, number):
    """The lines of a text without its numbers. How many of them a shortened line ends with depends on their digits."""
    lines = [re.sub(number, "#", line) for line in text.splitlines() if line.strip()]
    return [" ".join(re.sub(r"(, \w+=#)+, \.\.\.$", ", ...", line).split()) for line in lines]


def compare(new, stored, stem):
    """Raise an error if a reader would notice a difference: other words, or other whole numbers where these do not vary."""
    if stem in UNCOMPARED:
        return
    if stem in LESS:
        number = r"-?[\d.,]*\d(e[-+]\d+)?|(?<= )-$"
        assert set(words_of(new, number)) <= set(words_of(stored, number)), "run: python notebooks/run.py"
    else:
        number = r"-?\d[\d,]*\.\d*(e[-+]\d+)?|-?\de[-+]\d+|\d+(?= ms| times as)"  # with a fraction, or measured
        assert words_of(new, number) == words_of(stored, number), "run: python notebooks/run.py"


@pytest.mark.parametrize("path", due(NOTEBOOKS))
def test_a_notebook_runs_anew_without_a_warning(path, tmp_path):
    if path.stem in (EMULATED, ON_A_GPU) and find_spec("triton") is None:
        pytest.skip("Triton is published for Linux")
    first = f"import sys, warnings\nsys.path.insert(0, {str(FOLDER)!r})\nwarnings.simplefilter('error')\n"
    sources = [cell.source for cell in code_of(read(path))]
    for text, less in LESS.get(path.stem, {}).items():
        assert sum(source.count(text) for source in sources) == 1, text
        sources = [source.replace(text, less) for source in sources]
    cells = [first + BEFORE.get(path.stem, ""), *sources, "print(*sys.modules)"]
    run = forked.run_cells(cells, cwd=tmp_path, fresh=path.stem == EMULATED)
    assert run.returncode == 0, (run.stdout + run.stderr)[-5000:]
    assert run.stderr == ""
    _, *shown, modules, _ = run.stdout.split(forked.CELL_END)
    stored = ["".join(text_of(output) for output in cell.outputs) for cell in code_of(read(path))]
    for new, old in zip(shown, stored, strict=True):
        compare(new, old, path.stem)
    assert not list(tmp_path.iterdir())  # what a notebook writes, it writes to a temporary folder
    optional = requirements_of("server", "structured", "flash", "ray", "ray-serve")
    used = distributions_of(modules.split()) & optional
    assert not used - requirements_of("notebooks")


def test_what_the_cells_import_comes_with_the_extra():
    """Or with Python, or it is of this repository."""
    cells = [cell.source for path in NOTEBOOKS for cell in code_of(read(path))]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    ours = {"nanoinfer", "drawing", "grpo", "tests"}
    roots = {module.partition(".")[0] for module in modules} - ours - {*sys.stdlib_module_names}
    assert {"torch", "matplotlib"} <= roots
    assert not distributions_of(roots) - requirements_of("notebooks")


@pytest.mark.long
def test_the_notebook_for_gpus_installs_what_make_gpu_imports():
    last = read(FOLDER / f"{ON_A_GPU}.ipynb").cells[-1].source
    assert "`!make gpu PYTHON=python`" in last
    install = re.search(r"`(%pip install -e \. [^`]*)`", last)[1]
    tests = [path.removesuffix(".py").replace("/", ".") for path in checks.TESTS]
    parts = [f"benchmarks.device.{name}" for name in ("__main__", *{part.function.partition(":")[0] for part in PARTS})]
    code = f"import sys, benchmarks.report, tests.conftest, {', '.join((*parts, *tests))}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    used = distributions_of(done.stdout.split()) & requirements_of("test") - requirements_of()
    used -= {"beartype", "httpx2", "triton"}  # optional, of huggingface_hub, of torch's CUDA build
    assert used == {"pytest", "hypothesis"} == set(install.rpartition("-e . ")[2].split())


@pytest.mark.long
def test_a_notebook_runs_in_jupyters_kernel(tmp_path):
    """As notebooks/run.py runs all of them. The others run in IPython alone, which starts sooner."""
    client = NotebookClient(
        read(NOTEBOOKS[0]), timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    path_of_drawing = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    client.execute(env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path_of_drawing})  # the other core is another test's
    assert all("traceback" not in output for cell in code_of(client.nb) for output in cell.outputs)


def test_a_cell_that_raises_or_warns_fails_a_notebook(tmp_path):
    strict = "import warnings\nwarnings.simplefilter('error')"
    for wrong in ("1 / 0", "warnings.warn('old')", "import matplotlib.pyplot as plt\nplt.plot(['a'], [1, 2])\nplt.show()"):
        run = forked.run_cells([strict, wrong, "print('went on')"], cwd=tmp_path)
        assert run.returncode == 1
        assert "went on" not in run.stdout


@notebooks
def test_what_a_notebook_shows_is_committed_with_it(path):
    """Run once, in order; no error, nothing on stderr, no path of the machine that ran it."""
    cells = code_of(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not re.search(r"[\"' (](/(home|root|work|tmp|usr|var|Users)/|[A-Z]:\\\\)", path.read_text(encoding="utf-8"))


@pytest.fixture
def solutions_imports(monkeypatch):
    """What a solution may import besides the package, and the state of the process as it was, afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "solutions"))
    backend, num_threads, grad = matplotlib.get_backend(), torch.get_num_threads(), torch.is_grad_enabled()
    matplotlib.use("agg")
    with patch.dict(BACKENDS):  # a solution may register a backend
        yield
    plt.close("all")
    matplotlib.use(backend)
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(grad)
    for name in ("definitions", "drawing"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", due([path for path in SOLUTIONS if path.stem != EMULATED]))
def test_the_solutions_run_offline(path, solutions_imports, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path))
    compare(capsys.readouterr().out, path.with_suffix(".txt").read_text(encoding="utf-8"), path.stem)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", due([path for path in SOLUTIONS if path.stem == EMULATED]))
def test_the_solutions_that_compile_kernels_run_offline(path, tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="Triton is published for Linux")
    monkeypatch.syspath_prepend(str(FOLDER))
    run = forked.run_script(path, cwd=tmp_path, fresh=True)
    assert run.returncode == 0, run.stderr
    compare(run.stdout, path.with_suffix(".txt").read_text(encoding="utf-8"), EMULATED)
    assert not list(tmp_path.iterdir())


def test_every_exercise_has_a_solution():
    assert [path.stem for path in SOLUTIONS] == [path.stem for path in NOTEBOOKS]
    for notebook, solution in zip(NOTEBOOKS, SOLUTIONS, strict=True):
        exercises = read(notebook).cells[-1].source.split("## Exercises")[1]
        numbers = re.findall(r"^(\d+)\. ", exercises, re.MULTILINE)
        assert re.findall(r"^# Exercise (\d+): ", solution.read_text(encoding="utf-8"), re.MULTILINE) == numbers, solution.stem


def test_a_notebook_is_due_when_it_or_what_it_imports_changes(tmp_path):
    code = "import drawing\nfrom nanoinfer.features.drafts.ngram import Ngram\nimport nanoinfer_lab.bench.roofline\n"
    code += "from nanoinfer import LLM\nfrom nanoinfer.sampling import stages\nfrom nanoinfer.errors import NanoinferError"
    used = "nanoinfer/errors.py nanoinfer/features/drafts nanoinfer/sampling nanoinfer_lab/bench notebooks/drawing.py"
    assert sorted(map(ran.name_of, ran.places_of(code, FOLDER))) == used.split()
    files = [tmp_path / name for name in ("one.py", "helper.py")]
    digests = []
    for texts in (("import helper", "x = 1"), ("import helper", "x = 2"), ("import helper ", "x = 2")):
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        for cached in (ran.digest_of, ran.digest_of_place):
            cached.cache_clear()
        digests.append(ran.digest_of(files[0]))
    assert len(set(digests)) == 3
