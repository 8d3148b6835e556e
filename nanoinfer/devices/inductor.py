"""torch.compile on a CPU: options for folders with a space in their name, and the reason of a failure in one line.

Inductor calls a C++ compiler. It quotes the folders of headers in the command, but neither the folder of torch's libraries nor
its own files (torch 2.13, github.com/pytorch/pytorch/pull/191010).
"""

import os
import tempfile
from typing import Any

import torch

from nanoinfer.errors import first_line


def compile_options() -> dict[str, Any]:
    """Return torch.compile's options. If torch is in a folder with a space, compiled code is not linked with its libraries.

    The loops that Inductor generates call no function of them, and the process has loaded them anyway.
    """
    return {"aot_inductor.link_libtorch": False} if " " in torch.__file__ else {}


def failure_reason(error: BaseException) -> str:
    """Return the C++ compiler's message if the error quotes one, else the first line of the error."""
    lines = str(error).partition("\nOutput:\n")[2].strip().splitlines() or [first_line(error)]
    reason = next((line for line in lines if "error: " in line or "cannot find " in line), lines[0])
    folders = [os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""), tempfile.gettempdir()]
    if with_space := next((folder for folder in folders if " " in folder), None):
        reason += f"; Inductor cannot compile in {with_space!r}: give TORCHINDUCTOR_CACHE_DIR and TMPDIR without a space"
    return reason
