"""Which GPUs launch kernels by programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

decode_kernels.py launches so on sm_90 and newer, and has the rule. A driver may refuse it in a CUDA graph: on sm_120, a capture
failed with "invalid resource handle" (https://github.com/sgl-project/sglang/pull/18596). Then graphs.py captures without it.
"""

import torch

_uses_pdl: dict[int, bool] = {}  # the index of a GPU -> whether it may be used, of those that have launched such kernels


def may_use(device: int) -> bool:
    """Whether a GPU with PDL, which launches such a kernel now, may use it."""
    return _uses_pdl.setdefault(device, True)


def refuse(device: torch.device) -> bool:
    """Launch kernels of this GPU without PDL from now on. Returns False if none has been launched with it."""
    index = device.index or 0
    was_used = _uses_pdl.get(index, False)
    if was_used:
        _uses_pdl[index] = False
    return was_used
