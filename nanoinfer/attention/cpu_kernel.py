"""The C++ kernel of the decode attention, cpu_decode.cpp, as a callable on tensors."""

from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.devices import native
from nanoinfer.errors import UnsupportedError

SOURCE = Path(__file__).with_name("cpu_decode.cpp")
DTYPES = {torch.float32: [], torch.bfloat16: ["BF16"]}  # and what they define in the source


class DecodeKernel:
    """cpu.paged_decode for one dtype, head_dim and number of query heads that share a KV head.

    Raises:
        UnsupportedError: The dtype is neither float32 nor bfloat16, or the kernel cannot be compiled.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, group: int) -> None:
        if dtype not in DTYPES:
            raise UnsupportedError(f"it supports float32 and bfloat16, not {str(dtype).removeprefix('torch.')}")
        self._function = native.load(SOURCE, f"HEAD_DIM={head_dim}", f"GROUP={group}", *DTYPES[dtype]).decode
        self._function.argtypes = [c_void_p] * 4 + [c_int64] * 3 + [c_void_p] * 5 + [c_int64] * 4 + [c_int]
        self._function.restype = None

    def __call__(
        self,
        q: Float[Tensor, "num_seqs num_heads head_dim"],
        k: Float[Tensor, "num_seqs num_kv_heads head_dim"],
        v: Float[Tensor, "num_seqs num_kv_heads head_dim"],
        k_pages: Float[Tensor, "num_blocks num_kv_heads block_size head_dim"],
        v_pages: Float[Tensor, "num_blocks num_kv_heads block_size head_dim"],
        slots: Int[Tensor, " num_seqs"],
        block_tables: Int[Tensor, "num_seqs max_blocks"],
        seq_lens: Int[Tensor, " num_seqs"],
    ) -> Float[Tensor, "num_seqs num_heads head_dim"]:
        """See cpu.paged_decode. The last three arguments are contiguous, int64, and their values are not checked."""
        q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        num_seqs, max_blocks = block_tables.shape
        _, num_kv_heads, block_size, _ = k_pages.shape
        self._function(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            k_pages.data_ptr(), v_pages.data_ptr(), slots.data_ptr(), block_tables.data_ptr(), seq_lens.data_ptr(),
            num_seqs, max_blocks, num_kv_heads, block_size, torch.get_num_threads(),
        )  # fmt: skip
        return out
