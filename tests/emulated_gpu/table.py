"""What the first warp of a kernel executes, by the line of the kernel's source."""

from collections import Counter, defaultdict

import numpy as np
from numpy.typing import NDArray

from tests.emulated_gpu.machine import Machine
from tests.emulated_gpu.ptx import Instruction

_BANKS, _WORD = 32, 4  # shared memory gives a word of each bank at a time
_COLUMNS = ("instructions", "global", "shared", "conflicts", "mma", "barriers")


def wavefronts(addresses: NDArray, size: int) -> tuple[int, int]:
    """How often shared memory is busy with an access of a warp: without bank conflicts, and with them.

    A bank gives one word at a time, to all who ask for it. 128 bytes make a wavefront, so a warp's accesses of 8 bytes take two
    at least, by halves of the warp, and those of 16 bytes take four.

    Args:
        addresses: of the threads that take part, in bytes. [threads]
        size: bytes of each.
    """
    threads = max(1, _BANKS * _WORD // max(size, _WORD))
    needed = taken = 0
    for first in range(0, len(addresses), threads):
        starts = addresses[first : first + threads].astype(np.int64) // _WORD
        words = np.unique(starts[:, None] + np.arange(max(1, size // _WORD)))
        needed += 1
        taken += np.bincount(words % _BANKS).max()
    return needed, int(taken)


class Table:
    """Observes a machine (machine.py), and prints a Markdown table.

    kernel: its name. Of its first launch, the first warp of the first program is shown.
    """

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self._rows: dict[str, Counter[str]] = defaultdict(Counter)
        self._machine: Machine | None = None

    def observe(self, machine: Machine, instruction: Instruction) -> None:
        if machine.kernel.name != self.kernel:
            return
        self._machine = self._machine or machine
        if machine is not self._machine:
            return
        threads = machine.threads[machine.threads < 32]
        if not len(threads):
            return
        row = self._rows[instruction.source]
        row["instructions"] += 1
        name = instruction.name
        row["mma"] += name.startswith("mma")
        row["barriers"] += name.startswith("bar.")
        if name.startswith(("ld.global", "st.global", "cp.async.c")) and "commit" not in name:
            row["global"] += 1
        if name.startswith(("ld.shared", "st.shared", "ldmatrix", "stmatrix", "cp.async.ca", "cp.async.cg")):
            addresses, size = shared_access(machine, instruction)
            needed, taken = wavefronts(addresses[: len(threads)], size)
            row["shared"] += needed
            row["conflicts"] += taken - needed

    def __str__(self) -> str:
        lines = ["| line | " + " | ".join(_COLUMNS) + " |", "|---|" + "---|" * len(_COLUMNS)]
        total: Counter[str] = Counter()
        for source, row in [*self._rows.items(), ("total", total)]:
            lines.append(f"| `{source}` | " + " | ".join(str(row[column]) for column in _COLUMNS) + " |")
            total.update(row)
        return "\n".join(lines)


def shared_access(machine: Machine, instruction: Instruction) -> tuple[NDArray, int]:
    """The addresses in shared memory that the threads of a machine name in an instruction, and the bytes of each."""
    family, *types = instruction.name.split(".")
    address, other = instruction.operands[:2] if family in ("st", "cp", "stmatrix") else instruction.operands[1::-1]
    if family.endswith("matrix"):
        size = 16
    elif family == "cp":
        size = int(instruction.operands[2], 0)
    else:
        size = int(types[-1].lstrip("bufs")) // 8 * (other.count(",") + 1)
    addresses = machine.address(address)()
    return addresses[: 8 * int(types[3][1:])] if family.endswith("matrix") else addresses, size
