"""Compile a fused trace to programs of C++ kernels.

In: a Trace after the passes of fuse.py. Out: the same trace, in which each run of operations that have kernels is one call of a
CPUProgram. An operation without a kernel stays as it is, between two programs.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu.attention import in_fp32
from nanoinfer.fast.cpu.delta import KernelRecurrence
from nanoinfer.fast.cpu.layers import add_call, gate_call, has_kernel, norm_call, rotate_call
from nanoinfer.fast.cpu.linear import KernelLinear, PackedLinear
from nanoinfer.fast.cpu.operations import Buffer, CPUProgram, Operation, View
from nanoinfer.fast.cpu.program import NOTHING, KernelCall, Slice
from nanoinfer.fast.fuse import ADD, FusedGate, FusedLinear, FusedRotation
from nanoinfer.fast.trace import Trace, has_hooks
from nanoinfer.features.training.loaded_weights import LoadedWeights

Pack = Callable[[FusedLinear], PackedLinear]


def compile_for_cpu(trace: Trace, pack: Pack, dtype: torch.dtype, weights: LoadedWeights) -> list[CPUProgram]:
    """Replace operations of a fused trace by programs.

    Args:
        trace: the fused trace, which is changed in place.
        pack: lays out a linear layer for its kernel.
        dtype: the dtype of the weights.
        weights: receives the copies of parameters that the programs read.

    Returns:
        The programs, in order. The list is empty if no operation has a kernel.
    """
    compiler = _Compiler(trace, pack, dtype, weights)
    for node in list(trace.graph.nodes):
        if not compiler.add(node) and any(given in compiler.views for given in node.all_input_nodes):
            compiler.finish(node)
    for node in reversed(compiler.views):  # operations whose results nobody uses
        trace.graph.erase_node(node)
    for node in trace.graph.nodes:  # a linear layer's input may have more axes than programs support
        if isinstance(module := trace.module(node), FusedLinear):
            with suppress(UnsupportedError):
                node.target = trace.name("linear_kernel", KernelLinear(pack(module), node.kwargs))
    return compiler.programs


class _Compiler:
    """Collects the operations of one program after the other."""

    def __init__(self, trace: Trace, pack: Pack, dtype: torch.dtype, weights: LoadedWeights) -> None:
        self.programs: list[CPUProgram] = []
        self.views: dict[fx.Node, View | tuple[View, ...]] = {}  # node of the current program -> what it computes
        self._trace, self._pack, self._dtype, self._weights = trace, pack, dtype, weights
        self._operations: list[Operation] = []
        self._inputs: dict[fx.Node, Buffer] = {}
        self._attend: fx.Node | None = None
        self._results: dict[fx.Node, tuple[int, ...]] = {}  # result of a finished program -> its shape per row

    def add(self, node: fx.Node) -> bool:
        """Add the node to the current program. Returns whether that is possible."""
        inputs = dict(self._inputs)
        view = viewed(node, self.views)
        if view is not None:
            self.views[node] = view
        elif not self._add_operation(node):
            self._inputs = inputs
            return False
        return True

    def _add_operation(self, node: fx.Node) -> bool:
        module = self._trace.module(node)
        if type(module) in _ADD:
            return _ADD[type(module)](self, node, module)
        if module is not None and has_kernel(module) and not has_hooks(module) and len(node.args) == 1:
            return self._add_norm(node, module)
        if node.target in ADD and len(node.args) == 2 and not node.kwargs:
            return self._add_sum(node)
        if node.op == "call_method" and node.target == "__call__" and len(node.args) == 5:
            return self._add_attention(node)
        return False

    def finish(self, before: fx.Node) -> None:
        """Insert the call of the current program before a node that reads its results."""
        graph, members = self._trace.graph, set(self.views)
        read = [node for node in self.views if any(user not in members for user in node.users)]
        outputs = [view for node in read if isinstance(view := self.views[node], View)]
        program = CPUProgram(self._operations, list(self._inputs.values()), outputs, self._dtype)
        with graph.inserting_before(before):
            call = graph.call_module(self._trace.name("program", program), (self._attend, *self._inputs))
            values = [call]
            if len(outputs) > 1:
                values = [graph.call_function(operator.getitem, (call, index)) for index in range(len(outputs))]
            rest = iter(values)
            results = [next(rest) if isinstance(self.views[node], View) else self._number_of_rows(node) for node in read]
        self._results |= {result: view.shape for result, view in zip(values, outputs, strict=True)}
        for node, result in zip(read, results, strict=True):
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in members)
        for node in reversed(self.views):
            graph.erase_node(node)
        self.programs.append(program)
        self._operations, self._inputs, self._attend = [], {}, None
        self.views.clear()

    def _add_linear(self, node: fx.Node, module: FusedLinear) -> bool:
        others = [node.kwargs.get("factor"), node.kwargs.get("residual")]
        x = self._operand(node.args[0], (module.in_features,), must_fit=True)
        factor, residual = (other and self._operand(other, (module.out_features,)) for other in others)
        if x is None or any(other is not None and view is None for other, view in zip(others, (factor, residual), strict=True)):
            return False
        try:
            packed = self._pack(module)
        except UnsupportedError:
            return False  # no kernel has this number of inputs
        reads = tuple(view for view in (x, factor, residual) if view)

        def call(slices: Sequence[Slice], scratch: int) -> KernelCall:
            x, *others, out = slices
            factor_slice = others.pop(0) if factor else NOTHING
            return packed.call(x=x, out=out, scratch=scratch, factor=factor_slice, residual=others[0] if residual else NOTHING)

        overwrites = tuple(view for view in (residual, factor) if view and view.buffer is not x.buffer)  # x is read to the end
        self._write(node, (module.out_features,), reads, call, overwrites=overwrites, scratch_bytes=packed.scratch_bytes)
        return True

    def _add_norm(self, node: fx.Node, norm: Any) -> bool:
        if (x := self._operand(node.args[0], tuple(norm.weight.shape), must_fit=True)) is None:
            return False
        self._write(node, x.shape, (x,), lambda slices, _: norm_call(norm, *slices))
        return True

    def _add_sum(self, node: fx.Node) -> bool:
        """Add a sum of two values of a program, or of a value and a vector that is added to each row."""
        given_views = [self.views.get(given) for given in node.args if isinstance(given, fx.Node)]
        known = [view for view in given_views if isinstance(view, View)]
        terms = [self._operand(given, known[0].shape) for given in node.args] if known else [None]
        if any(term is None or len(term.shape) != 1 for term in terms):
            return False
        reads, size = tuple(term for term in terms if term), known[0].size
        self._write(node, (size,), reads, lambda slices, _: add_call(self._dtype, size, *slices), overwrites=reads)
        return True

    def _add_rotation(self, node: fx.Node, module: FusedRotation) -> bool:
        """Add a rotation, in place unless something else reads the heads, or they are not contiguous."""
        x = self.views.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
        if not isinstance(x, View) or len(x.shape) != 2 or x.buffer.shape is not None:
            return False
        users = [user for user, view in _users(x.buffer.node, self.views[x.buffer.node]) if view.overlaps(x)]
        cos, sin = (self._operand(angle, (1, module.num_rotated or x.shape[1])) for angle in node.args[1:])
        if cos is None or sin is None:
            return False
        out = self.views[node] = x if users == [node] and not x.step else View(Buffer(x.size, node), 0, x.shape)

        def call(slices: Any, scratch: int) -> Any:
            return rotate_call(self._dtype, x.shape, module.norm, *slices, num_rotated=module.num_rotated or 0, step=x.step)

        self._operations.append(Operation((x, cos, sin), out, call))
        return True

    def _add_gate(self, node: fx.Node, module: FusedGate) -> bool:
        x, gate = (self.views.get(given) if isinstance(given, fx.Node) else None for given in node.args)
        if not isinstance(x, View) or not isinstance(gate, View) or len(x.shape) != 2 or x.step or x.shape != gate.shape:
            return False
        sizes = *x.shape, gate.step or x.shape[1]
        self._write(node, x.shape, (x, gate), lambda slices, _: gate_call(self._dtype, *sizes, *slices))
        return True

    def _add_recurrence(self, node: fx.Node, recurrence: KernelRecurrence) -> bool:
        """Add a recurrence. The node's arguments are attend, the rows and the weights."""
        attend, *rows, weights = node.args
        views = [self._operand(given, (size,), must_fit=True) for given, size in zip(rows, recurrence.widths, strict=True)]
        is_same = isinstance(attend, fx.Node) and self._attend in (None, attend)
        found = tuple(view for view in views if view)
        if len(found) < len(views) or not is_same:
            return False
        self._attend = cast(fx.Node, attend)
        recurrence.take(tuple(self._trace.value(weight) for weight in cast(Any, weights)))
        self._write(node, found[1].shape, found, recurrence=recurrence)
        return True

    def _add_attention(self, node: fx.Node) -> bool:
        attend, layer, *heads = node.args
        found = [self.views.get(head) for head in heads if isinstance(head, fx.Node)]
        views = [view for view in found if isinstance(view, View) and len(view.shape) == 2 and not view.step]
        is_same = isinstance(attend, fx.Node) and self._attend in (None, attend)
        options = {name: self._trace.value(given) for name, given in node.kwargs.items()}
        is_known = options.keys() <= {"window", "sinks"} and not any(isinstance(value, fx.Node) for value in options.values())
        if len(views) < 3 or not isinstance(layer, int) or not is_same or not is_known:
            return False
        self._attend = cast(fx.Node, attend)
        if isinstance(sinks := options.get("sinks"), Tensor):
            options["sinks"] = self._renewed(sinks)
        self._write(node, views[0].shape, tuple(views), layer=layer, options=options)
        return True

    def _renewed(self, sinks: Tensor) -> Tensor:
        """Return the sinks as the kernels read them. They are renewed when the weight is replaced."""
        copy = in_fp32(sinks)
        if copy.data_ptr() != sinks.data_ptr():
            self._weights.add_renewal(partial(copy.copy_, sinks))
        return copy

    def _operand(self, node: Any, shape: tuple[int, ...], *, must_fit: bool = False) -> View | None:
        """Return a value as an operand that has this shape for each row. None: it has another shape."""
        if not isinstance(node, fx.Node):
            return None
        view = self.views.get(node)
        if view is None:
            if self._results.get(node, shape) != shape or (must_fit and node not in self._results and _is_reshaped(node)):
                return None
            buffer = self._inputs.setdefault(node, Buffer(math.prod(shape), node, shape))
            buffer.must_fit |= must_fit
            view = View(buffer, 0, buffer.shape or ())
        return view if isinstance(view, View) and view.shape == shape and not view.step else None

    def _number_of_rows(self, node: fx.Node) -> fx.Node:
        """Return an input's shape, or its first number, in place of a value's: an input has the same number of rows."""
        rows = next(given for given, buffer in self._inputs.items() if buffer.must_fit)
        shape = self._trace.graph.call_function(getattr, (rows, "shape"))
        is_number = node.target is operator.getitem or node.target == "size"
        return self._trace.graph.call_function(operator.getitem, (shape, 0)) if is_number else shape

    def _write(self, node: fx.Node, shape: tuple[int, ...], reads: tuple[View, ...], call: Any = None, **options: Any) -> None:
        """Add an operation whose result has this shape for each row. call: None: Python may compute it."""
        view = self.views[node] = View(Buffer(math.prod(shape), node, is_attended=call is None), 0, shape)
        self._operations.append(Operation(reads, view, call, **options))


_ADD: dict[type, Callable[[_Compiler, fx.Node, Any], bool]] = {
    FusedLinear: _Compiler._add_linear,
    FusedRotation: _Compiler._add_rotation,
    FusedGate: _Compiler._add_gate,
    KernelRecurrence: _Compiler._add_recurrence,
}


# ---- views: parts and shapes of what a kernel computes

_Views = View | tuple[View, ...]

_ROWS = 1009  # stands for the number of rows. No size of a model is this prime
_VIEWS = {"view", "reshape", "unflatten", "flatten", "narrow", "split", "chunk", "unbind"}
_OTHER_SHAPES = {"getitem", "transpose", "permute", "squeeze", "unsqueeze"}


def viewed(node: fx.Node, views: Mapping[fx.Node, _Views]) -> _Views | None:
    """Return a node as a view if it only selects or reshapes numbers of a view. (): it is a number of rows. None: neither."""
    source, name = views.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None, _name(node)
    is_item = node.target is operator.getitem
    if isinstance(source, tuple):
        return (source[node.args[1]] if source and isinstance(node.args[1], int) else ()) if is_item else None
    if source is None or name == "contiguous":
        return source
    if name == "size":
        return () if node.args[1:] == (0,) else None
    if node.target is getattr:
        return () if node.args[1] == "shape" and all(index == 0 for index in _indices(node)) else None
    if not (is_item and _keeps_rows(node.args[1])) and name not in _VIEWS:
        return None
    given: Any = node.args[1:]
    if name in ("view", "reshape"):  # a symbol is the number of rows
        given = map_arg(given, lambda _: _ROWS)
    x = source.tensor(torch.empty(_ROWS * source.buffer.width, device="meta"), _ROWS)
    try:
        parts = x[given[0]] if is_item else getattr(x, name)(*given, **node.kwargs)
    except (TypeError, ValueError, IndexError, RuntimeError):  # the arguments are symbols, or do not fit
        return None
    if isinstance(parts, Tensor):
        return _view_of(source.buffer, parts)
    found = [_view_of(source.buffer, part) for part in parts]
    are_views = len(found) > 1 and None not in _indices(node)  # a single part may be the rows up to some number
    return cast(tuple[View, ...], tuple(found)) if are_views and None not in found else None


def _view_of(buffer: Buffer, x: Tensor) -> View | None:
    """Return the view that has the places of _ROWS rows. None: there is no such view. A copy has other strides."""
    if x.shape[0] != _ROWS or x.stride(0) != buffer.width:
        return None
    first, shape = int(x.storage_offset()), tuple(x.shape[1:])
    if x[0].is_contiguous():
        return View(buffer, first, shape)
    return View(buffer, first, shape, step=x.stride(1)) if len(shape) == 2 and x.stride(2) == 1 else None


def _keeps_rows(index: object) -> bool:
    """Whether an index is [:, ...], with numbers and slices after it."""
    return isinstance(index, tuple) and index[0] == slice(None) and all(type(i) in (int, slice) for i in index)


def _is_reshaped(node: fx.Node) -> bool:
    """Whether a node may change the number of axes. Other operations keep the rows."""
    return node.op in ("call_function", "call_method") and _name(node) in _VIEWS | _OTHER_SHAPES


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _indices(node: fx.Node) -> list[int | None]:
    """Which item of a node each of its users takes. None: something else."""
    items = [user.args[1] if user.target is operator.getitem else None for user in node.users]
    return [item if isinstance(item, int) else None for item in items]


def _users(node: fx.Node, view: _Views) -> Iterator[tuple[fx.Node, View]]:
    """Yield the nodes that read a view or a part of it, with what they read."""
    for user in node.users:
        part = viewed(user, {node: view})
        if part is not None:
            yield from _users(user, part)
        elif isinstance(view, View):
            yield user, view
