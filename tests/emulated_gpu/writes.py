"""Who wrote the tensors' memory: what may be read, and what a step has written so far.

In: torch's operations, and what each launch wrote. Out: flags of a tensor's elements.

    with writes.step():      # of the engine: its kernels and torch's operations, which a CUDA graph would hold
        ...

A kernel that is launched with programmatic dependent launch (PDL) may run while earlier kernels of its step do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")
_active: list["Writes"] = []


class Writes(TorchDispatchMode):
    """Follows torch's operations. Launches tell it what they wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[int, tuple[Tensor, NDArray]] = {}  # for the memory of torch.empty: flags of its elements
        self._in_step: dict[int, tuple[Tensor, NDArray]] | None = None  # for what the step wrote: flags of bytes. None: no step

    def __enter__(self) -> "Writes":
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _active.remove(self)
        super().__exit__(*error)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        self._in_step = {}
        try:
            yield
        finally:
            self._in_step = None

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function._schema.name in _EMPTY:
            self._written[_start(out)] = out, np.zeros(out.untyped_storage().nbytes() // out.element_size(), bool)
            return out
        given = [*args, *[(kwargs or {}).get(argument.name) for argument in function._schema.arguments[len(args) :]]]
        for argument, value in zip(function._schema.arguments, given, strict=True):
            if argument.alias_info and argument.alias_info.is_write and isinstance(value, Tensor):
                self.note(value)
        for returned, value in zip(function._schema.returns, out if isinstance(out, tuple) else (out,), strict=False):
            if returned.alias_info is None and isinstance(value, Tensor):
                self._written.pop(_start(value), None)  # memory that torch.empty had before
                self.note(value)
        return out

    def note(self, tensor: Tensor, elements: NDArray | slice = slice(None)) -> None:
        """Elements of a tensor, from its first to its last in memory, were written."""
        if not tensor.numel():
            return
        if (may_be_read := self.may_be_read(tensor)) is not None:
            may_be_read[elements] = True
        if self._in_step is not None:
            storage = tensor.untyped_storage()
            self._in_step.setdefault(_start(tensor), (tensor, np.zeros(storage.nbytes(), bool)))
            self.written_in_step(tensor)[elements] = True

    def may_be_read(self, tensor: Tensor) -> NDArray | None:
        """For each element from the first to the last in memory, whether it was written. None: it is not of torch.empty."""
        known = self._written.get(_start(tensor))
        return None if known is None else known[1][tensor.storage_offset() :][: extent(tensor)]

    def written_in_step(self, tensor: Tensor) -> NDArray | None:
        """For each byte of each element, whether the step has written it. [elements, bytes] None: none is."""
        known = (self._in_step or {}).get(_start(tensor))
        if known is None:
            return None
        size = tensor.element_size()
        return known[1][tensor.storage_offset() * size :][: extent(tensor) * size].reshape(-1, size)


def _start(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def extent(tensor: Tensor) -> int:
    """The elements from a tensor's first to its last in memory."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )


@contextmanager
def step() -> Iterator[None]:
    """What is launched within belongs to one step."""
    if not _active:  # the interpreter's programs have no order
        yield
        return
    with _active[-1].in_step():
        yield
