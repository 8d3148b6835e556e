"""Execute a kernel's PTX in numpy: all threads of several programs at once, an array element for each.

In: a kernel (ptx.py), a grid, arguments and tensors (memory.py). Out: the tensors are written, or a `Fault` is raised.

A block's instructions are decoded into functions of no arguments, which compute whole arrays. Every thread has its own next
block. The first of these blocks in the kernel's order is executed next, by the threads that are there, so that threads that
diverge meet again where their paths do. Programs run in any order on a GPU, and order.py reports those that rely on one, so
several are emulated together. Arithmetic is IEEE's, except that `fma` rounds twice (to fp64 and to fp32) and that `ftz` keeps
denormal numbers. The approximate `ex2`, `rsqrt` and `div` round to nearest.
"""

import re
from collections.abc import Callable, Sequence
from functools import partialmethod

import numpy as np
from numpy.typing import NDArray

from tests.emulated_gpu.memory import SHARED_BASE, DivergenceFault, GlobalMemory, SharedMemory
from tests.emulated_gpu.ptx import Instruction, Kernel

_WARP = 32
_LANES_AT_ONCE = 4096  # programs are emulated together up to this number of threads
_SINK = -1  # the row of what `_` takes
_DONE = np.iinfo(np.int64).max
_REGISTER_TYPES = {
    "%p": np.bool_, "%rs": np.uint16, "%r": np.uint32, "%rd": np.uint64, "%inline_s": np.uint8, "%inline_f": np.uint32,
}  # fmt: skip
_TYPES = {
    "pred": np.bool_, "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "f32": np.float32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f16": np.float16, "bf16": np.uint16,
    "b8": np.uint8, "s8": np.int8, "f64": np.float64,
}  # fmt: skip
_WIDER = {np.uint32: np.uint64, np.int32: np.int64, np.uint16: np.uint32, np.int16: np.int32}
_ARITHMETIC = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "min": np.minimum, "max": np.maximum, "div": np.divide, "not": np.invert, "neg": np.negative, "abs": np.abs,
}  # fmt: skip
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "num": lambda a, b, out, where: np.copyto(out, (a == a) & (b == b), where=where),  # neither is NaN
    "nan": lambda a, b, out, where: np.copyto(out, (a != a) | (b != b), where=where),
    "equ": lambda a, b, out, where: np.copyto(out, ~((a < b) | (a > b)), where=where),  # equal, or NaN
    "ltu": lambda a, b, out, where: np.copyto(out, ~(a >= b), where=where), "neu": np.not_equal,
    "geu": lambda a, b, out, where: np.copyto(out, ~(a < b), where=where),
}  # fmt: skip
_ATOMIC = {"exch": lambda old, new: new} | {name: _ARITHMETIC[name] for name in ("add", "and", "or", "xor", "min", "max")}
_CONVERSIONS = (
    ["rn", "f32", "s32"], ["rn", "f64", "s64"], ["rn", "f64", "u64"], ["rzi", "s64", "f64"], ["rzi", "s64", "f32"],
    ["rn", "f32", "s64"], ["rn", "f32", "u16"], ["rn", "f32", "u32"], ["rzi", "s16", "f32"], ["rn", "f32", "s8"],
    ["rn", "f32", "s16"], ["rn", "f16", "s16"],
)  # fmt: skip
_SPECIAL = {"%tid.x": 0, "%ctaid.x": 0, "%ctaid.y": 1, "%ctaid.z": 2}
_ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]")

Step = Callable[[], None]
Observe = Callable[["Machine", Instruction], None]


def emulate(
    kernel: Kernel, grid: Sequence[int], arguments: Sequence[int | float], memory: GlobalMemory, shared_size: int,
    observe: Observe | None = None, is_dependent: bool = False,
) -> None:  # fmt: skip
    """Execute all programs of a grid.

    Args:
        arguments: the values of the kernel's parameters, tensors by the addresses that memory gave them.
        shared_size: bytes of shared memory of a program.
        observe: is called before each instruction, for the threads of `machine.threads`.
        is_dependent: it was launched with programmatic dependent launch (PDL), so it may run before earlier kernels have ended.

    Raises:
        Fault: the kernel does what a GPU would not report.
        NotImplementedError: a thread gets to an instruction that is not known.
    """
    x, y, z = (*grid, 1, 1)[:3]
    programs = np.array([(i, j, k) for k in range(z) for j in range(y) for i in range(x)])
    num_threads, cell = kernel.num_threads, _smallest_shared_access(kernel)
    at_once = max(1, _LANES_AT_ONCE // num_threads)

    def who(thread: int) -> str:
        return f"thread {thread % num_threads} of program {tuple(programs[thread // num_threads].tolist())}"

    memory.begin(len(programs), num_threads, who, is_dependent)
    with np.errstate(all="ignore"):
        for first in range(0, len(programs), at_once):
            chosen = programs[first : first + at_once]
            shared = SharedMemory(
                shared_size, cell, len(chosen), num_threads, lambda thread, first=first: who(first * num_threads + thread)
            )
            Machine(kernel, (x, y, z), chosen, first * num_threads, arguments, memory, shared, observe).run()
    memory.end()


def _smallest_shared_access(kernel: Kernel) -> int:
    """Bytes. All accesses are multiples of it, so shared memory is kept in cells of it."""
    sizes = [16]
    for instruction in (instruction for block in kernel.blocks for instruction in block):
        if instruction.name.startswith(("ld.shared", "st.shared")):
            sizes.append(int(re.search(r"\d+$", instruction.name)[0]) // 8)
        elif instruction.name.startswith("cp.async.c") and "shared" in instruction.name:
            sizes.append(int(instruction.operands[2], 0))
    return min(8, *sizes)


def _larger(a: NDArray, b: NDArray, out: NDArray, where: bool | NDArray) -> None:
    """np.fmax, with 0.0 above -0.0, which NumPy leaves open."""
    zeros = where & (a == 0) & (b == 0)
    np.copyto(out, np.where(zeros, a + b, np.fmax(a, b)), where=where)


class Machine:
    """The threads of some programs, with their registers.

    Attributes:
        mask: the threads that take part in what is executed, True if all do.
        threads: their numbers. Programs follow each other.
    """

    def __init__(
        self, kernel: Kernel, grid: Sequence[int], programs: NDArray, first_thread: int, arguments: Sequence[int | float],
        memory: GlobalMemory, shared: SharedMemory, observe: Observe | None,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.num_threads, self.num_lanes = kernel.num_threads, len(programs) * kernel.num_threads
        self.memory, self.shared, self._first_thread, self._observe = memory, shared, first_thread, observe
        self.banks = {
            prefix: np.zeros((count + 1, self.num_lanes), _REGISTER_TYPES[prefix])
            for prefix, count in kernel.num_registers.items()
        }
        self._all = np.arange(self.num_lanes)
        self._special = {name: programs.T[axis].repeat(self.num_threads).astype(np.uint32) for name, axis in _SPECIAL.items()}
        self._special |= {
            f"%nctaid.{axis}": np.full(self.num_lanes, size, np.uint32) for axis, size in zip("xyz", grid, strict=True)
        }
        self._special["%tid.x"] = (self._all % self.num_threads).astype(np.uint32)
        self._parameters = dict(zip(kernel.parameters, arguments, strict=True))
        self._labels = kernel.labels
        self._steps: list[list[Step] | None] = [None] * len(kernel.blocks)  # decoded when a thread first gets there
        self._next = np.zeros(self.num_lanes, np.int64)
        self.mask: bool | NDArray = True
        self.threads = self._all

    def run(self) -> None:
        """Execute until all threads have returned."""
        while (block := self._next.min()) != _DONE:
            here = self._next == block
            self._next[here] = block + 1
            self._restrict(True if here.all() else here)
            steps = self._steps[block]
            if steps is None:
                steps = self._steps[block] = [self._decode(instruction) for instruction in self.kernel.blocks[block]]
            for step in steps:
                step()
        self._restrict(True)
        self.shared.meet(self.threads)

    def _restrict(self, mask: bool | NDArray) -> None:
        self.mask = mask
        self.threads = self._all if mask is True else np.flatnonzero(mask)

    def _guarded(self, guard: tuple[str, bool], step: Step) -> Step:
        predicate, negated = self._register(guard[0]), guard[1]

        def guarded() -> None:
            mask, threads = self.mask, self.threads
            chosen = ~predicate if negated else predicate.copy()
            if mask is not True:
                chosen &= mask
            if chosen.any():
                self._restrict(True if chosen.all() else chosen)
                step()
                self.mask, self.threads = mask, threads

        return guarded

    # Operands

    def _register(self, name: str, dtype: type | None = None) -> NDArray:
        found = re.fullmatch(r"(%\D+)(\d+)", name)
        if not found:
            raise NotImplementedError(f"the emulator does not know the register {name}")
        prefix, number = found.groups()
        row = self.banks[prefix][int(number)]
        if dtype is np.int8:  # the low byte
            return row.view(dtype)[:: row.itemsize]
        return row if dtype is None else row.view(dtype)

    def _value(self, operand: str, dtype: type) -> NDArray:
        """A register or a number, as a type."""
        if operand in self._special:
            return self._special[operand].view(dtype)
        if operand.startswith("%"):
            return self._register(operand, dtype)
        if operand == "global_smem":
            return dtype(SHARED_BASE)
        if operand.startswith("0f"):
            bits = np.uint32(int(operand[2:], 16))
            return bits if dtype in (np.uint32, np.int32) else bits.view(dtype)
        if operand.startswith("0d"):
            return np.uint64(int(operand[2:], 16)).view(dtype)
        number = int(operand, 0)
        if dtype is np.bool_:
            return np.bool_(number)
        bits = 8 * dtype().itemsize
        return np.array(number % 2**bits, f"u{bits // 8}").view(dtype)[()]

    def _rows(self, operand: str) -> tuple[str, list[int]]:
        """The prefix and the numbers of one register, or of several in braces."""
        names = operand.strip("{} ").replace(" ", "").split(",")
        prefix = re.search(r"%\D+", operand)[0]
        return prefix, [_SINK if name == "_" else int(name[len(prefix) :]) for name in names]

    def _gather(self, operand: str) -> NDArray:
        """The registers in braces. [registers, threads]"""
        prefix, rows = self._rows(operand)
        return self.banks[prefix][rows]

    def _scatter(self, operand: str) -> Callable[[NDArray], None]:
        """Write the threads that take part: values [registers, threads that take part]."""
        prefix, rows = self._rows(operand)
        bank, column = self.banks[prefix], np.array(rows)[:, None]

        def scatter(values: NDArray) -> None:
            if self.mask is True:
                bank[rows] = values
            else:
                bank[column, self.threads] = values

        return scatter

    def address(self, operand: str) -> Callable[[], NDArray]:
        """The addresses of the threads that take part."""
        base, offset = _ADDRESS.fullmatch(operand).groups()
        if base == "global_smem":
            fixed = np.full(self.num_lanes, SHARED_BASE + int(offset or 0), np.uint32)
            return lambda: fixed[self.threads]
        register = self._register(base)
        offset = register.dtype.type(int(offset or 0) % 2 ** (8 * register.dtype.itemsize))
        return lambda: register[self.threads] + offset

    # Decoding

    def _decode(self, instruction: Instruction) -> Step:
        family, *types = instruction.name.split(".")
        decode = getattr(self, f"_decode_{family}", None)
        if family in _ARITHMETIC and not (family == "mul" and types[0] in ("wide", "lo", "hi")):
            decode = self._decode_arithmetic
        step = decode and decode(instruction, types)
        if step is None:
            raise NotImplementedError(f"the emulator does not know {instruction}")
        if self._observe:
            step = self._observed(instruction, step)
        return step if instruction.guard is None else self._guarded(instruction.guard, step)

    def _observed(self, instruction: Instruction, step: Step) -> Step:
        def observed() -> None:
            self._observe(self, instruction)
            step()

        return observed

    def _ufunc(self, function: np.ufunc, target: str, sources: Sequence[str], dtype: type, out: type | None = None) -> Step:
        result = self._register(target, out or dtype)
        values = [self._value(source, dtype) for source in sources]
        if len(values) == 1:
            return lambda: function(values[0], out=result, where=self.mask)
        a, b = values
        return lambda: function(a, b, out=result, where=self.mask)

    def _copy(self, target: NDArray, compute: Callable[[], NDArray]) -> Step:
        return lambda: np.copyto(target, compute(), where=self.mask, casting="unsafe")

    def _decode_arithmetic(self, instruction: Instruction, types: list[str]) -> Step | None:
        family = instruction.name.split(".")[0]
        if types[-1] in ("s16x2", "u16x2"):  # two numbers in a register, of which each wraps by itself
            dtype, function = _TYPES[types[-1][:3]], _ARITHMETIC[family]
            target, *sources = instruction.operands
            result, sources = self._register(target), [self._value(source, np.uint32) for source in sources]
            pairs = [np.atleast_1d(source).view(dtype).reshape(-1, 2) for source in sources]
            return self._copy(result, lambda: function(*pairs).view(np.uint32)[:, 0])
        if types[-1] in ("f16x2", "bf16x2"):
            widen, narrow = (_from_f16, _to_f16) if types[-1] == "f16x2" else (_from_bf16, _to_bf16)
            target, *sources = instruction.operands
            halves = [self._value(source, np.uint32) for source in sources]

            def on_pairs() -> NDArray:
                pairs = [widen(np.atleast_1d(half).view(np.uint16).reshape(-1, 2)) for half in halves]
                return narrow(_ARITHMETIC[family](*pairs)).view(np.uint32)[:, 0]

            return self._copy(self._register(target), on_pairs)
        dtype, function = _TYPES[types[-1]], _ARITHMETIC[family]
        if dtype is np.float32 or types[-1] == "bf16":  # a number wins over NaN
            function = {"min": np.fmin, "max": _larger}.get(family, function)
        if types[-1] == "bf16":  # in fp32, and rounded
            values = [self._value(source, np.uint16) for source in instruction.operands[1:]]
            result = self._register(instruction.operands[0])
            return self._copy(result, lambda: _to_bf16(function(*map(_from_bf16, values))))
        return self._ufunc(function, instruction.operands[0], instruction.operands[1:], dtype)

    def _decode_mul(self, instruction: Instruction, types: list[str]) -> Step | None:
        target, a, b = instruction.operands
        if "bf16" in types:
            return None
        dtype = _TYPES[types[1]]
        if types[0] == "lo":
            return self._ufunc(np.multiply, target, (a, b), dtype)
        wide = _WIDER[dtype]
        if types[0] == "hi":
            a, b, shift = self._value(a, dtype), self._value(b, dtype), wide(8 * dtype().itemsize)
            return self._copy(self._register(target, dtype), lambda: np.multiply(a, b, dtype=wide) >> shift)
        a, b, result = self._value(a, dtype), self._value(b, dtype), self._register(target, wide)
        return lambda: np.multiply(a, b, out=result, where=self.mask, dtype=wide)

    def _decode_mad(self, instruction: Instruction, types: list[str]) -> Step:
        target, a, b, c = instruction.operands
        dtype = _TYPES[types[1]]
        wide = dtype if types[0] == "lo" else _WIDER[dtype]
        a, b, c, result = self._value(a, dtype), self._value(b, dtype), self._value(c, wide), self._register(target, wide)
        return self._copy(result, lambda: np.multiply(a, b, dtype=wide) + c)

    def _decode_fma(self, instruction: Instruction, types: list[str]) -> Step | None:
        if types not in (["rn", "f32"], ["rn", "ftz", "f32"], ["rm", "ftz", "f32"]):
            return None
        a, b, c = (self._value(operand, np.float32) for operand in instruction.operands[1:])
        result, product = self._register(instruction.operands[0], np.float32), np.empty(self.num_lanes)

        def fma() -> None:
            np.multiply(a, b, out=product, dtype=np.float64)  # exact
            np.add(product, c, out=product)
            rounded = product.astype(np.float32)
            if types[0] == "rm":  # down
                rounded = np.where(rounded > product, np.nextafter(rounded, np.float32(-np.inf)), rounded)
            np.copyto(result, rounded, where=self.mask)

        return fma

    def _decode_rounded(self, instruction: Instruction, types: list[str], function: Callable[[NDArray], NDArray]) -> Step:
        """A function of fp32 that is computed in fp64."""
        value, result = self._value(instruction.operands[1], np.float32), self._register(instruction.operands[0], np.float32)
        return self._copy(result, lambda: function(value.astype(np.float64)))

    _decode_ex2 = partialmethod(_decode_rounded, function=np.exp2)
    _decode_rsqrt = partialmethod(_decode_rounded, function=lambda value: 1 / np.sqrt(value))

    def _decode_popc(self, instruction: Instruction, types: list[str]) -> Step:
        value, result = self._value(instruction.operands[1], np.uint32), self._register(instruction.operands[0])
        return self._copy(result, lambda: np.unpackbits(value.view(np.uint8).reshape(-1, 4), axis=1).sum(1))

    def _decode_setp(self, instruction: Instruction, types: list[str]) -> Step:
        target, a, b = instruction.operands
        if types[1] == "bf16":
            result, values = self._register(target, np.bool_), [self._value(source, np.uint16) for source in (a, b)]
            return lambda: _COMPARE[types[0]](*map(_from_bf16, values), out=result, where=self.mask)
        return self._ufunc(_COMPARE[types[0]], target, (a, b), _TYPES[types[1]], np.bool_)

    def _decode_selp(self, instruction: Instruction, types: list[str]) -> Step:
        target, a, b, predicate = instruction.operands
        dtype = _TYPES[types[0]]
        a, b, predicate = self._value(a, dtype), self._value(b, dtype), self._register(predicate)
        return self._copy(self._register(target, dtype), lambda: np.where(predicate, a, b))

    def _decode_shift(self, instruction: Instruction, types: list[str], function: np.ufunc) -> Step:
        """A shift by the width of the type or more leaves nothing, or the sign."""
        target, value, count = instruction.operands
        dtype = _TYPES[types[0]]
        bits = 8 * dtype().itemsize
        value, count, result = self._value(value, dtype), self._value(count, np.uint32), self._register(target, dtype)
        if np.ndim(count) == 0 and count < bits:
            count = dtype(count)
            return lambda: function(value, count, out=result, where=self.mask)
        is_signed = np.issubdtype(dtype, np.signedinteger) and function is np.right_shift

        def shift() -> NDArray:
            limited = np.minimum(count, np.uint32(bits - 1)).astype(dtype)
            shifted = function(value, limited)
            return shifted if is_signed else np.where(count < bits, shifted, dtype(0))

        return self._copy(result, shift)

    _decode_shl = partialmethod(_decode_shift, function=np.left_shift)
    _decode_shr = partialmethod(_decode_shift, function=np.right_shift)

    def _decode_bfe(self, instruction: Instruction, types: list[str]) -> Step | None:
        """The bits from a position on, for constants, as which they occur."""
        target, value, position, length = instruction.operands
        dtype, position, length = _TYPES[types[0]], int(position), int(length)
        if position + length > 32 or length == 0:
            return None
        up, down = dtype(32 - position - length), dtype(32 - length)
        value = self._value(value, dtype)
        return self._copy(self._register(target, dtype), lambda: (value << up) >> down)

    def _decode_prmt(self, instruction: Instruction, types: list[str]) -> Step | None:
        """Four of the eight bytes of two registers, or their signs, for which the highest of four bits of a constant asks."""
        target, a, b, chosen = instruction.operands
        numbers = [int(chosen.rstrip("U"), 0) >> 4 * i & 15 for i in range(4)]
        if types != ["b32"]:
            return None
        both, places = [self._value(operand, np.uint32) for operand in (a, b)], [number & 7 for number in numbers]
        is_sign, result = [number > 7 for number in numbers], self._register(target)

        def permute() -> NDArray:
            found = np.stack([np.broadcast_to(value, self.num_lanes) for value in both], 1).view(np.uint8)[:, places]
            signs = np.where(found.view(np.int8) < 0, np.uint8(255), np.uint8(0))
            return np.ascontiguousarray(np.where(is_sign, signs, found)).view(np.uint32)[:, 0]

        return self._copy(result, permute)

    def _decode_cvt(self, instruction: Instruction, types: list[str]) -> Step | None:
        target, *sources = instruction.operands
        if types == ["ftz", "sat", "f32", "f32"]:
            value = self._value(sources[0], np.float32)
            return self._copy(self._register(target, np.float32), lambda: np.fmax(np.fmin(value, np.float32(1)), np.float32(0)))
        if types == ["rni", "ftz", "s32", "f32"]:
            value = self._value(sources[0], np.float32)
            return self._copy(self._register(target, np.int32), lambda: np.rint(value))
        rounded = types[0] in ("rn", "rzi")
        to, source_type = types[rounded:]
        sources = [self._value(source, _TYPES[source_type]) for source in sources]
        if to in ("bf16", "f16"):
            narrow = _to_bf16 if to == "bf16" else _to_f16
            return self._copy(self._register(target), lambda: narrow(sources[0]))
        if to in ("bf16x2", "f16x2"):
            narrow = _to_bf16 if to == "bf16x2" else _to_f16
            high, low = sources
            return self._copy(self._register(target), lambda: narrow(high).astype(np.uint32) << np.uint32(16) | narrow(low))
        if source_type == "bf16":
            return self._copy(self._register(target), lambda: sources[0].astype(np.uint32) << np.uint32(16))
        if rounded and source_type != "f16" and types not in _CONVERSIONS:
            return None
        if to == "s8":  # a register is wider, and gets the sign
            return self._copy(self._register(target, np.int16), lambda: sources[0].astype(np.int8))
        return self._copy(self._register(target, _TYPES[to]), lambda: sources[0])

    def _decode_mov(self, instruction: Instruction, types: list[str]) -> Step:
        target, source = instruction.operands
        if target == "%SPL":  # the stack, which no block that is executed uses
            return lambda: None
        if target.startswith("{"):
            scatter, value = self._scatter(target), self._register(source)
            prefix, rows = self._rows(target)
            return lambda: scatter(value[self.threads].view(_REGISTER_TYPES[prefix]).reshape(-1, len(rows)).T)
        if source.startswith("{"):
            result = self._register(target)
            return self._copy(result, lambda: np.ascontiguousarray(self._gather(source).T).view(result.dtype)[:, 0])
        dtype = _TYPES[types[0]]
        value = self._value(source, dtype)
        return self._copy(self._register(target, dtype), lambda: value)

    # Memory

    def _decode_ld(self, instruction: Instruction, types: list[str]) -> Step:
        target, address = instruction.operands
        if types[0] == "param":
            argument = self._parameters[address.strip("[] ")]
            dtype = _TYPES[types[1]]
            if isinstance(argument, float):
                value = np.float32(argument).view(np.uint32)
            else:
                value = np.array(argument % 2**64, np.uint64).astype(dtype).astype(self._register(target).dtype)
            return self._copy(self._register(target), lambda: value)
        memory, first = (self.memory, self._first_thread) if types[0] == "global" else (self.shared, 0)
        number, size = len(self._rows(target)[1]), _TYPES[types[-1]]().itemsize
        addresses, scatter, unit = self.address(address), self._scatter(target), _TYPES[types[-1]]

        def load() -> None:
            scatter(memory.load(addresses(), number * size, self.threads + first, instruction).view(unit).T)

        return load

    def _decode_st(self, instruction: Instruction, types: list[str]) -> Step:
        address, source = instruction.operands
        memory, first = (self.memory, self._first_thread) if types[0] == "global" else (self.shared, 0)
        addresses, is_byte = self.address(address), types[-1] == "b8"

        def store() -> None:
            values = np.ascontiguousarray(self._gather(source)[:, self.threads].T)
            values = values.astype(np.uint8) if is_byte else values.view(np.uint8)
            memory.store(addresses(), values, self.threads + first, instruction)

        return store

    def _decode_cp(self, instruction: Instruction, types: list[str]) -> Step | None:
        """A copy of a size, of which the first bytes come from global memory, and zeros follow."""
        if types[1] == "commit_group":
            return lambda: self.shared.commit(self.threads)
        if types[1] == "wait_group":
            num_left = int(instruction.operands[0])
            return lambda: self.shared.wait(num_left, self.threads)
        if types[1:] not in (["ca", "shared", "global"], ["cg", "shared", "global"]):
            return None
        target, source, size, *given = instruction.operands
        size, target, source = int(size, 0), self.address(target), self.address(source)
        given = self._value(given[0], np.uint32) if given else np.uint32(size)

        def copy() -> None:
            num_bytes = np.broadcast_to(given, self.num_lanes)[self.threads]
            values = np.zeros((len(self.threads), size), np.uint8)
            reads = num_bytes > 0
            if not np.isin(num_bytes, (0, size)).all():
                raise NotImplementedError(f"the emulator copies all or nothing, not a part, in {instruction}")
            if reads.any():
                values[reads] = self.memory.load(source()[reads], size, self.threads[reads] + self._first_thread, instruction)
            self.shared.copy_async(target(), values, self.threads, instruction)

        return copy

    def _decode_ldmatrix(self, instruction: Instruction, types: list[str]) -> Step | None:
        """Matrices of 8 x 8 16-bit numbers. The threads name their rows, eight each, and get two numbers of a row each."""
        if types[:3] != ["sync", "aligned", "m8n8"] or types[-2:] != ["shared", "b16"]:
            return None
        number, transposed = int(types[3][1:]), "trans" in types
        address, scatter = self.address(instruction.operands[1]), self._scatter(instruction.operands[0])

        def ldmatrix() -> None:
            self._require_whole_warps(instruction)
            naming = self.threads.reshape(-1, _WARP)[:, : 8 * number].reshape(-1)
            addresses = address().reshape(-1, _WARP)[:, : 8 * number].reshape(-1)
            matrices = self.shared.load(addresses, 16, naming, instruction).view(np.uint16).reshape(-1, number, 8, 8)
            if transposed:
                matrices = matrices.swapaxes(2, 3)
            pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, number, _WARP)
            scatter(pairs.transpose(1, 0, 2).reshape(number, -1))

        return ldmatrix

    def _decode_stmatrix(self, instruction: Instruction, types: list[str]) -> Step | None:
        """The inverse of ldmatrix: the threads hold two numbers of a row each, and name the rows to which they are written."""
        if types[:3] != ["sync", "aligned", "m8n8"] or types[-2:] != ["shared", "b16"]:
            return None
        number, transposed = int(types[3][1:]), "trans" in types
        address, source = self.address(instruction.operands[0]), instruction.operands[1]

        def stmatrix() -> None:
            self._require_whole_warps(instruction)
            naming = self.threads.reshape(-1, _WARP)[:, : 8 * number].reshape(-1)
            addresses = address().reshape(-1, _WARP)[:, : 8 * number].reshape(-1)
            pairs = self._gather(source)[:, self.threads].reshape(number, -1, _WARP).swapaxes(0, 1)
            matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(-1, number, 8, 8)
            if transposed:
                matrices = matrices.swapaxes(2, 3)
            values = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 16)
            self.shared.store(addresses, values, naming, instruction)

        return stmatrix

    def _decode_atom(self, instruction: Instruction, types: list[str]) -> Step | None:
        """What a program releases to the whole GPU, others can acquire. At a smaller scope it is theirs only by luck."""
        if types[0] != "global" or len(types) != 5 or types[3] not in _ATOMIC:
            return None
        _, scope, semantics, family, type_name = types
        target, address, operand = instruction.operands
        dtype, function = _TYPES[type_name], _ATOMIC[family]
        result, value, addresses = self._register(target), self._value(operand, dtype), self.address(address)
        reaches_all = scope in ("gpu", "sys")
        releases, acquires = (reaches_all and name in semantics for name in ("rel", "acq"))

        def update() -> None:
            values = np.broadcast_to(value, self.num_lanes)[self.threads]
            old = self.memory.update(
                addresses(), dtype().itemsize, self.threads + self._first_thread, instruction,
                lambda i, stored: function(stored.view(dtype), values[i : i + 1]), releases=releases, acquires=acquires,
            )  # fmt: skip
            result[self.threads] = old.view(result.dtype)[:, 0]

        return update

    # Warps and programs

    def _decode_griddepcontrol(self, instruction: Instruction, types: list[str]) -> Step | None:
        if types == ["launch_dependents"]:  # later kernels may start. They wait for the end of this one, whenever they start
            return lambda: None
        return (lambda: self.memory.wait_for_earlier(self.threads + self._first_thread)) if types == ["wait"] else None

    def _require_whole_warps(self, instruction: Instruction) -> None:
        if self.mask is not True:
            together = self.mask.reshape(-1, _WARP)
            if (together.any(1) != together.all(1)).any():
                raise DivergenceFault(f"some threads of a warp are elsewhere in {instruction}")

    def _decode_bar(self, instruction: Instruction, types: list[str]) -> Step | None:
        if types == ["warp", "sync"]:

            def meet_in_warps() -> None:
                self._require_whole_warps(instruction)
                self.shared.meet_in_warps(self.threads)
                if self.num_threads == _WARP:
                    self.memory.order.meet(self.threads + self._first_thread)

            return meet_in_warps
        if types != ["sync"] or instruction.operands != ["0"]:
            return None

        def meet() -> None:
            if self.mask is not True:
                together = self.mask.reshape(-1, self.num_threads)
                if (together.any(1) != together.all(1)).any():
                    raise DivergenceFault(f"some threads of a program are elsewhere in {instruction}")
            self.shared.meet(self.threads)
            self.memory.order.meet(self.threads + self._first_thread)

        return meet

    def _decode_shfl(self, instruction: Instruction, types: list[str]) -> Step | None:
        target, source, lane, limit, members = instruction.operands
        if types[0] != "sync" or (types[1], limit) not in (("bfly", "31"), ("idx", "31"), ("up", "0")) or members != "-1":
            return None
        result, source, lane = self._register(target), self._register(source), self._value(lane, np.uint32)
        own, first = self._all % _WARP, self._all - self._all % _WARP

        def shuffle() -> None:
            self._require_whole_warps(instruction)
            if types[1] == "up":  # a lane that has none so far below keeps its own
                other = np.where(own < lane, own, own - lane)
            elif types[1] == "bfly":
                other = own ^ lane
            else:
                other = lane
            np.copyto(result, source[first + other.astype(np.int64) % _WARP], where=self.mask)
            self.shared.meet_in_warps(self.threads)

        return shuffle

    def _decode_redux(self, instruction: Instruction, types: list[str]) -> Step | None:
        if types not in (["sync", "add", "s32"], ["sync", "min", "s32"]):
            return None
        reduce = _ARITHMETIC[types[1]].reduce
        target, source, members = instruction.operands
        result, source, members = (
            self._register(target, np.int32),
            self._register(source, np.int32),
            np.broadcast_to(self._value(members, np.uint32), self.num_lanes),
        )

        def redux() -> None:
            self._require_whole_warps(instruction)
            if (members[self.threads] != np.uint32(2**32 - 1)).any():
                raise NotImplementedError(f"the emulator reduces whole warps only in {instruction}")
            reduced = reduce(source.reshape(-1, _WARP), axis=1, dtype=np.int32)
            np.copyto(result, reduced.repeat(_WARP), where=self.mask)

        return redux

    def _decode_mma(self, instruction: Instruction, types: list[str]) -> Step | None:
        """d = a @ b + c for each warp, [16, 16] @ [16, 8]. Source: the PTX manual, "Matrix Fragments for mma.m16n8k16".

        A thread has the rows lane // 4 and lane // 4 + 8, and the columns 2 * (lane % 4), the next one, and both plus 8.
        """
        if types[:5] != ["sync", "aligned", "m16n8k16", "row", "col"] or types[5:] not in (
            ["f32", "bf16", "bf16", "f32"],
            ["f32", "f16", "f16", "f32"],
        ):
            return None
        target, a, b, c = instruction.operands
        scatter, widen = self._scatter(target), _from_bf16 if types[6] == "bf16" else _from_f16

        def mma() -> None:
            self._require_whole_warps(instruction)
            columns = slice(None) if self.mask is True else self.threads
            left = widen(np.ascontiguousarray(self._gather(a)[:, columns]).view(np.uint16))
            left = left.reshape(2, 2, -1, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
            right = widen(np.ascontiguousarray(self._gather(b)[:, columns]).view(np.uint16))
            right = right.reshape(2, -1, 8, 4, 2).transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
            added = np.ascontiguousarray(self._gather(c)[:, columns]).view(np.float32)
            added = added.reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
            result = left @ right + added
            result = result.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
            scatter(np.ascontiguousarray(result).view(np.uint32))

        return mma

    # Control

    def _decode_bra(self, instruction: Instruction, types: list[str]) -> Step:
        target = self._labels[instruction.operands[0]]

        def branch() -> None:
            self._next[self.threads] = target

        return branch

    def _decode_ret(self, instruction: Instruction, types: list[str]) -> Step:
        def end() -> None:
            self._next[self.threads] = _DONE

        return end


def _to_bf16(values: NDArray) -> NDArray:
    """The bits of fp32 numbers, rounded to bf16, to even in a tie."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _to_f16(values: NDArray) -> NDArray:
    return values.astype(np.float16).view(np.uint16)


def _from_bf16(bits: NDArray) -> NDArray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _from_f16(bits: NDArray) -> NDArray:
    return bits.view(np.float16).astype(np.float32)
