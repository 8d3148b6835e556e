"""Linear layers on a CPU whose rows do not depend on each other: weights packed once for oneDNN, or kept in 8 bits.

In: a finished model. Out: the same model, its nn.Linear layers replaced. Nothing else knows of it.

A row of F.linear may come out with other last bits when it is computed alone and when it is one of many: the library picks
another kernel for few rows. (Seen in fp32 for up to 3 rows on one thread, and for 5, 7 and 9 on two.) An activation has the
same fault where a row is no whole number of vector registers: the last numbers of a tensor take another way than the others. A
packed weight is laid out once for one kernel, activation included, which gives a row the same bits among any number of others
(tests/test_invariance.py). It is faster, too.
"""

import logging

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.errors import UnsupportedError, first_line
from nanoinfer.models.layers import ActivatedLinear, MergedLinear, ResidualLinear, activate

logger = logging.getLogger(__name__)

_ROWS_HINT = 64  # rows to expect; from 16 on, the packing serves any number
_INT8_COLUMNS = 32  # the operator reads 16 at a time, and beyond the row's end if they are no multiple; activations take 32
_LINEARS = (nn.Linear, ActivatedLinear, MergedLinear, ResidualLinear)
_FUSED = {None: ("none", ""), "silu": ("swish", ""), "gelu_tanh": ("gelu", "tanh")}  # activation -> oneDNN's names


class PackedLinear(nn.Module):
    """One of _LINEARS with the weight in oneDNN's own order; the plain one is not kept.

    Raises: RuntimeError or AttributeError where this torch, this CPU or the dtype does not have it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation, self._algorithm = _FUSED[getattr(linear, "activation", None)]
        self._is_fp32 = linear.weight.dtype is torch.float32
        x = torch.zeros(2, linear.in_features, dtype=linear.weight.dtype)
        self._multiply(x, None)  # what cannot be packed may first show here

    def forward(
        self, x: Float[Tensor, "rows in"], residual: Float[Tensor, "rows out"] | None = None
    ) -> Float[Tensor, "rows out"]:
        if self._is_fp32 and len(x) == 1:  # one row alone has another kernel where it is long (seen at 3,072): compute it twice
            twice = None if residual is None else residual.expand(2, -1).contiguous()
            return self._multiply(x.expand(2, -1).contiguous(), twice)[:1]
        return self._multiply(x, residual)

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, self._activation, [], self._algorithm)
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")


class Int8Linear(nn.Module):
    """One of _LINEARS with its weight in 8 bits and a scale per output channel: weight = scale * integer in -127 .. 127.

    x stays as it is (weight-only), in bfloat16. Half the bytes to read, so nearly twice as fast where reading the weights is
    all there is to do; from some 16 rows on it is slower than PackedLinear. Rows do not depend on each other.
    Source: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339, section 2, without the outliers' part.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        # Rounded first, so that the integers make up for it. A row of zeros has any scale.
        self._scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        integers = (weight / self._scale.float().unsqueeze(1)).round().clamp(-127, 127)
        self._weight = integers.to(torch.int8)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._activation = getattr(linear, "activation", None)

    def forward(
        self, x: Float[Tensor, "rows in"], residual: Float[Tensor, "rows out"] | None = None
    ) -> Float[Tensor, "rows out"]:
        out = torch.ops.aten._weight_int8pack_mm(x, self._weight, self._scale)
        if self._bias is not None:
            out += self._bias
        if residual is not None:
            out += residual
        return out if self._activation is None else activate(out, self._activation)


def quantize(model: nn.Module) -> None:
    """Replace a CPU model's linear layers by Int8Linear, the head included. A tied embedding keeps its table.

    Raises: UnsupportedError for a layer whose rows the operator cannot read.
    """
    linears = _linears(model)
    for parent, name in linears:
        layer = getattr(parent, name)
        if layer.in_features % _INT8_COLUMNS:
            raise UnsupportedError(
                f"quantization='int8' needs layers with inputs in multiples of {_INT8_COLUMNS}, and {name} has "
                f"{layer.in_features}; leave it out"
            )
    with torch.inference_mode():
        for parent, name in linears:
            setattr(parent, name, Int8Linear(getattr(parent, name)))


def pack(model: nn.Module) -> bool:
    """Replace a model's linear layers by their packed forms. False, and a log line, where there is no such thing.

    Only _LINEARS themselves: another subclass may do more than multiply. One layer is packed at a time, and its
    plain weight given back, unless something else holds it: a tied head leaves the embedding its own copy.
    """
    linears = _linears(model)
    try:
        with torch.inference_mode():
            for parent, name in linears:
                setattr(parent, name, PackedLinear(getattr(parent, name)))
    except (RuntimeError, AttributeError) as error:  # at the first layer, or not at all
        logger.info("linear layers are not packed (%s): slower, and bits may depend on the batch", first_line(error))
        return False
    return True


def _linears(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(parent, name) for parent in model.modules() for name, child in parent.named_children() if type(child) in _LINEARS]
