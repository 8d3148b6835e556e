"""The draw: inverse-CDF sampling with integer weights and a uniform number per row.

    weights             | 7 |      19      | 2 |   0   | 4 |      W = 32
    cumulative weights      7              26  28      28  32
                                  ^ threshold = floor(u * 32) = 15: the second token

Integer sums do not depend on the order of addition. If the weights are the same, the plain stages, every faster path and every
device agree exactly. A dropped token has weight 0 and can never be drawn. The draw takes a random number per token. The
exponential race (argmax of p / Exp(1), as in nano-vllm and vLLM) takes a random number per vocabulary entry.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.sampling.exponentials import exponentials

BITS = 32
ONE = 2.0**BITS  # the weight of the most probable token

MASK = 0xFFFFFFFF  # the largest 32-bit word
FEW_ROWS = 8  # up to this number of rows, Python's integers take less time than arrays

Word = Any  # 32 bits in an int, or an array of such words in uint64, which has room for the product of two


def integer_weights(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, "batch vocab"]:
    """Compute floor(p / p_max * 2^32): 2^32 for the most probable token, 0 for dropped or extremely improbable tokens.

    A row without a finite logit gets weights of 0.
    """
    return exponentials(logits, BITS)


def argmax(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
    """Find the id of each row's largest logit: the lowest of equal logits, and -1 if the largest is not finite."""
    largest, token_ids = logits.max(dim=-1)
    return torch.where(largest.isfinite(), token_ids, -1)


def draw(logits: Float[Tensor, "batch vocab"], u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Draw an id per row. u: float64 in [0, 1)."""
    return draw_from_weights(integer_weights(logits), u)


def draw_from_weights(weights: Int[Tensor, "batch vocab"], u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Find the first id whose cumulative weight exceeds the threshold.

    A row of zeros has no such id. It gets an id that the sampler replaces.
    """
    cumulative = weights.cumsum(dim=-1)
    return torch.searchsorted(cumulative, thresholds(cumulative[:, -1], u).unsqueeze(-1), right=True).squeeze(-1)


def thresholds(total: Int[Tensor, " batch"], u: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Compute min(floor(u * W), W - 1). The minimum keeps the threshold below W even if u * W is rounded up to W."""
    return torch.minimum((u * total).floor().to(torch.int64), total - 1)


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> Float[Tensor, " batch"]:
    """Compute u(seed, position): float64 in [0, 1), 53 random bits that depend on the two arguments and nothing else.

    It runs on the CPU without torch. In numpy, 64 rows take 0.07 ms. In torch they take 0.2 ms, and more as kernels of a GPU.

    Args:
        seeds: the seed of each row, in [0, 2^64).
        positions: the position of each row's token, in [0, 2^64).
    """
    if len(seeds) <= FEW_ROWS:
        return torch.tensor([_uniform(*row) for row in zip(seeds, positions, strict=True)], dtype=torch.float64)
    return torch.from_numpy(_uniform(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)))


def _uniform(seed: Word, position: Word) -> Word:
    """Compute the numbers of one row, in integers, or of many rows, in arrays."""
    high, low, _, _ = philox((position & MASK, position >> 32, 0, 0), (seed & MASK, seed >> 32))
    return ((high >> 5 << 26) + (low >> 6)) * 2.0**-53


def philox(counter: Sequence[Word], key: Sequence[Word]) -> tuple[Word, Word, Word, Word]:
    """Compute Philox 4x32-10: ten rounds of multiply and mix turn a counter of four words and a key of two into four words.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", https://doi.org/10.1145/2063384.2063405
    """
    (a, b, c, d), (left, right) = counter, key
    for _ in range(10):
        product, other = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (other >> 32) ^ b ^ left, other & MASK, (product >> 32) ^ d ^ right, product & MASK
        left, right = (left + 0x9E3779B9) & MASK, (right + 0xBB67AE85) & MASK  # the golden ratio and sqrt(3) - 1, as fractions
    return a, b, c, d
