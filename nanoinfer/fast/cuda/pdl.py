"""Which GPUs refuse programmatic dependent launch (PDL), by which a kernel starts while the one before it still runs.

decode_kernels.py launches with it on sm_90 and newer, and has the rule. A driver may refuse it in a CUDA graph: on sm_120, a
capture failed with "invalid resource handle" (https://github.com/sgl-project/sglang/pull/18596). Then graphs.py captures again
without it.
"""

import torch

_refusing: set[int] = set()  # the GPUs that have refused it in this process, by their index


def is_refused() -> bool:
    """Whether the current GPU has refused PDL."""
    return bool(_refusing) and torch.cuda.current_device() in _refusing


def refuse(device: torch.device) -> bool:
    """Launch kernels of this GPU without PDL from now on. Returns False if they are already."""
    is_new = (device.index or 0) not in _refusing
    _refusing.add(device.index or 0)
    return is_new
