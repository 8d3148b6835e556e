"""Linear layers on a CPU whose weights are kept in 8 bits.

In: an nn.Linear. Out: a CPULinear that computes nearly the same. cpu_linear.py has those that lose nothing.
"""

import torch
from torch import Tensor, nn

from nanoinfer.devices import row_forms
from nanoinfer.models.cpu_linear import Activation, CPULinear, counts_of


class Int8Linear(CPULinear):
    """The weight in 8 bits and a scale per output channel: weight = scale * integer in -127 .. 127.

    x stays in bfloat16 (weight-only). Half the bytes are read, so it is nearly twice as fast where reading the weights takes
    the time. From some 16 rows on it is slower than PackedLinear.
    Source: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339, section 2, without the outliers' part.
    """

    MULTIPLE = 32  # of inputs. The operator reads 16 weights at a time, also beyond the end of a row, and 32 activations.

    def __init__(self, linear: nn.Linear, activation: Activation | None = None, *, adds_residual: bool = False) -> None:
        super().__init__(linear, activation, adds_residual=adds_residual)
        weight = linear.weight.detach().float()
        # Rounded before the division, so that the integers make up for it. A row of zeros has any scale.
        self._scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        integers = (weight / self._scale.float().unsqueeze(1)).round().clamp(-127, 127)
        self._weight = integers.to(torch.int8)
        self._sum(torch.zeros(1, linear.in_features, dtype=torch.bfloat16))  # some machines fail only here

    def find_form(self, linear: nn.Linear) -> row_forms.RowForm | None:
        """Examine the sum alone. It is rounded before bias and residual are added, and they would hide a different order."""
        probes = row_forms.cancelling_rows(self._weight.bfloat16(), None, has_residual=False)
        return row_forms.find_row_form(lambda x, _: self.activated(self._sum(x)), probes, counts_of(linear))

    def _sum(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self._weight, self._scale)

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out = self._sum(x)
        if self._bias is not None:
            out += self._bias
        if residual is not None:
            out += residual
        return self.activated(out)


# quantization -> the classes that a layer may become, by their names in verdicts
QUANTIZED: dict[str, dict[str, type[CPULinear]]] = {"int8": {"in 8 bits": Int8Linear}}
