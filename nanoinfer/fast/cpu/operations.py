"""The operations of a compiled model on a CPU, and how a step runs them.

In: Operations, which compile.py makes, and the tensors of a step. Out: the tensors that the rest of the model reads.

A CPUProgram computes all rows of a step. No Python runs between its kernels, not even for the attention and recurrences
when every sequence decodes: all layers of a decode step of GPT-2 are then one call. When a step has prompts, Python calls these
between segments of the program. Both cases use the same kernels, so a row has the same bits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from nanoinfer.attention.base import Attend
from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu.attention import KernelStep
from nanoinfer.fast.cpu.delta import KernelRecurrence, arguments_of
from nanoinfer.fast.cpu.linear import scratch_for
from nanoinfer.fast.cpu.program import KernelCall, Program, Slice
from nanoinfer.features.hybrid.groups import GroupedAttend
from nanoinfer.features.hybrid.states import AttendWithStates

Places = dict[int, tuple[int, int]]  # GroupedAttend.places. {}: the layers form one group, each in its own place


@dataclass(eq=False, slots=True)
class Buffer:
    """The numbers of each row that an operation computes, or that the program is given."""

    width: int  # how many numbers a row has
    node: fx.Node  # the operation in the graph
    shape: tuple[int, ...] | None = None  # the shape of an input's row. None: the program computes the buffer
    must_fit: bool = False  # whether an input must have this shape. Other inputs are expanded to it
    # Whether Python may compute it, and return its own tensor. Only such buffers may share their array
    is_attended: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """The numbers of each row of a buffer from `first` on, as a tensor that has this shape for each row."""

    buffer: Buffer
    first: int
    shape: tuple[int, ...]
    step: int = 0  # how many numbers lie from an entry of the first axis to the next. 0: they are contiguous

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.first + max(self.size, self.step * self.shape[0])

    def overlaps(self, other: "View") -> bool:
        return self.buffer is other.buffer and self.first < other.end and other.first < self.end

    def tensor(self, array: Tensor, num_rows: int) -> Tensor:
        """Return the numbers in the buffer's array."""
        rows = array[: num_rows * self.buffer.width].view(num_rows, self.buffer.width)
        if self.step:
            return rows[:, self.first :].as_strided((num_rows, *self.shape), (self.buffer.width, self.step, 1))
        return rows[:, self.first : self.first + self.size].view(num_rows, *self.shape)


@dataclass(eq=False, slots=True)
class Operation:
    """A kernel call whose operands have no addresses yet."""

    reads: tuple[View, ...]
    out: View
    # Makes the call from the slices of `reads` and of `out`, and the index of the scratch array. None: the operation depends
    # on the sequences of the step: the attention or a recurrence
    call: Callable[[Sequence[Slice], int], KernelCall] | None = None
    overwrites: tuple[View, ...] = ()  # the operands that the result may overwrite if nothing reads them later
    scratch_bytes: int = 0  # the scratch memory of a row, in bytes
    layer: int = -1  # the layer of the attention, whose `reads` are q, k and v
    # The options of the attention: window and sinks, if the layer has them
    options: dict[str, Any] = field(default_factory=dict)
    recurrence: KernelRecurrence | None = None


class CPUProgram:
    """The operations of one or several layers, in order.

    Args:
        operations: the operations, at least one.
        inputs: the buffers that a call is given.
        outputs: the views that a call returns.
        dtype: the dtype of all numbers.
    """

    def __init__(self, operations: list[Operation], inputs: list[Buffer], outputs: list[View], dtype: torch.dtype) -> None:
        self.operations, self._inputs, self._outputs, self._dtype = operations, inputs, outputs, dtype
        array_of, self._widths = _assign_arrays(operations, {view.buffer for view in outputs})
        self._index = {buffer: i for i, buffer in enumerate(inputs)} | {b: len(inputs) + array for b, array in array_of.items()}
        self._scratch = len(inputs) + len(self._widths)
        self._scratch_bytes = max(operation.scratch_bytes for operation in operations)
        self._segments = list(self._split())
        self._attentions = [operation for operation in operations if operation.call is operation.recurrence is None]
        self._recurrences = [operation for operation in operations if operation.recurrence is not None]
        self._unread = {operation: self._unread_after(operation) for operation in (*self._attentions, *self._recurrences)}
        self._whole: tuple[Any, Program | None] | None = None  # for the attention kernel that was used last

    def __call__(self, attend: Attend, *given: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the outputs.

        Args:
            attend: the Attend of the step. None: the program has no attention.
            given: the inputs.

        Raises:
            UnsupportedError: an input has another dtype or shape than that for which the kernels were made.
        """
        num_rows = next(len(tensor) for tensor, buffer in zip(given, self._inputs, strict=True) if buffer.must_fit)
        arrays: list[Any] = [self._fitted(*pair, num_rows) for pair in zip(given, self._inputs, strict=True)]
        arrays += [torch.empty(num_rows * width, dtype=self._dtype) for width in self._widths]
        arrays.append(scratch_for(num_rows * self._scratch_bytes, arrays[0]))
        layers = attend.attend if isinstance(attend, AttendWithStates) else attend
        steps, places = (layers.steps, layers.places) if isinstance(layers, GroupedAttend) else ([layers], {})
        kernel, rows = self._step_of(attend, steps if self._attentions else [], places)
        if rows and (program := self._program_with(kernel, places)) is not None:
            program(num_rows, [*arrays, *rows])
        else:
            for segment in self._segments:
                if isinstance(segment, Program):
                    segment(num_rows, arrays)
                else:
                    self._attend(attend, segment, num_rows, arrays)
        outputs = tuple(view.tensor(arrays[self._index[view.buffer]], num_rows) for view in self._outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    def _fitted(self, tensor: Tensor, buffer: Buffer, num_rows: int) -> Tensor:
        """Return an input as the kernels read it."""
        assert buffer.shape is not None
        if tensor.dtype != self._dtype:
            raise UnsupportedError(
                f"the kernels' weights are in {self._dtype}, got {buffer.node} in {tensor.dtype}; use one dtype, or "
                "enforce_eager=True"
            )
        shape = (num_rows, *buffer.shape)
        if tensor.shape != shape:
            if buffer.must_fit:
                raise UnsupportedError(
                    f"{buffer.node} must have the shape {shape}, got {tuple(tensor.shape)}; for a forward pass that changes "
                    "the number of rows use enforce_eager=True"
                )
            tensor = tensor.expand(shape)
        return tensor.contiguous()

    def _step_of(self, attend: Attend, steps: Sequence[Attend], places: Places) -> tuple[Any, Sequence[Any]]:
        """Return the kernel that can compute this step's attention inside the program, and the rows that depend on sequences,
        for the recurrences, and for the attention in each KV group. Without rows, Python calls these operations,
        for example if layers of a group have different windows, because the model's config does not list them.
        """
        of_recurrences = arguments_of(attend) if self._recurrences else None
        if self._recurrences and of_recurrences is None:
            return None, ()
        windows = {(places.get(operation.layer, (0,))[0], operation.options.get("window")) for operation in self._attentions}
        found = [
            step.as_step(dict(windows).get(group)) if isinstance(step, KernelStep) else None for group, step in enumerate(steps)
        ]
        if None in found or len(dict(windows)) < len(windows) or not self._unread:
            return None, ()
        return found[0][0] if found and found[0] else None, [of_recurrences, *(entry[1] for entry in found if entry)]

    def _program_with(self, kernel: Any, places: Places) -> Program | None:
        """Return all calls as one program. None: the kernel does not compute every attention."""
        if self._whole is None or self._whole[0] is not kernel:
            is_fitting = all(kernel.computes(*(view.shape for view in operation.reads)) for operation in self._attentions)
            calls = [self._call(operation, kernel, places) for operation in self.operations if is_fitting]
            self._whole = kernel, Program(calls) if is_fitting else None
        return self._whole[1]

    def _attend(self, attend: Attend, operation: Operation, num_rows: int, arrays: list[Any]) -> None:
        rows = [view.tensor(arrays[self._index[view.buffer]], num_rows) for view in operation.reads]
        if operation.recurrence is not None:
            out = operation.recurrence.compute(attend, *rows)
        else:
            out = attend(operation.layer, *rows, **operation.options)
        arrays[self._index[operation.out.buffer]] = out.contiguous().view(-1)
        for index in self._unread[operation]:
            arrays[index] = torch.empty_like(arrays[index])  # the attention may still hold q, k and v

    def _unread_after(self, operation: Operation) -> set[int]:
        """Return the arrays that an operation reads and later operations only write."""
        later = self.operations[self.operations.index(operation) + 1 :]
        read = {view.buffer for other in later for view in other.reads} | {view.buffer for view in self._outputs}
        return {self._index[view.buffer] for view in operation.reads if view.buffer not in read and view.buffer.shape is None}

    def _split(self) -> Iterator[Program | Operation]:
        """Yield, in order, the programs between the operations that Python calls, and these operations."""
        calls: list[KernelCall] = []
        for operation in self.operations:
            if operation.call is not None:
                calls.append(self._call(operation))
                continue
            if calls:
                yield Program(calls)
            yield operation
            calls = []
        if calls:
            yield Program(calls)

    def _call(self, operation: Operation, attention: Any = None, places: Places | None = None) -> KernelCall:
        """Make the operation's call. attention: the kernel of an operation without a call of its own."""
        views = (*operation.reads, operation.out)
        slices = [Slice(self._index[view.buffer], view.first, view.buffer.width) for view in views]
        if operation.recurrence is not None:
            return operation.recurrence.call(*slices, rows=self._scratch + 1)
        if operation.call is None:
            group, layer = (places or {}).get(operation.layer, (0, operation.layer))
            call: Callable[..., KernelCall] = attention.call
            return call(*slices, rows=self._scratch + 2 + group, layer=layer, sinks=operation.options.get("sinks"))
        return operation.call(slices, self._scratch)


def _assign_arrays(operations: list[Operation], outputs: set[Buffer]) -> tuple[dict[Buffer, int], list[int]]:
    """Give each computed buffer an array. Buffers that are never needed at the same time may share it.

    Returns:
        The index of each buffer's array, and the widths of the arrays.
    """
    last_use: dict[Buffer, int] = {}
    for i, operation in enumerate(operations):
        last_use |= {view.buffer: i for view in (*operation.reads, operation.out)}
    array_of: dict[Buffer, int] = {}
    widths: list[int] = []
    free: dict[bool, list[int]] = {False: [], True: []}  # by is_attended
    for i, operation in enumerate(operations):
        out = operation.out.buffer
        ending = [b for b in dict.fromkeys(view.buffer for view in operation.reads) if last_use[b] == i and b in array_of]
        ending = [buffer for buffer in ending if buffer not in outputs]
        if out not in array_of:
            reused = [view.buffer for view in operation.overwrites if view.buffer in ending and view.size == view.buffer.width]
            reused = [buffer for buffer in reused if buffer.width == out.width and not buffer.is_attended]
            if reused:
                array_of[out] = array_of[reused[0]]
                ending.remove(reused[0])
            else:
                if not free[out.is_attended]:
                    free[out.is_attended].append(len(widths))
                    widths.append(0)
                fitting = min(free[out.is_attended], key=lambda array: abs(widths[array] - out.width))
                free[out.is_attended].remove(fitting)
                array_of[out], widths[fitting] = fitting, max(widths[fitting], out.width)
        for buffer in ending:
            free[buffer.is_attended].append(array_of[buffer])
    return array_of, widths
