"""Linear layers on a CPU: weights packed once for oneDNN, or kept in 8 bits, called so that rows do not depend on each other.

In: a finished model. Out: the same model, its nn.Linear layers replaced, and whether the rows of all of them are independent.
Nothing else knows of it.

A packed weight is laid out once for oneDNN's kernels, which also apply the activation and add the residual. That is faster. It
does not make a row's bits independent of the number of rows: row_forms.py says why, and finds the calls in which they are. The
result depends on a layer's sizes and not on its weights, so it is kept for the machine (machine_checks.py).
"""

import logging
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.devices import row_forms
from nanoinfer.devices.machine_checks import verdict
from nanoinfer.errors import UnsupportedError, first_line
from nanoinfer.models.layers import ActivatedLinear, MergedLinear, ResidualLinear, activate

logger = logging.getLogger(__name__)

_ROWS_HINT = 64  # rows to expect; from 16 on, the packing serves any number
_INT8_COLUMNS = 32  # the operator reads 16 at a time, and beyond the row's end if they are no multiple; activations take 32
_LINEARS = (nn.Linear, ActivatedLinear, MergedLinear, ResidualLinear)
_FUSED = {None: ("none", ""), "silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh")}  # activation -> oneDNN's names


class CPULinear(nn.Module):
    """One of _LINEARS, computed by `product` in calls of the numbers of rows that `form` allows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation = getattr(linear, "activation", None)
        self.form = row_forms.AS_IT_IS

    def forward(
        self, x: Float[Tensor, "rows in"], residual: Float[Tensor, "rows out"] | None = None
    ) -> Float[Tensor, "rows out"]:
        return self.form.compute(self.product, x, residual)

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _activated(self, x: Tensor) -> Tensor:
        return x if self._activation is None else activate(x, self._activation)

    def find_form(self, linear: nn.Linear) -> row_forms.RowForm | None:
        """The form in which this machine gives a row the same bits among any number of others, if there is one."""
        probes = row_forms.cancelling_rows(linear.weight, self._bias, has_residual=isinstance(linear, ResidualLinear))
        return row_forms.find_row_form(self.product, probes, _counts(linear))


class PackedLinear(CPULinear):
    """The weight is in oneDNN's own order; the plain one is not kept.

    Raises: RuntimeError or AttributeError where this torch, this CPU or the dtype does not have it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self._fused, self._algorithm = _FUSED[self._activation]
        x, out = (torch.zeros(2, size, dtype=linear.weight.dtype) for size in (linear.in_features, linear.out_features))
        self.product(x, out if isinstance(linear, ResidualLinear) else None)  # what fails may first fail here

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, self._fused, [], self._algorithm)
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")


class PlainLinear(CPULinear):
    """The weight as it was: for a machine that cannot pack it, or whose packed rows depend on each other."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._weight = linear.weight.detach()

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out = F.linear(x, self._weight, self._bias)
        if residual is not None:
            out = residual + out
        return self._activated(out)


class Int8Linear(CPULinear):
    """The weight in 8 bits and a scale per output channel: weight = scale * integer in -127 .. 127.

    x stays as it is (weight-only), in bfloat16. Half the bytes to read, so nearly twice as fast where reading the weights is
    all there is to do; from some 16 rows on it is slower than PackedLinear.
    Source: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339, section 2, without the outliers' part.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        # Rounded first, so that the integers make up for it. A row of zeros has any scale.
        self._scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        integers = (weight / self._scale.float().unsqueeze(1)).round().clamp(-127, 127)
        self._weight = integers.to(torch.int8)
        self._sum(torch.zeros(1, linear.in_features, dtype=torch.bfloat16))  # what fails may first fail here

    def find_form(self, linear: nn.Linear) -> row_forms.RowForm | None:
        """The sum is rounded before the bias and the residual are added, which would hide what is looked for: without them."""
        probes = row_forms.cancelling_rows(self._weight.bfloat16(), None, has_residual=False)
        return row_forms.find_row_form(lambda x, _: self._activated(self._sum(x)), probes, _counts(linear))

    def _sum(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self._weight, self._scale)

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out = self._sum(x)
        if self._bias is not None:
            out += self._bias
        if residual is not None:
            out += residual
        return self._activated(out)


@dataclass(frozen=True, slots=True)
class LinearReport:
    """How a model's linear layers are computed. forms: by kind of layer, in the order in which the model has them."""

    forms: dict[str, str]

    @property
    def are_rows_independent(self) -> bool:
        return _NONE not in self.forms.values()


_NONE = "rows depend on each other"


def pack(model: nn.Module) -> LinearReport:
    """Replace a model's linear layers by the fastest form whose rows do not depend on each other.

    That is a packed one where this machine has it, in the first of ROW_FORMS that holds; else a plain one; and if none holds, a
    packed one as it is. Only _LINEARS themselves: another subclass may do more than multiply. One layer is replaced at a time,
    and its plain weight given back, unless something else holds it: a tied head leaves the embedding its own copy.
    """
    return _replace(model, {"packed": PackedLinear, "plain": PlainLinear})


def quantize(model: nn.Module) -> LinearReport:
    """Replace a CPU model's linear layers by Int8Linear, the head included. A tied embedding keeps its table.

    Raises: UnsupportedError for a layer whose rows the operator cannot read.
    """
    for parent, name in _linears(model):
        layer = getattr(parent, name)
        if layer.in_features % _INT8_COLUMNS:
            raise UnsupportedError(
                f"quantization='int8' needs layers with inputs in multiples of {_INT8_COLUMNS}, and {name} has "
                f"{layer.in_features}; leave it out"
            )
    return _replace(model, {"in 8 bits": Int8Linear})


def _replace(model: nn.Module, ways: dict[str, type[CPULinear]]) -> LinearReport:
    """ways: the classes a layer may become, by their names in verdicts, the one to prefer first."""
    forms: dict[str, str] = {}
    with torch.inference_mode():
        for parent, name in _linears(model):
            linear = getattr(parent, name)
            kind = _kind(linear)
            layers: dict[str, CPULinear] = {}
            for way, layer_class in ways.items():
                try:
                    layers[way] = layer_class(linear)
                except (RuntimeError, AttributeError) as error:
                    logger.debug("linear layer %s cannot be %s: %s", kind, way, first_line(error))
            if not layers:
                raise UnsupportedError(f"this torch computes no linear layer {kind} {' or '.join(ways)}; use another dtype")
            if kind not in forms and _is_measurable(linear.weight):
                forms[kind] = verdict(f"linear {kind}: {' or '.join(layers)}", partial(_find_form, linear, layers))
            way, _, form = forms.setdefault(kind, _NONE).partition(", ")
            if way not in layers:  # none holds, or this very layer cannot be what the others of its kind are
                way, form, forms[kind] = next(iter(layers)), _NONE, _NONE
            layer = layers[way]
            layer.form = row_forms.form_called(form, _counts(linear)[-1])
            setattr(parent, name, layer)
    report = LinearReport(forms)
    for kind, form in forms.items():
        logger.debug("linear layer %s: %s", kind, form)
    if not report.are_rows_independent:
        kinds = ", ".join(kind for kind, form in forms.items() if form == _NONE)
        logger.info("the bits of a row depend on the batch on this machine, in linear layers %s", kinds)
    return report


def _find_form(linear: nn.Linear, layers: dict[str, CPULinear]) -> str:
    for way, layer in layers.items():
        if form := layer.find_form(linear):
            return f"{way}, {form.name}"
    return _NONE


def _is_measurable(weight: Tensor) -> bool:
    """Whether another order of adding would show in its outputs. A damaged weight leaves no verdict for others of its sizes."""
    low, high = weight[:: -(-len(weight) // 64)].aminmax()  # some outputs' weights, for all inputs
    return bool(low < high) and bool(low.isfinite()) and bool(high.isfinite())


def _counts(linear: nn.Linear) -> tuple[int, ...]:
    is_large = linear.weight.numel() > row_forms.LARGE_WEIGHT
    return row_forms.COUNTS_OF_LARGE if is_large else row_forms.COUNTS


def _kind(linear: nn.Linear) -> str:
    """Everything that chooses a kernel, save the number of rows."""
    activation = getattr(linear, "activation", None)
    extras = ["bias"] if linear.bias is not None else []
    extras += ["residual"] if isinstance(linear, ResidualLinear) else []
    extras += [activation] if activation else []
    dtype = str(linear.weight.dtype).removeprefix("torch.")
    return " ".join([f"{linear.in_features} -> {linear.out_features}", dtype, *extras])


def _linears(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(parent, name) for parent in model.modules() for name, child in parent.named_children() if type(child) in _LINEARS]
