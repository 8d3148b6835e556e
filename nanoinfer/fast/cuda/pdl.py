"""Which GPUs launch kernels by programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

decode_kernels.py launches so on sm_90 and newer, and has the rule. A driver may refuse it in a CUDA graph: on sm_120, a capture
failed with "invalid resource handle" (https://github.com/sgl-project/sglang/pull/18596). Then graphs are captured without it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.errors import first_line
from nanoinfer.fast.cuda.graphs import Capture

logger = logging.getLogger(__name__)

_uses_pdl: dict[int, bool] = {}  # the index of a GPU -> whether it may be used, of those that have launched such kernels


def may_use(device: int) -> bool:
    """Whether a GPU with PDL, which launches such a kernel now, may use it."""
    return _uses_pdl.setdefault(device, True)


@dataclass(frozen=True, slots=True)
class PDLCapture:
    """Captures CUDA graphs. If a capture fails on a GPU that uses PDL, the GPU launches without it from then on."""

    capture: Capture
    device: torch.device

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        try:
            return self.capture(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            index = self.device.index or 0
            if not _uses_pdl.get(index):
                raise
            _uses_pdl[index] = False
            logger.info("a capture failed (%s); it is tried again without programmatic dependent launch", first_line(error))
            return self.capture(run)
