"""Launch kernels as the engine does, compiled for sm_80 or sm_75, and execute what the compiler wrote.

    with emulated_gpu() as launches:
        rms_norm(x, weight, 1e-6)  # tensors are the CPU's

An edit changes the PTX first: `emulated_gpu({"_decode_kernel": lambda ptx: ptx.replace("bar.sync", "//", 1)})`. Triton's
interpreter must be off in the process (tests/simulated_gpu.py).
"""

from tests import simulated_gpu  # switches the interpreter off, before triton is imported

# isort: split
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from tests.emulated_gpu import machine
from tests.emulated_gpu.machine import Observe
from tests.emulated_gpu.memory import GlobalMemory, unsigned
from tests.emulated_gpu.ptx import parse
from tests.simulated_gpu import Launch

_EMPTY = {torch.empty, torch.empty_like, Tensor.new_empty}


class Unwritten(TorchFunctionMode):
    """Remember, for what torch.empty returns, which elements a kernel has written since.

    A tensor of torch.empty that torch itself fills later counts as unwritten, so kernels cannot read it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[int, tuple[Tensor, np.ndarray]] = {}

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function in _EMPTY:
            self._written[out.untyped_storage().data_ptr()] = out, np.zeros(out.numel(), bool)
        return out

    def written(self, tensor: Tensor) -> np.ndarray | None:
        """The flags of a tensor's elements, from its first to its last in memory. None: it is not of torch.empty."""
        known = self._written.get(tensor.untyped_storage().data_ptr())
        return None if known is None else known[1][tensor.storage_offset() :][: len(unsigned(tensor))]


def emulate(
    launch: Launch, ptx: str | None = None, *, unwritten: Unwritten | None = None, observe: Observe | None = None
) -> None:
    """Execute a launch, whose tensors are in the host's memory.

    Args:
        ptx: executed in place of what the compiler wrote.
        unwritten: knows what may not be read. None: all elements of all tensors may be.
        observe: is called before each instruction (machine.py).

    Raises:
        Fault: the kernel does what a GPU would not report.
    """
    compiled = launch.compiled
    memory = GlobalMemory()
    values: list[int | float] = []
    for name, kind in compiled.src.signature.items():
        argument = launch.arguments[name]
        if isinstance(argument, Tensor) and kind != "constexpr":
            argument = memory.add(name, argument, unwritten and unwritten.written(argument))
        if kind != "constexpr":
            values.append(argument)
    kernel = parse(ptx or compiled.asm["ptx"])
    values += [0] * (len(kernel.parameters) - len(values))  # Triton's own memory, which the kernels do not use
    machine.emulate(kernel, launch.grid, values, memory, compiled.metadata.shared, observe)


@contextmanager
def emulated_gpu(
    edits: Mapping[str, Callable[[str], str]] | None = None, *, observe: Observe | None = None, arch: int = 80
) -> Iterator[list[Launch]]:
    """Compile and emulate what is launched, and list the launches.

    Args:
        edits: for a kernel's name, what changes its PTX before it is emulated.
        observe: is called before each instruction (machine.py).
        arch: 80 or 75. The emulator does not know the instructions of later architectures.

    Raises:
        AssertionError: an edit that changes nothing.
    """
    unwritten = Unwritten()
    with simulated_gpu.simulated_gpu(arch) as launches, unwritten:
        compile_only = JITFunction.run

        def run(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
            compile_only(kernel, *args, **kwargs)
            launch = launches[-1]
            ptx = launch.compiled.asm["ptx"]
            if edit := (edits or {}).get(launch.kernel):
                edited = edit(ptx)
                assert edited != ptx, f"the edit of {launch.kernel} changes nothing"
                ptx = edited
            emulate(launch, ptx, unwritten=unwritten, observe=observe)

        with mock.patch.object(JITFunction, "run", run):
            yield launches
