"""Linear layers on a CPU whose rows do not depend on each other: weights packed once for oneDNN.

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

from nanoinfer.models.layers import ActivatedLinear, ResidualLinear

logger = logging.getLogger(__name__)

_ROWS_HINT = 64  # rows to expect; from 16 on, the packing serves any number
_LINEARS = (nn.Linear, ActivatedLinear, ResidualLinear)
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
        self(torch.zeros(2, linear.in_features, dtype=linear.weight.dtype))  # what cannot be packed may first show here

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


def pack(model: nn.Module) -> bool:
    """Replace a model's linear layers by their packed forms. False, and a log line, where there is no such thing.

    Only these themselves: another subclass may do more than multiply. One layer is packed at a time, and its
    plain weight given back, unless something else holds it: a tied head leaves the embedding its own copy.
    """
    linears = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if type(child) in _LINEARS
    ]
    try:
        with torch.inference_mode():
            for parent, name in linears:
                setattr(parent, name, PackedLinear(getattr(parent, name)))
    except (RuntimeError, AttributeError) as error:  # at the first layer, or not at all
        first_line = str(error).split("\n", maxsplit=1)[0]
        logger.info("linear layers are not packed (%s): slower, and bits may depend on the batch", first_line)
        return False
    return True
