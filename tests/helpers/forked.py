"""A process of its own for a script, a notebook or a rank, forked from one that has imported torch, so it starts at once."""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from contextlib import contextmanager
from functools import partial
from multiprocessing import reduction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

# Where forking is not safe, a new Python imports everything.
_CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_CONTEXT.set_forkserver_preload(
    [
        *("torch", "transformers.tokenization_utils_fast", "nanoinfer.llm", "matplotlib.figure"),
        *("triton.runtime.interpreter", "nanoinfer.fast.cuda.compile", "tests.helpers.tiny_models", "pytest"),
        "IPython.core.interactiveshell",
    ]
)
_FRESH = multiprocessing.get_context("spawn")
CELL_END = "\x1e\n"


def run_script(path, *arguments, cwd, environment=None, fresh=False):
    """Run a script with these arguments. A warning is an error. Returns: returncode, stdout, stderr.

    fresh: start a new Python, which has not imported Triton with its interpreter on.
    """
    return _run(_script, [str(path), *arguments], cwd, environment or {}, _FRESH if fresh else _CONTEXT)


def run_cells(sources, *, cwd, environment=None, fresh=False):
    """Run the cells of a notebook in IPython, up to the first that raises. Returns: returncode, stdout, stderr.

    CELL_END stands in stdout after each cell. fresh: as for run_script.
    """
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # as in Jupyter
    return _run(_cells, sources, cwd, inline | (environment or {}), _FRESH if fresh else _CONTEXT)


def run_function(function, *arguments):
    """Call a function of a module. Returns: returncode, stdout, stderr."""
    return _run(_call, (function, arguments), Path.cwd(), {})


def _run(function, what, cwd, environment, context=_CONTEXT):
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        environment = os.environ | environment
        environment.pop("VIRTUAL_ENV", None)  # IPython warns of one that is active while another one's Python runs
        process = context.Process(target=_child, args=(function, what, cwd, environment, files, sys.path))
        process.start()
        process.join()
        stdout, stderr = (file.read_text(encoding="utf-8") for file in files)
    return SimpleNamespace(returncode=process.exitcode, stdout=stdout, stderr=stderr)


def _child(function, what, cwd, environment, files, path):
    for number, file in enumerate(files, start=1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    import torch

    from tests.helpers import precompiled

    torch.set_num_threads(1)  # the other core is another test's
    precompiled.install()
    try:
        function(what)
    except SystemExit:
        raise  # with the script's own status
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _script(command):
    warnings.simplefilter("error")
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def _call(what):
    function, arguments = what
    function(*arguments)


def _cells(sources):
    from IPython.core.interactiveshell import InteractiveShell

    gc.freeze()  # otherwise a collection examines torch for 0.2 s
    shell = InteractiveShell.instance()
    shell.display_formatter.active_types = shell.display_formatter.format_types  # HTML and pictures are made, too
    for source in sources:
        if not shell.run_cell(source, store_history=True).success:
            sys.exit(1)
        print(CELL_END, end="")


@contextmanager
def ranks(prepare=None):
    """LLM(tensor_parallel_size=N) forks its other ranks, in place of starting a new Python for each.

    prepare: a function of a module that the other ranks call first. None: they call nothing.
    """
    with patch("nanoinfer.features.distributed.launch.start_python", partial(Rank, prepare=prepare)):
        yield


class Rank:
    """As the process that start_python starts, whose new Python imports torch for more than a second of CPU."""

    def __init__(self, *command, pass_fds, prepare):
        self._command = command
        read_end, write_end = os.pipe()
        self.stdin = os.fdopen(write_end, "wb")
        arguments = [*map(str, command[command.index("-m") + 2 :])]
        descriptors = {descriptor: _Inherited(descriptor) for descriptor in pass_fds}
        self._process = _CONTEXT.Process(target=_rank, args=(arguments, _Inherited(read_end), descriptors, prepare))
        self._process.start()
        os.close(read_end)

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._command, timeout)
        return self._process.exitcode

    def kill(self):
        self._process.kill()


class _Inherited:
    """A file descriptor, which is a number of the other process there."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _received, (reduction.DupFd(self.number),)


def _received(duplicate):
    return _Inherited(duplicate.detach())


def _rank(arguments, stdin, descriptors, prepare):
    from nanoinfer.features.distributed import worker
    from tests.helpers import precompiled

    gc.freeze()  # as for a notebook
    precompiled.install()
    if prepare is not None:
        prepare()
    os.dup2(stdin.number, 0)
    numbers = {str(given): str(here.number) for given, here in descriptors.items()}
    rank, device, port, *given = arguments
    sys.argv = ["worker", rank, device, port, *(numbers[number] for number in given)]
    worker.main()
