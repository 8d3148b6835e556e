"""The C++ kernels of the attention, cpu_decode.cpp and cpu_prefill.cpp, as callables on tensors."""

from collections.abc import Iterator
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.devices import native
from nanoinfer.errors import UnsupportedError

FOLDER = Path(__file__).parent
DTYPES = {torch.float32: [], torch.bfloat16: ["BF16"]}  # and what they define in the source


def _function(name: str, dtype: torch.dtype, head_dim: int, *definitions: str) -> Any:
    """The function `name` of cpu_`name`.cpp."""
    if dtype not in DTYPES:
        raise UnsupportedError(f"it supports float32 and bfloat16, not {str(dtype).removeprefix('torch.')}")
    function = native.load(FOLDER / f"cpu_{name}.cpp", f"HEAD_DIM={head_dim}", *definitions, *DTYPES[dtype])[name]
    function.restype = None
    return function


def _with_whole_heads(*tensors: Tensor) -> Iterator[Tensor]:
    """Tensors whose heads lie side by side, as the kernels need them: a token's stride may be any."""
    return (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in tensors)


class DecodeKernel:
    """cpu.paged_decode for one dtype, head_dim and number of query heads that share a KV head.

    Raises:
        UnsupportedError: The dtype is neither float32 nor bfloat16, or the kernel cannot be compiled.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, group: int) -> None:
        self._function = _function("decode", dtype, head_dim, f"GROUP={group}")
        self._function.argtypes = [c_void_p] * 4 + [c_int64] * 3 + [c_void_p] * 5 + [c_int64] * 4 + [c_int]

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
        q, k, v = _with_whole_heads(q, k, v)
        out = torch.empty(q.shape, dtype=q.dtype)
        num_seqs, max_blocks = block_tables.shape
        _, num_kv_heads, block_size, _ = k_pages.shape
        self._function(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            k_pages.data_ptr(), v_pages.data_ptr(), slots.data_ptr(), block_tables.data_ptr(), seq_lens.data_ptr(),
            num_seqs, max_blocks, num_kv_heads, block_size, torch.get_num_threads(),
        )  # fmt: skip
        return out


class PrefillKernel:
    """cpu.causal_attention for the prompt chunks of a step, of one dtype and head_dim, that stores their k and v first.

    Raises:
        UnsupportedError: The dtype is neither float32 nor bfloat16, or the kernel cannot be compiled.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        self._function = _function("prefill", dtype, head_dim)
        self._function.argtypes = [c_void_p] * 4 + [c_int64] * 3 + [c_void_p] * 6 + [c_int64] * 5 + [c_int]

    def __call__(
        self,
        q: Float[Tensor, "num_tokens num_heads head_dim"],
        k: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        v: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        k_pages: Float[Tensor, "num_blocks num_kv_heads block_size head_dim"],
        v_pages: Float[Tensor, "num_blocks num_kv_heads block_size head_dim"],
        slots: Int[Tensor, " num_tokens"],
        starts: Int[Tensor, " num_chunks_plus_1"],
        block_tables: Int[Tensor, "num_chunks max_blocks"],
        seq_lens: Int[Tensor, " num_chunks"],
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        """See AttentionMetadata. starts: its query_start_loc. The integers are contiguous, int64, and not checked."""
        q, k, v = _with_whole_heads(q, k, v)
        out = torch.empty(q.shape, dtype=q.dtype)
        num_chunks, max_blocks = block_tables.shape
        _, num_kv_heads, block_size, _ = k_pages.shape
        self._function(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            k_pages.data_ptr(), v_pages.data_ptr(), slots.data_ptr(), starts.data_ptr(), block_tables.data_ptr(),
            seq_lens.data_ptr(), num_chunks, max_blocks, num_kv_heads, q.shape[1] // num_kv_heads, block_size,
            torch.get_num_threads(),
        )  # fmt: skip
        return out
