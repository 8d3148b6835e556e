"""The C++ kernels of the attention, cpu_decode.cpp and cpu_prefill.cpp, as callables on tensors."""

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.devices import native
from nanoinfer.devices.program import Step

FOLDER = Path(__file__).parent


def _library(name: str, dtype: torch.dtype, head_dim: int, *definitions: str) -> ctypes.CDLL:
    return native.load(FOLDER / f"cpu_{name}.cpp", f"HEAD_DIM={head_dim}", *definitions, *native.definitions_of(dtype))


def _with_whole_heads(*tensors: Tensor) -> Iterator[Tensor]:
    """Tensors whose heads lie side by side, as the kernels need them: a token's stride may be any."""
    return (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in tensors)


class DecodeKernel:
    """cpu.paged_decode for one dtype, head_dim and number of query heads that share a KV head.

    Raises:
        UnsupportedError: The dtype is neither float32 nor bfloat16, or the kernel cannot be compiled.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, group: int) -> None:
        library = _library("decode", dtype, head_dim, f"GROUP={group}")
        self._decode, self._find_spans, self._decode_step = library.decode, library.find_spans, library.decode_step
        self._decode.argtypes, self._decode.restype = [c_void_p, c_void_p, c_int], None
        self._find_spans.argtypes, self._find_spans.restype = [c_void_p], None
        sizes = (c_int64.in_dll(library, name).value for name in ("span_tokens", "span_bytes", "partial_bytes"))
        self._span_tokens, self._span_bytes, self._partial_bytes = sizes

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
        _, num_kv_heads, block_size, _ = k_pages.shape
        rows = self.rows(slots, block_tables, seq_lens, seq_lens.tolist(), (num_kv_heads, block_size))
        heads = (c_int64 * 9)(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
            k_pages.data_ptr(), v_pages.data_ptr(),
        )  # fmt: skip
        self._decode(rows.array.data_ptr(), heads, torch.get_num_threads())
        return out

    def rows(
        self,
        slots: Int[Tensor, " num_seqs"],
        block_tables: Int[Tensor, "num_seqs max_blocks"],
        seq_lens: Int[Tensor, " num_seqs"],
        lens: list[int],
        sizes: tuple[int, int],
        pages: Int[Tensor, " pages"] | None = None,
    ) -> "KernelRows":
        """What the layers of a step share. lens: the values of seq_lens. sizes: num_kv_heads and block_size.

        pages: KVCache.addresses, for `step`.
        """
        num_kv_heads, block_size = sizes
        num_spans = sum(-(-num // self._span_tokens) for num in lens)
        scratch = torch.empty(num_spans * (self._span_bytes + num_kv_heads * self._partial_bytes) + 64, dtype=torch.uint8)
        partials = -(-scratch.data_ptr() // 64) * 64
        spans = partials + num_spans * num_kv_heads * self._partial_bytes
        num_seqs, max_blocks = block_tables.shape
        array = torch.tensor([
            slots.data_ptr(), block_tables.data_ptr(), seq_lens.data_ptr(), num_seqs, max_blocks, num_spans,
            num_kv_heads, block_size, spans, partials, 0 if pages is None else pages.data_ptr(),
        ])  # fmt: skip
        self._find_spans(array.data_ptr())
        return KernelRows(array, (slots, block_tables, seq_lens, pages, scratch))

    def step(self, qkv: int, out: int, rows: int, *, layer: int) -> Step:
        """A layer's attention in a program. qkv, out, rows: arrays of its batch. The last one is that of KernelRows.

        qkv: [num_seqs, num_heads + 2 * num_kv_heads, head_dim], the queries first, the values last.
        """
        return Step(self._decode_step, (qkv, out, rows, layer))


class KernelRows(NamedTuple):
    """The rows of a decode step as cpu_decode.cpp reads them."""

    array: Int[Tensor, " fields"]
    kept: tuple[Tensor | None, ...]  # what it points to


class PrefillKernel:
    """cpu.causal_attention for the prompt chunks of a step, of one dtype and head_dim, that stores their k and v first.

    Raises:
        UnsupportedError: The dtype is neither float32 nor bfloat16, or the kernel cannot be compiled.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        self._function = _library("prefill", dtype, head_dim).prefill
        self._function.restype = None
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
