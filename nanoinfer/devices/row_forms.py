"""The calls in which a linear layer computes its rows, so that a row's bits do not depend on the number of rows.

In: a layer's product, as a function of its rows. Out: the first of ROW_FORMS under which a row always has the same bits on this
machine, or None.

A library chooses its kernel by the number of rows: one for a single row, different ones for few and for many. Kernels add in
different orders, and floating-point addition is not associative. The numbers of rows at which the kernel changes depend on the
processor, the dtype and the layer's sizes. On an AMD EPYC (Zen 4) a single row differs from two at 2,048 and more inputs, in
fp32 and in bf16. With an older instruction set it differs in more layers. An Intel Xeon with AMX changes kernels at different
numbers. No rule holds everywhere, so it is measured, and a layer is called only with numbers of rows that agree.

Random rows do not show a difference reliably. A different order changes the last bits of an fp32 sum, and rounding to bf16
hides nearly all of that. So the compared rows cancel (`cancelling_rows`): their exact result is almost zero, and the output
is the rounding error of the order alone.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

# The numbers of rows that are compared: those near which libraries change kernels (vector widths, tiles of 16, 32 and 64).
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 128, 320, 512, 1024)
MOST_ROWS = COUNTS[-1]  # more rows are computed in several calls, because nothing above it has been compared
# Layers of more weights than this (LM heads) take many milliseconds per call, and get few rows.
LARGE_WEIGHT = 16 * 2**20
COUNTS_OF_LARGE = (1, 2, 8, 16, 17, 33, 64)
NUM_PROBES, NUM_PROBES_OF_LARGE = 7, 3  # odd, so that a probe gets to every place of a kernel's tile


@dataclass(frozen=True, slots=True)
class RowForm:
    """Calls of at most `most` rows, padded with zeros to no fewer than `least` and to a multiple of `multiple`."""

    name: str
    least: int = 1
    multiple: int = 1
    most: int = MOST_ROWS

    def calls(self, num_rows: int) -> bool:
        """Whether the layer may be called with this number of rows."""
        return self.least <= num_rows <= self.most and num_rows % self.multiple == 0

    def compute(
        self,
        product: Callable[[Tensor, Tensor | None], Tensor],
        x: Float[Tensor, "rows in"],
        residual: Float[Tensor, "rows out"] | None,
    ) -> Float[Tensor, "rows out"]:
        num_rows = x.shape[0]  # half of the time of len(x)
        if num_rows == 0 or self.calls(num_rows):
            return product(x, residual)
        out = []
        for start in range(0, num_rows, self.most):
            rows = slice(start, min(start + self.most, num_rows))
            num = rows.stop - start
            padding = max(-(-num // self.multiple) * self.multiple, self.least) - num
            part, beside = x[rows], None if residual is None else residual[rows]
            if padding:
                part = F.pad(part, (0, 0, 0, padding))
                beside = None if beside is None else F.pad(beside, (0, 0, 0, padding))
            out.append(product(part, beside)[:num])
        return out[0] if len(out) == 1 else torch.cat(out)


AS_IT_IS = RowForm("as it is")
ROW_FORMS = (  # the cheapest first
    AS_IT_IS,
    RowForm("at least 2 rows", least=2),
    RowForm("at least 16 rows", least=16),
    RowForm("multiples of 16 rows", least=16, multiple=16),
    RowForm("multiples of 64 rows", least=64, multiple=64),
    RowForm("64 rows at a time", least=64, multiple=64, most=64),
    RowForm("16 rows at a time", least=16, multiple=16, most=16),
)


def form_called(name: str, most: int) -> RowForm:
    """The one of ROW_FORMS with this name, for calls of at most `most` rows. For any other name, all rows in one call."""
    for form in ROW_FORMS:
        if form.name == name:
            return replace(form, most=min(form.most, most))
    return RowForm(name, most=sys.maxsize)


@dataclass(frozen=True, slots=True)
class Probes:
    """Rows that cancel: in each, the sum of one output (products, bias and residual) is zero but for rounding."""

    x: Float[Tensor, "probes in"]
    residual: Float[Tensor, "probes out"] | None


def cancelling_rows(weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None, *, has_residual: bool) -> Probes:
    """Make random rows. Four numbers of each are set in turn to cancel one output. In bf16 each leaves some 2^-8 of the sum."""
    generator = torch.Generator().manual_seed(0)
    num_out, num_in = weight.shape
    num_probes = NUM_PROBES if weight.numel() <= LARGE_WEIGHT else NUM_PROBES_OF_LARGE
    columns = torch.randint(0, num_out, (num_probes,), generator=generator)
    columns[0], columns[-1] = 0, num_out - 1
    rows = torch.randn(num_probes, num_in, generator=generator).to(weight.dtype).double()
    weights = weight[columns].double()
    target = torch.zeros(num_probes, dtype=torch.float64) if bias is None else bias[columns].double()
    residual = None
    if has_residual:
        residual = torch.randn(num_probes, num_out, generator=generator).to(weight.dtype)
        residual[::2] = 0.0  # only these rows show a sum that is rounded before the residual is added
        target = target + residual.gather(1, columns.unsqueeze(1)).squeeze(1).double()
    some = torch.rand(num_probes, num_in, generator=generator).topk(min(num_in, 64)).indices
    largest = weights.gather(1, some).abs().topk(min(num_in, 4)).indices  # so that the numbers stay small
    places = some.gather(1, largest)
    rows.scatter_(1, places, 0.0)
    for place in places.split(1, dim=1):
        left = (rows * weights).sum(1, keepdim=True) + target.unsqueeze(1)
        divisor = weights.gather(1, place)
        rows.scatter_(1, place, (-left / torch.where(divisor == 0, 1.0, divisor)).to(weight.dtype).double())
    return Probes(rows.to(weight.dtype), residual)


def find_row_form(
    product: Callable[[Tensor, Tensor | None], Tensor], probes: Probes, counts: tuple[int, ...]
) -> RowForm | None:
    """Find the first of ROW_FORMS whose calls give each row the same bits.

    Args:
        product: the layer, called with rows and a residual or None.
        probes: the rows to compare.
        counts: the numbers of rows to compare.
    """
    outputs: dict[int, Tensor | None] = {}
    for form in ROW_FORMS:
        called = [num_rows for num_rows in counts if form.calls(num_rows)]
        for num_rows in called:
            if num_rows not in outputs:
                outputs[num_rows] = _output(product, probes, num_rows)
            first, other = outputs[called[0]], outputs[num_rows]
            if first is None or other is None or not same_bits(first, other):
                break
        else:
            return form
    return None


def same_bits(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit by bit. NaN equals NaN: a damaged weight does not show the order of a sum."""
    integers = {4: torch.int32, 2: torch.int16}[first.dtype.itemsize]
    return torch.equal(first.contiguous().view(integers), other.contiguous().view(integers))


def _output(product: Callable[[Tensor, Tensor | None], Tensor], probes: Probes, num_rows: int) -> Tensor | None:
    """The probes' rows of the product, computed num_rows at a time. None if a row's bits depend on its place."""
    num_probes = len(probes.x)
    expected: Tensor | None = None
    for start in range(0, num_probes, num_rows):
        which: Int[Tensor, " rows"] = (start + torch.arange(num_rows)) % num_probes
        out = product(probes.x[which], None if probes.residual is None else probes.residual[which])
        if expected is None:
            expected = out.new_empty(num_probes, out.shape[1])
        seen = which[: num_probes - start]
        expected[seen] = out[: len(seen)]
        if num_rows > num_probes and not all(same_bits(part, expected[: len(part)]) for part in out.split(num_probes)):
            return None
    return expected
