"""Linear layers on a CPU: weights laid out once for a fast kernel, in calls that keep rows independent.

In: an nn.Linear, the activation that follows it, whether a residual is added. Out: one module that computes all of it, and a
report of how every layer is computed. optimize.py decides which layers of a model become such modules.

The kernels are oneDNN's (here) and one of this package (cpu_dense.py). They also apply the activation and add the residual,
which is faster. The faster one is chosen by measuring. A row's bits may depend on the number of rows: devices/row_forms.py
explains why, and finds the calls in which they do not. The result depends on a layer's sizes and not on its weights, so
devices/machine_checks.py keeps it for the machine.
"""

import logging
import math
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.devices import row_forms
from nanoinfer.devices.machine_checks import verdict
from nanoinfer.devices.program import Program, Step
from nanoinfer.errors import UnsupportedError, first_line
from nanoinfer.models.layers import gelu_tanh, merge_linears
from nanoinfer.models.parallel_layers import AllReduced

logger = logging.getLogger(__name__)

Activation = Literal["silu", "gelu_tanh"]

_SMALL_WEIGHT = 2**18  # numbers: reading them takes no longer than a call
_ROWS_HINT = 64  # rows to expect. From 16 on, the packing serves any number.
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh}
_ACTIVATION_CODES = {None: 0, "silu": 1, "gelu_tanh": 2}  # as in activations.h
_ONEDNN_NAMES = {None: ("none", ""), "silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh")}


class CPULinear(nn.Module):
    """residual + activation(x @ weight.T + bias), computed by `product` in calls of the numbers of rows that `form` allows.

    A layer has an activation, or a residual, or neither.

    Args:
        linear: the layer to compute.
        activation: applied to its outputs.
        adds_residual: whether `forward` gets a residual to add.
    """

    def __init__(self, linear: nn.Linear, activation: Activation | None = None, *, adds_residual: bool = False) -> None:
        super().__init__()
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation = activation
        self.adds_residual = adds_residual
        self.form = row_forms.AS_IT_IS

    def forward(
        self, x: Float[Tensor, "rows in"], residual: Float[Tensor, "rows out"] | None = None
    ) -> Float[Tensor, "rows out"]:
        return self.form.compute(self.product, x, residual)

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        raise NotImplementedError

    def activated(self, x: Tensor) -> Tensor:
        return x if self._activation is None else _ACTIVATIONS[self._activation](x)

    def find_form(self, linear: nn.Linear) -> row_forms.RowForm | None:
        """Find the form in which this machine gives a row the same bits among any number of rows. None if there is none."""
        probes = row_forms.cancelling_rows(linear.weight, self._bias, has_residual=self.adds_residual)
        return row_forms.find_row_form(self.product, probes, counts_of(linear))


class CompiledLinear(CPULinear):
    """A layer that a C++ kernel of this package computes, alone or as a step of a program."""

    def set_kernel(self, kernel: Any, arrays: Sequence[Tensor | None], sizes: tuple[int, ...], scratch_bytes: int = 0) -> None:
        """Say which kernel computes the layer.

        Args:
            kernel: its function `linear`.
            arrays: the first fields of its struct Layer. None is a null pointer.
            sizes: the other fields but the activation. The first one is the number of outputs.
            scratch_bytes: memory that it needs for each row. 0 if its struct Arguments has no scratch.
        """
        self._kernel, self.num_out, self.scratch_bytes = kernel, sizes[0], scratch_bytes
        self._arrays = arrays  # kept alive
        pointers = (0 if array is None else array.data_ptr() for array in arrays)
        self._fields = (*pointers, *sizes, _ACTIVATION_CODES[self._activation])
        self._program = Program([self.step(x=0, residual=1, out=2, scratch=3)])

    def step(self, *, x: int, out: int, scratch: int, factor: int = -1, residual: int = -1) -> Step:
        """The layer in a program: out = residual + factor * activation(x @ weight.T + bias).

        The arguments are indices of its batch's arrays, -1 for no factor or no residual. out may be one of these two.
        """
        return Step(self._kernel, (x, factor, residual, out, *self._fields, scratch))

    def call_kernel(self, x: Tensor, residual: Tensor | None) -> Tensor:
        num_rows, x = x.shape[0], x.contiguous()
        residual = None if residual is None else residual.contiguous()
        out = x.new_empty((num_rows, self.num_out))
        scratch = x.new_empty(num_rows * self.scratch_bytes, dtype=torch.uint8) if self.scratch_bytes else None
        self._program(num_rows, (x, residual, out, scratch))
        return out


class PackedLinear(CPULinear):
    """The weight is in oneDNN's own order. The plain weight is not kept.

    Raises:
        RuntimeError, AttributeError: this torch, this CPU or the dtype does not have it.
    """

    def __init__(self, linear: nn.Linear, activation: Activation | None = None, *, adds_residual: bool = False) -> None:
        super().__init__(linear, activation, adds_residual=adds_residual)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self._fused, self._algorithm = _ONEDNN_NAMES[activation]
        x, out = (torch.zeros(2, size, dtype=linear.weight.dtype) for size in (linear.in_features, linear.out_features))
        self.product(x, out if adds_residual else None)  # some machines fail only here

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, self._fused, [], self._algorithm)
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")


class PlainLinear(CPULinear):
    """The weight is a copy, as the layer's own may be a view of a file at any address. For a machine that cannot pack it, or
    whose packed rows depend on each other.
    """

    def __init__(self, linear: nn.Linear, activation: Activation | None = None, *, adds_residual: bool = False) -> None:
        super().__init__(linear, activation, adds_residual=adds_residual)
        self._weight = linear.weight.detach().clone()

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out = F.linear(x, self._weight, self._bias)
        if residual is not None:
            out = residual + out
        return self.activated(out)


CLASSES: dict[str, Callable[..., CPULinear]] = {"packed": PackedLinear, "plain": PlainLinear}
_NONE = "rows depend on each other"


@dataclass(frozen=True, slots=True)
class LinearReport:
    """How a model's linear layers are computed.

    Attributes:
        forms: by kind of layer, in the order in which the layers were optimised.
    """

    forms: dict[str, str]

    @property
    def are_rows_independent(self) -> bool:
        return _NONE not in self.forms.values()


class LinearOptimizer:
    """Turns nn.Linear layers into the fastest CPULinear whose rows do not depend on each other, and reports the choices.

    Each class that this machine has is tried, in the first of ROW_FORMS that holds for it, and the fastest is chosen. A plain
    layer is used if nothing else has a form. If no form holds, it is the first class without a form.

    Args:
        classes: those that a layer may become, by their names in verdicts. The preferred one is first.
    """

    def __init__(self, classes: Mapping[str, Callable[..., CPULinear]] = CLASSES) -> None:
        self._classes = classes
        self._forms: dict[str, str] = {}

    def optimize(self, linear: nn.Linear, activation: Activation | None = None, *, adds_residual: bool = False) -> CPULinear:
        """Return a module that computes a layer, and the activation or the residual behind it.

        Raises:
            UnsupportedError: this torch cannot compute the layer in its dtype.
        """
        kind = _kind(linear, activation, adds_residual=adds_residual)
        layers: dict[str, CPULinear] = {}
        known = self._forms.get(kind, "").partition(", ")[0]  # what others of its kind are
        for name, layer_class in sorted(self._classes.items(), key=lambda item: item[0] != known):
            if known and layers:
                break
            try:
                layers[name] = layer_class(linear, activation, adds_residual=adds_residual)
            except (RuntimeError, AttributeError, UnsupportedError) as error:
                logger.debug("linear layer %s cannot be %s: %s", kind, name, first_line(error))
        if not layers:
            raise UnsupportedError(
                f"this torch computes no linear layer {kind} {' or '.join(self._classes)}; use another dtype"
            )
        if kind not in self._forms and _is_measurable(linear.weight):
            self._forms[kind] = verdict(f"linear {kind}: {' or '.join(layers)}", partial(_find_form, linear, layers))
        name, _, form = self._forms.setdefault(kind, _NONE).partition(", ")
        if name not in layers:  # no form holds, or this layer cannot be what others of its kind are
            name, form, self._forms[kind] = next(iter(layers)), _NONE, _NONE
        layer = layers[name]
        layer.form = row_forms.form_called(form, counts_of(linear)[-1])
        return layer

    def take(
        self, block: nn.Module, *names: str, activation: Activation | None = None, adds_residual: bool = False
    ) -> nn.Module:
        """Remove linear layers from a block and return one module that computes them, their outputs side by side.

        Their plain weights are freed at once, so that loading needs the memory of one layer more and not of a block.
        """
        linear = merge_linears(*(getattr(block, name) for name in names)) if len(names) > 1 else getattr(block, names[0])
        for name in names:
            delattr(block, name)
        if isinstance(linear, AllReduced):
            adds_residual = adds_residual and linear.communicator.rank == 0
            linear.module = self.optimize(linear.module, activation, adds_residual=adds_residual)
            return linear
        return self.optimize(linear, activation, adds_residual=adds_residual)

    def report(self) -> LinearReport:
        """Return the choices so far, and log them."""
        report = LinearReport(dict(self._forms))
        for kind, form in report.forms.items():
            logger.debug("linear layer %s: %s", kind, form)
        if not report.are_rows_independent:
            kinds = ", ".join(kind for kind, form in report.forms.items() if form == _NONE)
            logger.info("the bits of a row depend on the batch on this machine, in linear layers %s", kinds)
        return report


def _find_form(linear: nn.Linear, layers: dict[str, CPULinear]) -> str:
    """Find the fastest layer that has a form. The first one is kept if another takes more than 0.8 of its time.

    A plain layer is not compared with others, because it is slow. Nor are small layers: their time is mostly that of a call,
    which a program saves (cpu_program.py).
    """
    seconds: dict[str, float] = {}
    for name, layer in layers.items():
        is_compared = linear.weight.numel() > _SMALL_WEIGHT and not isinstance(layer, PlainLinear)
        if (is_compared or not seconds) and (form := layer.find_form(linear)):
            layer.form = form
            seconds[f"{name}, {form.name}"] = _seconds(layer, linear) / (0.8 if seconds else 1)
    return min(seconds, key=lambda name: seconds[name], default=_NONE)


def _seconds(layer: CPULinear, linear: nn.Linear) -> float:
    """The geometric mean of the times of one row, as in a single stream, and of 64, as in a batch. Each is the fastest of 8."""
    product = 1.0
    for num_rows in (1, 64):
        x, out = (linear.weight.new_ones(num_rows, size) for size in (linear.in_features, linear.out_features))
        given = (x, out) if layer.adds_residual else (x,)
        product *= min(timeit.repeat(partial(layer, *given), number=1, repeat=8))
    return math.sqrt(product)


def _is_measurable(weight: Tensor) -> bool:
    """Whether a different order of additions would change its outputs. A damaged weight must leave no verdict for its sizes."""
    low, high = weight[:: -(-len(weight) // 64)].aminmax()  # the weights of some outputs, for all inputs
    return bool(low < high) and bool(low.isfinite()) and bool(high.isfinite())


def counts_of(linear: nn.Linear) -> tuple[int, ...]:
    """The numbers of rows to compare."""
    is_large = linear.weight.numel() > row_forms.LARGE_WEIGHT
    return row_forms.COUNTS_OF_LARGE if is_large else row_forms.COUNTS


def _kind(linear: nn.Linear, activation: Activation | None, *, adds_residual: bool) -> str:
    """Everything that decides the kernel, except the number of rows."""
    extras = ["bias"] if linear.bias is not None else []
    extras += ["residual"] if adds_residual else []
    extras += [activation] if activation else []
    dtype = str(linear.weight.dtype).removeprefix("torch.")
    return " ".join([f"{linear.in_features} -> {linear.out_features}", dtype, *extras])
