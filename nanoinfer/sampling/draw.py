"""The draw: one uniform number per row, laid on a ruler of integer weights.

    weights   | 7 |      19      | 2 |   0   | 4 |      W = 32
    ruler     0   7              26  28      28  32
                          ^ floor(u * 32) = 15: the second token

Integers, so that sums do not depend on the order of adding: wherever the weights are the same, the plain stages, any faster
path and any device agree exactly; and a dropped token, of weight 0, can never be drawn. One number per token drawn, where the
exponential race (argmax of p / Exp(1), as in nano-vllm and vLLM) needs one per vocabulary entry.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

ONE = 2.0**32  # the weight of the most probable token

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, as 32-bit fractions


def integer_weights(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, "batch vocab"]:
    """floor(p / p_max * 2^32): 2^32 for the most probable token, 0 for one that is dropped (or hopeless).

    A row without a finite logit gets weights of 0.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    ratio = (logits - largest.clamp(min=torch.finfo(logits.dtype).min)).exp()  # clamped: -inf - -inf would be NaN
    return (ratio * ONE).to(torch.int64)


def draw(logits: Float[Tensor, "batch vocab"], u: Float[Tensor, "batch"]) -> Int[Tensor, "batch"]:
    """The first id whose running sum of weights exceeds min(floor(u * W), W - 1). u: float64 in [0, 1).

    The minimum says that the mark lies on the ruler even if u * W were rounded up to W. A row that is all zeros has no token
    to find, and gets an id that the sampler replaces.
    """
    running = integer_weights(logits).cumsum(dim=-1)
    total = running[:, -1]
    mark = torch.minimum((u * total).floor().to(torch.int64), total - 1)
    return torch.searchsorted(running, mark.unsqueeze(-1), right=True).squeeze(-1)


def uniform(seeds: Int[Tensor, "batch"], positions: Int[Tensor, "batch"]) -> Float[Tensor, "batch"]:
    """u(seed, position): float64 in [0, 1), 53 random bits, a function of its two arguments and nothing else."""
    zeros = torch.zeros_like(positions)
    counter = torch.stack((positions & _MASK, positions >> 32, zeros, zeros))
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))
    high, low, _, _ = philox(counter, key)
    return ((high >> 5) * 2**26 + (low >> 6)).to(torch.float64) * 2.0**-53


def philox(counter: Int[Tensor, "4 batch"], key: Int[Tensor, "2 batch"]) -> Int[Tensor, "4 batch"]:
    """Philox 4x32-10: ten rounds of multiply and mix turn a counter and a key into 128 random bits.

    Every number is a 32-bit word in an int64. The product of two words may overflow an int64's sign; its bits are right.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", https://doi.org/10.1145/2063384.2063405
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return torch.stack((c0, c1, c2, c3))
