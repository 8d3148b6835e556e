"""The draw: inverse-CDF sampling with integer weights and one uniform number per row.

    weights             | 7 |      19      | 2 |   0   | 4 |      W = 32
    cumulative weights      7              26  28      28  32
                                  ^ threshold = floor(u * 32) = 15: the second token

Integer sums do not depend on the order of adding. If the weights are the same, the plain stages, every faster path and every
device agree exactly. A dropped token has weight 0 and can never be drawn. The draw takes one random number per token. The
exponential race (argmax of p / Exp(1), as in nano-vllm and vLLM) takes one per vocabulary entry.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

ONE = 2.0**32  # the weight of the most probable token

_WORD, _MASK = np.uint64(32), np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # the golden ratio and sqrt(3) - 1, as 32-bit fractions


def integer_weights(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, "batch vocab"]:
    """floor(p / p_max * 2^32): 2^32 for the most probable token, 0 for a dropped or extremely improbable one.

    A row without a finite logit gets weights of 0.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    ratio = (logits - largest.clamp(min=torch.finfo(logits.dtype).min)).exp()  # clamped: -inf - -inf would be NaN
    return (ratio * ONE).to(torch.int64)


def draw(logits: Float[Tensor, "batch vocab"], u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Draw one id per row. u: float64 in [0, 1)."""
    return draw_from_weights(integer_weights(logits), u)


def draw_from_weights(weights: Int[Tensor, "batch vocab"], u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Find the first id whose cumulative weight exceeds the threshold.

    A row of zeros has no such id. It gets an id that the sampler replaces.
    """
    cumulative = weights.cumsum(dim=-1)
    return torch.searchsorted(cumulative, thresholds(cumulative[:, -1], u).unsqueeze(-1), right=True).squeeze(-1)


def thresholds(total: Int[Tensor, " batch"], u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """min(floor(u * W), W - 1). The minimum keeps the threshold below W even if u * W is rounded up to W."""
    return torch.minimum((u * total).floor().to(torch.int64), total - 1)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> Float[Tensor, " batch"]:
    """u(seed, position): float64 in [0, 1), 53 random bits, a function of the two arguments and nothing else.

    Computed in numpy on the CPU: some hundred operations on one number per row take 0.05 ms. They take 0.2 ms in torch, and
    more as kernels of a GPU.

    Args:
        seeds: [0, 2^64), one per row.
        positions: [0, 2^64), one per row.
    """
    seed, position = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    zeros = np.zeros_like(position)
    high, low, _, _ = philox(
        np.stack((position & _MASK, position >> _WORD, zeros, zeros)), np.stack((seed & _MASK, seed >> _WORD))
    )
    return torch.from_numpy(((high >> np.uint64(5) << np.uint64(26)) + (low >> np.uint64(6))) * 2.0**-53)


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox 4x32-10: ten rounds of multiply and mix turn a counter [4, batch] and a key [2, batch] into [4, batch] words.

    Every number is a 32-bit word in a uint64, which has room for the product of two.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", https://doi.org/10.1145/2063384.2063405
    """
    even, odd = counter[0::2], counter[1::2]  # words 0 and 2, words 1 and 3
    for round_key in (key + np.arange(10, dtype=np.uint64)[:, None, None] * _KEY_STEPS) & _MASK:
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = (products >> _WORD) ^ odd ^ round_key, products & _MASK
    return np.stack((even[0], odd[0], even[1], odd[1]))
