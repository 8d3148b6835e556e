"""Attention on a CPU by C++ kernels. It computes the same as attention/cpu.py, which should be read first.

In: the steps of a CPUBackend. Out: the same, from paged_decode.cpp and paged_prefill.cpp. Their bits may differ from those
of the functions in Python, so an engine never mixes the two.

Prefill is bound by arithmetic. The kernel takes a quarter of the time of `causal_attention` in bfloat16 and a third in float32
(1,023 tokens, AVX512-BF16). It reads k and v from the cache, so a chunk after a cached prefix is no special case. Decode is
bound by reading the cache. The kernel reads each page once, and only up to the end of a sequence.
"""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.cpu import CPUBackend, CPUStep, DecodeRows, PrefillChunks
from nanoinfer.attention.dense import Keys, Queries, Sinks, Window, with_whole_heads
from nanoinfer.attention.kv_cache import KVCache, Pages
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.program import KernelCall, Slice, fields, tile_definitions

FOLDER = Path(__file__).parent
NO_WINDOW = 2**31 - 1  # larger than any sequence is long


class KernelDecodeRows(ctypes.Structure):
    """The rows of a decode step, the same for all layers. kept: the tensors to which they point."""

    kept: tuple[object, ...]
    _fields_ = fields(
        (c_void_p, "slots block_tables seq_lens"),
        (c_int64, "num_rows max_blocks num_spans num_kv_heads block_size"),
        (c_void_p, "spans partials pages"),
        (c_int64, "window"),
    )


KernelDecodeRows.__name__ = "DecodeRows"  # as in paged_decode.cpp


class Heads(ctypes.Structure):
    """The heads of one layer, and its pages."""

    _fields_ = fields((c_void_p, "q k v out"), (c_int64, "q_stride k_stride v_stride"), (c_void_p, "k_pages v_pages sinks"))


class AttendCall(ctypes.Structure):
    """The attention of a layer in a program. kept: the tensor to which `sinks` points."""

    kept: object
    _fields_ = fields((Slice, "q k v out"), (c_int64, "rows layer"), (c_void_p, "sinks"))


class PrefillCall(ctypes.Structure):
    """The arguments of paged_prefill.cpp."""

    _fields_ = fields(
        (c_void_p, "q k v out"),
        (c_int64, "q_stride k_stride v_stride"),
        (c_void_p, "k_pages v_pages slots starts block_tables seq_lens"),
        (c_int64, "num_chunks max_blocks num_kv_heads group block_size window"),
        (c_void_p, "sinks"),
    )


def _library(name: str, dtype: torch.dtype, structures: tuple[type[ctypes.Structure], ...], *definitions: str) -> ctypes.CDLL:
    return native.load(FOLDER / f"{name}.cpp", *definitions, *native.definitions_of(dtype), structures=structures)


def _definitions(has_int8_pages: bool, **sizes: int) -> list[str]:
    return [*(f"{name}={size}" for name, size in sizes.items()), *(["INT8_PAGES"] if has_int8_pages else [])]


def _heads(q: Tensor, k: Tensor, v: Tensor, out: Tensor, k_pages: Tensor, v_pages: Tensor) -> tuple[int, ...]:
    """Return the fields of Heads."""
    pointers, pages = (x.data_ptr() for x in (q, k, v, out)), (x.data_ptr() for x in (k_pages, v_pages))
    return *pointers, q.stride(0), k.stride(0), v.stride(0), *pages


def in_fp32(sinks: Tensor) -> Tensor:
    """Return the sinks as the kernels read them."""
    return sinks.detach().float().contiguous()


def _address_of(sinks: Sinks) -> int | None:
    return None if sinks is None else sinks.data_ptr()


class DecodeKernel:
    """Computes attention.cpu.paged_decode for a dtype, a head_dim and a number of query heads per KV head.

    Raises:
        UnsupportedError: the dtype is not supported, or the kernel cannot be compiled.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, group: int, *, has_int8_pages: bool = False) -> None:
        structures = KernelDecodeRows, Heads, AttendCall
        definitions = _definitions(has_int8_pages, HEAD_DIM=head_dim, GROUP=group)
        library = _library("paged_decode", dtype, structures, *definitions)
        self._head_dim, self._group = head_dim, group
        self._decode, self._find_spans, self._attend = library.decode, library.find_spans, library.attend
        self._decode.argtypes, self._decode.restype = [c_void_p, c_void_p, c_int], None
        self._find_spans.argtypes, self._find_spans.restype = [c_void_p], None
        sizes = (c_int64.in_dll(library, name).value for name in ("span_tokens", "span_bytes", "partial_bytes"))
        self._span_tokens, self._span_bytes, self._partial_bytes = sizes

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Keys,
        k_pages: Pages,
        v_pages: Pages,
        rows: DecodeRows,
        window: Window = None,
        sinks: Sinks = None,
    ) -> Queries:
        """See paged_decode. The integers in `rows` must be contiguous int64, which is not checked."""
        q, k, v = (with_whole_heads(x) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        step = self.rows(rows, rows.seq_lens.tolist(), k_pages, window)
        sinks = None if sinks is None else in_fp32(sinks)
        heads = Heads(*_heads(q, k, v, out, k_pages, v_pages), _address_of(sinks))
        self._decode(ctypes.addressof(step), ctypes.addressof(heads), torch.get_num_threads())
        return out

    def rows(
        self,
        rows: DecodeRows,
        lens: list[int],
        pages: Pages,
        window: Window = None,
        addresses: "ctypes.Array[c_void_p] | None" = None,
    ) -> KernelDecodeRows:
        """Return the rows that all layers of the step share.

        Args:
            lens: the values of rows.seq_lens.
            pages: the pages of any layer.
            addresses: the addresses of each layer's keys and values, for the calls of a program. None: it is no program.
        """
        _, num_kv_heads, block_size, _ = pages.shape
        num_seqs, max_blocks = rows.block_tables.shape
        window = window or NO_WINDOW
        num_spans = sum(-(-min(num, window) // self._span_tokens) for num in lens)
        scratch = torch.empty(num_spans * (self._span_bytes + num_kv_heads * self._partial_bytes) + 64, dtype=torch.uint8)
        partials = -(-scratch.data_ptr() // 64) * 64
        spans = partials + num_spans * num_kv_heads * self._partial_bytes
        step = KernelDecodeRows(
            *(index.data_ptr() for index in rows), num_seqs, max_blocks, num_spans, num_kv_heads, block_size,
            spans, partials, None if addresses is None else ctypes.addressof(addresses), window,
        )  # fmt: skip
        step.kept = rows, addresses, scratch
        self._find_spans(ctypes.addressof(step))
        return step

    def computes(self, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> bool:
        """Whether `call` supports tensors with these shapes of a row."""
        return k == v and q == (k[0] * self._group, self._head_dim) and k[1] == self._head_dim

    def call(self, q: Slice, k: Slice, v: Slice, out: Slice, *, rows: int, layer: int, sinks: Sinks) -> KernelCall:
        """Return a layer's attention as a call in a program.

        rows: the index of the batch's array that is a KernelDecodeRows, which has the window. sinks: the result of in_fp32.
        """
        call = AttendCall(q, k, v, out, rows, layer, _address_of(sinks))
        call.kept = sinks
        return KernelCall(self._attend, call)


class PrefillKernel:
    """Computes attention.cpu.causal_attention for a step's prompt chunks, for a dtype and a head_dim, and stores their k and v.

    Raises:
        UnsupportedError: the dtype is not supported, or the kernel cannot be compiled.
    """

    def __init__(self, dtype: torch.dtype, head_dim: int, *, has_int8_pages: bool = False) -> None:
        definitions = [*_definitions(has_int8_pages, HEAD_DIM=head_dim), *tile_definitions(dtype, head_dim)]
        self._prefill = _library("paged_prefill", dtype, (PrefillCall,), *definitions).prefill
        self._prefill.argtypes, self._prefill.restype = [c_void_p, c_int], None

    def __call__(
        self,
        q: Queries,
        k: Keys,
        v: Keys,
        k_pages: Pages,
        v_pages: Pages,
        chunks: PrefillChunks,
        window: Window = None,
        sinks: Sinks = None,
    ) -> Queries:
        """See PrefillChunks. The integers in `chunks` must be contiguous int64, which is not checked."""
        q, k, v = (with_whole_heads(x) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        _, num_kv_heads, block_size, _ = k_pages.shape
        sinks = None if sinks is None else in_fp32(sinks)
        call = PrefillCall(
            *_heads(q, k, v, out, k_pages, v_pages), *(index.data_ptr() for index in chunks),
            *chunks.block_tables.shape, num_kv_heads, q.shape[1] // num_kv_heads, block_size, window or NO_WINDOW,
            _address_of(sinks),
        )  # fmt: skip
        self._prefill(ctypes.addressof(call), torch.get_num_threads())
        return out


class KernelBackend(CPUBackend):
    """CPUBackend with kernels for one model. has_int8_pages: the cache has the dtype torch.int8.

    Raises:
        UnsupportedError: the dtype is not supported, or a kernel cannot be compiled.
    """

    def __init__(
        self, dtype: torch.dtype, *, num_heads: int, num_kv_heads: int, head_dim: int, has_int8_pages: bool = False
    ) -> None:
        super().__init__()
        self.kernel = DecodeKernel(dtype, head_dim, num_heads // num_kv_heads, has_int8_pages=has_int8_pages)
        self._prefill = PrefillKernel(dtype, head_dim, has_int8_pages=has_int8_pages)
        self._addresses: tuple[KVCache, ctypes.Array[c_void_p]] | None = None  # for the cache that was used last

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return KernelStep(cache, metadata, self)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, rows: DecodeRows, *options: Any) -> Tensor:
        return self.kernel(q, k, v, *cache.layer(layer), rows, *options)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, chunks: PrefillChunks, *options: Any
    ) -> Tensor:
        return self._prefill(q, k, v, *cache.layer(layer), chunks, *options)

    def addresses(self, cache: KVCache) -> "ctypes.Array[c_void_p]":
        """Return the addresses of each layer's keys and values."""
        if self._addresses is None or self._addresses[0] is not cache:
            pages = [pages.data_ptr() for layer in range(cache.num_layers) for pages in cache.layer(layer)]
            self._addresses = cache, (c_void_p * len(pages))(*pages)
        return self._addresses[1]


class KernelStep(CPUStep):
    """The Attend of one step, which may also be a part of a program."""

    backend: KernelBackend

    def as_step(self, window: Window = None) -> tuple[DecodeKernel, KernelDecodeRows] | None:
        """Return the kernel for the attention of layers with this window, and its rows. None unless all sequences decode."""
        if self.num_decodes < len(self.metadata.slot_mapping):
            return None
        kernel, (pages, _) = self.backend.kernel, self.cache.layer(0)
        addresses = self.backend.addresses(self.cache)
        return kernel, kernel.rows(self.decode_rows, self.metadata.seq_lens_cpu, pages, window, addresses)
