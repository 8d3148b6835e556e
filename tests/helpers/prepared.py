"""What a process that runs tests needs before it imports Triton or the package: the interpreter, checks, and kept headers.

pytest imports the conftest.py of a folder on its command line before it configures the root's.
"""

import importlib.util
import os
from functools import cache


@cache
def prepare():
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its kernels then run on the CPU, in numpy
    torch.set_num_threads(1)  # pytest runs one process per core
    if importlib.util.find_spec("beartype"):  # `make gpu` takes the Python at hand
        from tests.helpers import shape_checks

        shape_checks.install()  # before the modules that it checks are imported
    from tests.helpers import precompiled

    precompiled.install()
