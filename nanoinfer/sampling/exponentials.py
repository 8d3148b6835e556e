"""Exponentials as integers, with the same bits on every processor, from which weights and log-probabilities are made.

In: logits in fp32. Out: floor(2^bits * exp(logit - largest)), where exp is a number in fp32. torch's own exp has other bits
with other instructions. Here every operation is rounded once, as IEEE 754 defines it, and sums of the integers are exact. On
a GPU, torch's exp is used.
"""

from collections.abc import Callable
from decimal import Context, Decimal
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

STEPS = 256  # of the table, for each halving
LOG2 = 0.6931471805599453
SCALE, FIRST, SECOND = STEPS / LOG2, LOG2 / STEPS, (LOG2 / STEPS) ** 2 / 2  # 2^(x / STEPS) = 1 + FIRST x + SECOND x^2 + ...

Exponentials = Callable[[Float[Tensor, "batch vocab"], Float[Tensor, " steps"]], Int[Tensor, "batch vocab"]]


@cache
def table(bits: int) -> Float[Tensor, " steps"]:
    """Return 2^bits * 2^(-i / STEPS) in float64, down to a half."""
    context = Context(prec=40)
    halving = [float(context.power(Decimal(2), Decimal(-i) / STEPS)) for i in range(STEPS)]
    powers = torch.tensor([2.0 ** (bits - i) for i in range(bits + 2)], dtype=torch.float64)
    return (powers.unsqueeze(-1) * torch.tensor(halving, dtype=torch.float64)).flatten()


def by_torch(below: Float[Tensor, "batch vocab"], table: Float[Tensor, " steps"]) -> Int[Tensor, "batch vocab"]:
    """Compute floor(table[0] * exp(below)), 0 for NaN. below: at most 0."""
    x = torch.fmax(below.double() * SCALE, torch.tensor(float(STEPS - len(table)), dtype=torch.float64))
    steps = x.round()
    rest = x - steps  # -0.5 .. 0.5
    return (((rest * SECOND + FIRST) * rest + 1) * table[(-steps).long()]).float().long()


on_cpu: Exponentials = by_torch  # fast/sampling/kernels.py puts a kernel with the same bits here


def exponentials(logits: Float[Tensor, "batch vocab"], bits: int) -> Int[Tensor, "batch vocab"]:
    """Compute floor(2^bits * exp(logit - largest)). A row without a finite logit gets zeros. bits: at most 40."""
    logits = logits.float()
    largest = logits.amax(dim=-1, keepdim=True)
    below = logits - largest.clamp(min=torch.finfo(logits.dtype).min)  # clamped: -inf - -inf would be NaN
    if below.device.type != "cpu":
        return (below.exp() * 2.0**bits).to(torch.int64)
    return on_cpu(below, table(bits))
