"""Launch kernels as the engine does, compiled for sm_75, sm_80 or sm_90, and execute what the compiler wrote.

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

from torch import Tensor
from triton.runtime.jit import JITFunction

from tests.emulated_gpu import machine
from tests.emulated_gpu.machine import Observe
from tests.emulated_gpu.memory import GlobalMemory
from tests.emulated_gpu.ptx import parse
from tests.emulated_gpu.writes import Writes
from tests.simulated_gpu import Launch


def emulate(launch: Launch, ptx: str | None = None, *, writes: Writes | None = None, observe: Observe | None = None) -> None:
    """Execute a launch, whose tensors are in the host's memory.

    Args:
        ptx: executed in place of what the compiler wrote.
        writes: knows what may be read, and what the step has written. None: all may be read, and there is no step.
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
            known = (writes.may_be_read(argument), writes.written_in_step(argument)) if writes else ()
            argument = memory.add(name, argument, *known)
        if kind != "constexpr":
            values.append(argument)
    kernel = parse(ptx or compiled.asm["ptx"])
    values += [0] * (len(kernel.parameters) - len(values))  # Triton's own memory, which the kernels do not use
    is_dependent = compiled.metadata.launch_pdl
    machine.emulate(kernel, launch.grid, values, memory, compiled.metadata.shared, observe, is_dependent)
    if writes:
        for tensor, elements in memory.writes():
            writes.note(tensor, elements)


@contextmanager
def emulated_gpu(
    edits: Mapping[str, Callable[[str], str]] | None = None, *, observe: Observe | None = None, arch: int = 80
) -> Iterator[list[Launch]]:
    """Compile and emulate what is launched, and list the launches.

    Args:
        edits: for a kernel's name, what changes its PTX before it is emulated.
        observe: is called before each instruction (machine.py).
        arch: 75, 80 or 90, of which the emulator does not know the products of four warps (wgmma).

    Raises:
        AssertionError: an edit that changes nothing.
    """
    with simulated_gpu.simulated_gpu(arch) as launches, Writes() as writes:
        compile_only = JITFunction.run

        def run(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
            compile_only(kernel, *args, **kwargs)
            launch = launches[-1]
            ptx = launch.compiled.asm["ptx"]
            if edit := (edits or {}).get(launch.kernel):
                edited = edit(ptx)
                assert edited != ptx, f"the edit of {launch.kernel} changes nothing"
                ptx = edited
            emulate(launch, ptx, writes=writes, observe=observe)

        with mock.patch.object(JITFunction, "run", run):
            yield launches
