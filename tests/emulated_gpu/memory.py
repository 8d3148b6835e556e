"""The memory of an emulated GPU, which knows its owners: tensors with nothing between them, and shared memory with its last
users.

In: the addresses of each thread. Out: bytes, or a `Fault`. machine.py decides which threads take part.

An access is checked when it is made, for its address and for bytes that nobody wrote. A race in shared memory is found when the
threads meet at a barrier: all accesses since the previous barrier are compared then, whatever the order was in which they were
emulated. A race in a tensor is found by the second access, which nothing orders after the first (order.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.emulated_gpu.order import Order
from tests.emulated_gpu.ptx import Instruction
from tests.emulated_gpu.writes import extent

SHARED_BASE = 0x1000  # so that address 0 lies outside
_SLOT = 40  # a tensor begins at a multiple of 2^40, so a wrong offset cannot reach the next tensor
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# A thread that adds its own square exactly and its neighbour's rounded (`fma` and `shfl`) gets another fp32 sum than its
# neighbour, and which sum lands is undefined. Both are the sum within 2 * 10 roundings of 2^-24 each.
_ROUNDING = 20 * 2**-24
_UNWRITTEN, _WRITTEN, _IN_FLIGHT = 0, 1, 2
_TIMES = 2**20  # more than a program's time can be


class Fault(Exception):
    """What a GPU would not have reported: the kernel is wrong, or was compiled wrongly."""


class OutsideFault(Fault):
    """An address outside every tensor, or outside shared memory, or not a multiple of the access's size."""


class UnwrittenFault(Fault):
    """A read of what nobody wrote."""


class InFlightFault(Fault):
    """An access to shared memory which a cp.async may still be writing."""


class RaceFault(Fault):
    """Two threads use a place, at least one writes it, and nothing orders them."""


class DependencyFault(Fault):
    """A program that may run while earlier kernels do: it uses what these write before it waits for them, or does not wait."""


class DivergenceFault(Fault):
    """Threads that must execute an instruction together are elsewhere."""


def unsigned(tensor: Tensor) -> NDArray:
    """The elements from a tensor's first to its last in memory as unsigned integers. The memory is shared."""
    flat = tensor.detach().as_strided((extent(tensor),), (1,))
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return flat.view(signed).numpy().view(_UNSIGNED[tensor.element_size()])


class Region:
    """A tensor in global memory.

    Attributes:
        written: for each element, whether anybody wrote it. Regions of one storage may share it. None: all are written.
        earlier: for each byte of an element, whether earlier kernels of the step wrote it. [elements, bytes] None: none did.
        writer: for each element, 1 plus the thread that wrote it last in this launch. 0: none did. None: none was written.
        written_at: the time at which it did (order.py).
        atomics: the elements that an atomic instruction wrote last.
    """

    def __init__(self, name: str, tensor: Tensor, base: int, written: NDArray | None, earlier: NDArray | None) -> None:
        self.name, self.tensor, self.base, self.shape = name, tensor, base, tuple(tensor.shape)
        self.elements = unsigned(tensor)
        self.written, self.earlier = written, earlier
        self.writer: NDArray | None = None
        self.written_at: NDArray | None = None
        self.atomics: set[int] = set()
        self._reads: list[tuple[NDArray, ...]] = []  # elements, thread * _TIMES + time, and program, until there is a writer
        self._readers: tuple[NDArray, NDArray] | None = None
        self._steps = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)

    def outside(self, elements: NDArray) -> NDArray:
        """Which elements, counted in memory from the first, are not the tensor's. Others may lie between its rows."""
        outside, rest = elements < 0, elements
        for stride, size in self._steps:
            index = np.minimum(rest // stride, size - 1) if stride else 0
            rest = rest - index * stride
        return outside | (rest != 0)

    def note_reads(self, elements: NDArray, threads: NDArray, times: NDArray, programs: NDArray) -> None:
        """Threads read their rows of elements in one instruction."""
        self._reads.append((elements, threads * _TIMES + times, programs))
        if self.writer is not None:
            self._count_reads()

    def _count_reads(self) -> None:
        """Of threads of a program that read an element in one instruction, the lowest counts. The others drop their copies."""
        for elements, users, programs in self._reads:
            rows = np.repeat(np.lexsort((users, programs)), elements.shape[1]).reshape(elements.shape)
            flat, users, programs = elements[rows[:, 0]].ravel(), users[rows].ravel(), programs[rows].ravel()
            _, first = np.unique(flat * (programs.max() + 1) + programs, return_index=True)
            np.minimum.at(self._readers[0], flat[first], users[first])
            np.maximum.at(self._readers[1], flat[first], users[first])
        self._reads.clear()

    def begin_writes(self) -> None:
        """Keep from now on who wrote an element, and who read it: its readers with the lowest and the highest number."""
        if self.writer is None:
            self.writer, self.written_at = np.zeros((2, len(self.elements)), np.int64)
            self._readers = np.full(len(self.elements), np.iinfo(np.int64).max), np.full(len(self.elements), -1)
            self._count_reads()

    def earlier_users(self, elements: NDArray) -> Iterator[tuple[str, NDArray, NDArray, NDArray]]:
        """What may have been done with elements: the word for it, where it was, by which threads, and when."""
        writers = self.writer[elements]
        yield "writes", writers > 0, writers - 1, self.written_at[elements]
        lowest, highest = (readers[elements] for readers in self._readers)
        for users in (lowest, highest):
            yield "reads", highest >= 0, users // _TIMES, users % _TIMES


class GlobalMemory:
    """The tensors of a launch. Each has addresses of its own, even where two share a storage. A tensor that is given twice, as
    an input and the output, has one address.

    who: names a thread by its number in the launch.
    """

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self.begin(1, 1)

    def begin(
        self, num_programs: int, num_threads: int, who: Callable[[int], str] = "thread {}".format, is_dependent: bool = False
    ) -> None:
        """Begin a launch of programs.

        Args:
            num_threads: of a program.
            who: names a thread by its number in the launch.
            is_dependent: earlier kernels of the step may still run, until a thread waits for them.
        """
        self.who, self.order = who, Order(num_programs, num_threads)
        self._waits = np.full(num_programs * num_threads, is_dependent)

    def add(self, name: str, tensor: Tensor, written: NDArray | None = None, earlier: NDArray | None = None) -> int:
        """Give a tensor an address, as aligned as its own.

        Args:
            written: for each element from its first to its last, whether it may be read. Stores set it. None: all may be.
            earlier: for each byte of them, whether earlier kernels of the step wrote it. [elements, bytes] None: none did.
        """
        for region in self._regions:
            if region.tensor is tensor:
                return region.base
        base = (len(self._regions) + 1 << _SLOT) + tensor.data_ptr() % 4096
        self._regions.append(Region(name, tensor, base, written, earlier))
        return base

    def writes(self) -> Iterator[tuple[Tensor, NDArray]]:
        """The tensors that the launch has written, and which elements from their first to their last."""
        for region in self._regions:
            if region.writer is not None:
                yield region.tensor, region.writer > 0

    def wait_for_earlier(self, threads: NDArray) -> None:
        """Let these threads wait until all earlier kernels of the step have ended."""
        self._waits[threads] = False

    def end(self) -> None:
        """End the launch. Each thread has waited, so that a later kernel that waits for this one waits for earlier ones too."""
        if self._waits.any():
            raise DependencyFault(f"{self.who(np.flatnonzero(self._waits)[0])} ends without griddepcontrol.wait")

    def _find(
        self, addresses: NDArray, size: int, threads: NDArray, by: Instruction
    ) -> Iterator[tuple[Region, NDArray, NDArray]]:
        """For each region, the positions of its addresses and the elements that they reach. [positions, elements]"""
        if (addresses % size).any():
            wrong = np.flatnonzero(addresses % size)[0]
            raise OutsideFault(
                f"{self.who(threads[wrong])}: address {addresses[wrong]:#x} is no multiple of {size} bytes in {by}"
            )
        slots = (addresses >> np.uint64(_SLOT)).astype(np.int64) - 1
        for slot in np.unique(slots):
            chosen = np.flatnonzero(slots == slot)
            if not 0 <= slot < len(self._regions):
                raise OutsideFault(f"{self.who(threads[chosen[0]])}: address {addresses[chosen[0]]:#x} is no tensor's in {by}")
            region = self._regions[slot]
            item = region.elements.itemsize
            if size % item:
                raise ValueError(f"{by} reaches {size} bytes of {region.name}, whose elements have {item}")
            elements = ((addresses[chosen] - np.uint64(region.base)).astype(np.int64) // item)[:, None] + np.arange(
                size // item
            )
            outside = region.outside(elements)
            if outside.any():
                row, column = np.argwhere(outside)[0]
                raise OutsideFault(
                    f"{self.who(threads[chosen[row]])}: element {elements[row, column]} of {region.name}, "
                    f"which has the shape {region.shape}, is outside it in {by}"
                )
            yield region, chosen, elements

    def load(self, addresses: NDArray, size: int, threads: NDArray, by: Instruction) -> NDArray:
        """size bytes from each address. [addresses, size]"""
        out = np.empty((len(addresses), size), np.uint8)
        for region, chosen, elements in self._find(addresses, size, threads, by):
            users = threads[chosen]
            self._require_written(region, elements, users, by)
            if region.earlier is not None:
                early = self._waits[users][:, None] & region.earlier[elements].any(-1)
                if early.any():
                    row, column = np.argwhere(early)[0]
                    raise DependencyFault(
                        f"{self.who(users[row])} reads element {elements[row, column]} of {region.name}, which an earlier "
                        f"kernel of the step writes, before griddepcontrol.wait in {by}"
                    )
            if region.writer is not None:
                self._require_order(region, elements, users, "reads", by)
            region.note_reads(elements, users, self.order.times(users), users // self.order.num_threads)
            out[chosen] = region.elements[elements].view(np.uint8)
        return out

    def _require_written(self, region: Region, elements: NDArray, threads: NDArray, by: Instruction) -> None:
        if region.written is not None and not region.written[elements].all():
            row, column = np.argwhere(~region.written[elements])[0]
            raise UnwrittenFault(
                f"{self.who(threads[row])}: element {elements[row, column]} of {region.name} was never written. "
                f"It is read in {by}"
            )

    def _require_order(self, region: Region, elements: NDArray, threads: NDArray, does: str, by: Instruction) -> None:
        """What other threads did with these elements in this launch must happen before, unless all only read."""
        own = np.broadcast_to(threads[:, None], elements.shape)
        for did, there, others, times in region.earlier_users(elements):
            rows, columns = np.nonzero(there & (others != own))
            if not len(rows) or did == does == "reads":
                continue
            others = others[rows, columns]
            ordered = self.order.are_ordered(others, times[rows, columns], own[rows, columns])
            if not ordered.all():
                first = np.flatnonzero(~ordered)[0]
                raise RaceFault(
                    f"{self.who(others[first])} {did} element {elements[rows[first], columns[first]]} of {region.name}, and "
                    f"{self.who(threads[rows[first]])} {does} it in the same launch, with nothing that orders them, in {by}"
                )

    def _begin_store(self, threads: NDArray, by: Instruction) -> None:
        if self._waits[threads].any():
            first = threads[self._waits[threads]][0]
            raise DependencyFault(f"{self.who(first)} writes before griddepcontrol.wait in {by}")

    def store(self, addresses: NDArray, values: NDArray, threads: NDArray, by: Instruction) -> None:
        """Write values, bytes [addresses, size]. No element may be written by two threads that nothing orders."""
        self._begin_store(threads, by)
        for region, chosen, elements in self._find(addresses, values.shape[1], threads, by):
            users = threads[chosen]
            region.begin_writes()
            self._require_order(region, elements, users, "writes", by)
            region.writer[elements] = users[:, None] + 1
            region.written_at[elements] = self.order.times(users)[:, None]
            self._require_order(region, elements, users, "writes", by)  # two threads of this instruction
            for element in region.atomics.intersection(elements.flat):
                region.atomics.discard(element)
                self.order.overwrite((region.base, element))
            region.elements[elements] = values[chosen].view(region.elements.dtype)
            if region.written is not None:
                region.written[elements] = True

    def update(
        self, addresses: NDArray, size: int, threads: NDArray, by: Instruction, compute: Callable[[int, NDArray], NDArray],
        *, releases: bool, acquires: bool,
    ) -> NDArray:  # fmt: skip
        """Execute an atomic instruction, a thread after the other.

        Args:
            compute: from a position and the bytes of the element, its new bytes.
            releases: what happened before the instruction happens before those that acquire.
            acquires: what was released at the element happens before what follows.

        Returns:
            The bytes of each element as they were. [addresses, size]
        """
        self._begin_store(threads, by)
        out = np.empty((len(addresses), size), np.uint8)
        for region, chosen, elements in self._find(addresses, size, threads, by):
            self._require_written(region, elements, threads[chosen], by)
            region.begin_writes()
            for position, at in zip(chosen, elements[:, :1], strict=True):
                element, thread = int(at[0]), threads[position : position + 1]
                if element not in region.atomics:
                    self._require_order(region, at[None], thread, "writes", by)
                    region.atomics.add(element)
                out[position] = region.elements[at].view(np.uint8)
                region.elements[at] = compute(position, out[position]).view(region.elements.dtype)
                region.writer[element], region.written_at[element] = thread[0] + 1, self.order.times(thread)[0]
                self.order.synchronize(int(thread[0]), (region.base, element), releases=releases, acquires=acquires)
        return out


@dataclass(slots=True)
class _Access:
    """What some threads did in one instruction: cells [threads, cells of each]."""

    cells: NDArray
    threads: NDArray
    turns: NDArray  # how often a thread's warp had met before
    writes: bool
    by: Instruction


@dataclass(slots=True)
class _Copy:
    """A cp.async whose threads have not all waited for it."""

    cells: NDArray
    values: NDArray
    threads: NDArray
    groups: NDArray
    by: Instruction


@dataclass(slots=True)
class SharedMemory:
    """The shared memory of the programs that are emulated at once, in cells, which are the smallest thing the kernel accesses.

    Attributes:
        size: bytes of a program.
        cell: bytes of a cell.
        num_programs: how many programs are emulated at once.
        num_threads: of a program.
        who: names a thread by its number among these programs.
    """

    size: int
    cell: int
    num_programs: int
    num_threads: int
    who: Callable[[int], str]
    _cells: NDArray = field(init=False)
    _state: NDArray = field(init=False)
    _turns: NDArray = field(init=False)
    _committed: NDArray = field(init=False)
    _accesses: list[_Access] = field(default_factory=list)
    _copies: list[_Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_cells = -(-self.size // self.cell)
        self._cells = np.zeros(self.num_programs * num_cells, _UNSIGNED[self.cell])
        self._state = np.zeros(len(self._cells), np.uint8)
        self._turns = np.zeros(self.num_programs * self.num_threads // 32, np.int64)
        self._committed = np.zeros(self.num_programs * self.num_threads, np.int64)

    def _find(self, addresses: NDArray, size: int, threads: NDArray, by: Instruction) -> NDArray:
        """The cells of each address. [addresses, size // cell]"""
        offsets = addresses.astype(np.int64) - SHARED_BASE
        wrong = (offsets < 0) | (offsets + size > self.size) | (offsets % size != 0)
        if wrong.any():
            first = np.flatnonzero(wrong)[0]
            raise OutsideFault(
                f"{self.who(threads[first])}: byte {offsets[first]} of shared memory, which has {self.size}, cannot be reached "
                f"by {size} bytes in {by}"
            )
        starts = offsets // self.cell + threads // self.num_threads * (len(self._cells) // self.num_programs)
        return starts[:, None] + np.arange(size // self.cell)

    def _find_landed(self, addresses: NDArray, size: int, threads: NDArray, by: Instruction) -> NDArray:
        """As _find, for an instruction that writes: no cp.async may be in flight to a cell."""
        cells = self._find(addresses, size, threads, by)
        in_flight = self._state[cells] == _IN_FLIGHT
        if in_flight.any():
            row, column = np.argwhere(in_flight)[0]
            self._refuse_in_flight(cells[row, column], threads[row], by)
        return cells

    def _note(self, cells: NDArray, threads: NDArray, writes: bool, by: Instruction) -> None:
        self._accesses.append(_Access(cells, threads, self._turns[threads // 32], writes, by))

    def load(self, addresses: NDArray, size: int, threads: NDArray, by: Instruction) -> NDArray:
        """size bytes from each address. [addresses, size]"""
        cells = self._find(addresses, size, threads, by)
        states = self._state[cells]
        if (states != _WRITTEN).any():
            row, column = np.argwhere(states != _WRITTEN)[0]
            self._refuse_in_flight(cells[row, column], threads[row], by)
            raise UnwrittenFault(
                f"{self.who(threads[row])}: byte {self._byte(cells[row, column])} of shared memory was never written. "
                f"It is read in {by}"
            )
        self._note(cells, threads, False, by)
        return self._cells[cells].view(np.uint8)

    def store(self, addresses: NDArray, values: NDArray, threads: NDArray, by: Instruction) -> None:
        """Write values, bytes [addresses, size]."""
        cells = self._find_landed(addresses, values.shape[1], threads, by)
        self._put(cells, values.view(self._cells.dtype), threads, by)
        self._note(cells, threads, True, by)

    def _put(self, cells: NDArray, values: NDArray, threads: NDArray, by: Instruction) -> None:
        """Write cells. Threads may write one place in one instruction, if their values of 32 bits differ by fp32's rounding."""
        self._cells[cells] = values
        self._state[cells] = _WRITTEN
        landed = self._cells[cells]
        lost = landed != values
        if not lost.any():
            return
        if by.name.endswith("32"):
            a, b = landed.view(np.float32), values.view(np.float32)
            if (np.abs(a - b) <= _ROUNDING * np.abs(a)).all():
                return
        row, column = np.argwhere(lost)[0]
        cell = cells[row, column]
        other = threads[np.flatnonzero(((cells == cell) & ~lost).any(1))[0]]
        raise RaceFault(
            f"{self.who(threads[row])} and {self.who(other)} write different values to byte {self._byte(cell)} of shared "
            f"memory in {by}"
        )

    def _byte(self, cell: int) -> int:
        return int(cell % (len(self._cells) // self.num_programs)) * self.cell

    def _refuse_in_flight(self, cell: int, thread: int, by: Instruction) -> None:
        for copy in self._copies:
            if (copy.cells == cell).any():
                raise InFlightFault(
                    f"{self.who(thread)}: byte {self._byte(cell)} of shared memory is used in {by} before a wait for {copy.by}"
                )

    def copy_async(self, addresses: NDArray, values: NDArray, threads: NDArray, by: Instruction) -> None:
        """Begin to write values, which land when their thread waits for their group."""
        cells = self._find_landed(addresses, values.shape[1], threads, by)
        self._state[cells] = _IN_FLIGHT
        self._note(cells, threads, True, by)
        self._copies.append(_Copy(cells, values.view(self._cells.dtype), threads, self._committed[threads], by))

    def commit(self, threads: NDArray) -> None:
        """End the current group of cp.async of these threads."""
        self._committed[threads] += 1

    def wait(self, num_left: int, threads: NDArray) -> None:
        """Let the groups of these threads land, except for their newest num_left."""
        waits = np.zeros(len(self._committed), bool)
        waits[threads] = True
        copies, self._copies = self._copies, []
        for copy in copies:
            lands = waits[copy.threads] & (copy.groups < self._committed[copy.threads] - num_left)
            if lands.any():
                self._put(copy.cells[lands], copy.values[lands], copy.threads[lands], copy.by)
                self._note(copy.cells[lands], copy.threads[lands], True, copy.by)
            if not lands.all():
                left = ~lands
                self._copies.append(_Copy(copy.cells[left], copy.values[left], copy.threads[left], copy.groups[left], copy.by))

    def meet_in_warps(self, threads: NDArray) -> None:
        """Order what the threads of each warp did before and what they will do."""
        self._turns[np.flatnonzero(np.bincount(threads // 32))] += 1

    def meet(self, threads: NDArray) -> None:
        """Order what the threads of each program did before and what they will do: look for races among the former."""
        arrives, now, later = np.zeros(self.num_programs, bool), [], []
        arrives[threads // self.num_threads] = True
        for access in self._accesses:
            chosen = arrives[access.threads // self.num_threads]
            if chosen.all() or not chosen.any():
                (now if chosen.any() else later).append(access)
                continue
            for kept, rows in ((now, chosen), (later, ~chosen)):
                kept.append(_Access(access.cells[rows], access.threads[rows], access.turns[rows], access.writes, access.by))
        self._accesses = later
        if any(access.writes for access in now):
            self._find_races(now)
        self.meet_in_warps(threads)

    def _find_races(self, accesses: list[_Access]) -> None:
        is_written = np.zeros(len(self._cells), bool)
        for access in accesses:
            if access.writes:
                is_written[access.cells] = True
        last_user = np.full(len(self._cells), -1, np.int64)
        for access in accesses:
            last_user[access.cells] = access.threads[:, None]
        several = np.zeros(len(self._cells), bool)  # cells that are written, and have several users
        for access in accesses:
            several[access.cells[last_user[access.cells] != access.threads[:, None]]] = True
        several &= is_written
        if not several.any():
            return
        parts = []
        for number, access in enumerate(accesses):
            rows, columns = np.nonzero(several[access.cells])
            cells, threads, turns = access.cells[rows, columns], access.threads[rows], access.turns[rows]
            parts.append(np.stack((cells, threads, turns, np.full_like(cells, number), np.full_like(cells, access.writes))))
        users = np.concatenate(parts, 1)
        users = users[:, np.argsort(users[0], kind="stable")]
        distance = 1
        while True:
            a, b = users[:, :-distance], users[:, distance:]
            same_cell = a[0] == b[0]
            if not same_cell.any():
                return
            one_writes = (a[4] | b[4]) == 1
            in_one_store = (a[3] == b[3]) & (a[4] == 1)  # of one value, which _put has checked
            ordered = (a[1] // 32 == b[1] // 32) & (a[2] != b[2])
            races = same_cell & (a[1] != b[1]) & one_writes & ~in_one_store & ~ordered
            if races.any():
                first = np.flatnonzero(races)[0]
                told = [
                    f"{self.who(user[1])} {'writes' if user[4] else 'reads'} it in {accesses[user[3]].by}"
                    for user in (a[:, first], b[:, first])
                ]
                raise RaceFault(
                    f"byte {self._byte(a[0, first])} of shared memory: {told[0]}, and {told[1]}, with nothing that orders them"
                )
            distance += 1
