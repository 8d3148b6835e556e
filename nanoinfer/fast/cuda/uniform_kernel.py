"""The uniform numbers of a draw, computed on a GPU from seeds and positions, with the bits of draw.uniform."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor


@triton.jit
def _uniform_kernel(seeds, positions, out):  # type: ignore[no-untyped-def]
    """Compute one row's number: 53 bits of the first two words of Philox 4x32-10, whose key is the seed."""
    row = tl.program_id(0)
    position = tl.load(positions + row).to(tl.uint64)
    zero = (position * 0).to(tl.uint32)
    counter = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    high, low, _, _ = tl.philox(tl.load(seeds + row).to(tl.uint64), counter[0], counter[1], zero, zero)
    bits = ((high >> 5).to(tl.int64) << 26) + (low >> 6).to(tl.int64)
    tl.store(out + row, bits.to(tl.float64) * (1 / 9007199254740992))


def uniform_on_gpu(seeds: Int[Tensor, " rows"], positions: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Compute draw.uniform in float64. seeds: the bits of the seeds. positions: not negative."""
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    _uniform_kernel[(len(seeds),)](seeds, positions, out, num_warps=1)
    return out
