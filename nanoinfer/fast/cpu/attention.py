"""Attention on a CPU by C++ kernels. It computes the same as attention/cpu.py, which should be read first.

In: the steps of a CPUBackend. Out: the same, from paged_decode.cpp and paged_prefill.cpp. Their bits may differ from those
of the functions in Python, so an engine never mixes the two.

Prefill is bound by arithmetic. The kernel takes a quarter of the time of `causal_attention` in bfloat16 and a third in float32
(1,023 tokens, AVX512-BF16). It reads k and v from the cache, so a chunk after a cached prefix is no special case. Decode is
bound by reading the cache. The kernel reads each page once, and only up to the end of a sequence.
"""

import ctypes
from ctypes import c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.cpu import CPUBackend, CPUStep, DecodeRows, PrefillChunks
from nanoinfer.attention.dense import Sinks, Window, with_whole_heads
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.program import KernelCall, Program, Slice, fields, tile_definitions

NO_WINDOW = 2**31 - 1  # longer than any sequence


class DecodeArguments(ctypes.Structure):
    """The rows of a decode step, the same for all layers. kept: the tensors to which they point."""

    kept: tuple[object, ...]
    _fields_ = fields(
        (c_void_p, "slots block_tables seq_lens"),
        (c_int64, "num_rows max_blocks num_spans num_kv_heads block_size"),
        (c_void_p, "spans partials pages"),
        (c_int64, "window"),
    )


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


def in_fp32(sinks: Tensor) -> Tensor:
    """Return the sinks as the kernels read them."""
    return sinks.detach().float().contiguous()


def _address_of(sinks: Sinks) -> int | None:
    return None if sinks is None else sinks.data_ptr()


class KernelBackend(CPUBackend):
    """CPUBackend with kernels for one model. has_int8_pages: its cache has the dtype torch.int8, not the model's.

    The integers in a step's rows and chunks are contiguous, int64, and not checked.

    Raises:
        UnsupportedError: the dtype is not supported, or a kernel cannot be compiled.
    """

    def __init__(
        self, dtype: torch.dtype, *, num_heads: int, num_kv_heads: int, head_dim: int, has_int8_pages: bool = False
    ) -> None:
        super().__init__()
        self._head_dim, self._group = head_dim, num_heads // num_kv_heads
        definitions = [f"HEAD_DIM={head_dim}", *(["INT8_PAGES"] if has_int8_pages else []), *native.definitions_of(dtype)]
        structures, source = (DecodeArguments, AttendCall), Path(__file__).with_name("paged_decode.cpp")
        library = native.load(source, f"GROUP={self._group}", *definitions, structures=structures)
        self._find_spans, self._attend = library.find_spans, library.attend
        sizes = (c_int64.in_dll(library, name).value for name in ("span_tokens", "span_bytes", "partial_bytes"))
        self._span_tokens, self._span_bytes, self._partial_bytes = sizes
        definitions += tile_definitions(dtype, head_dim)
        self._prefill = native.load(source.with_name("paged_prefill.cpp"), *definitions, structures=(PrefillCall,)).prefill
        self._addresses: tuple[KVCache, ctypes.Array[c_void_p]] | None = None  # of the cache that was used last

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return KernelStep(cache, metadata, self)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, rows: DecodeRows, window: Window, sinks: Sinks
    ) -> Tensor:
        q, k, v = (with_whole_heads(x) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        slices = [Slice(array, 0, x.stride(0)) for array, x in enumerate((q, k, v, out))]
        call = self.call(*slices, rows=len(slices), layer=layer, sinks=None if sinks is None else in_fp32(sinks))
        Program([call])(len(q), [q, k, v, out, self.arguments(rows, rows.seq_lens.tolist(), cache, window)])
        return out

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, chunks: PrefillChunks, window: Window, sinks: Sinks
    ) -> Tensor:
        q, k, v = (with_whole_heads(x) for x in (q, k, v))
        out, sinks = torch.empty(q.shape, dtype=q.dtype), None if sinks is None else in_fp32(sinks)
        call = PrefillCall(
            *(x.data_ptr() for x in (q, k, v, out)), q.stride(0), k.stride(0), v.stride(0),
            *(x.data_ptr() for x in (*cache.layer(layer), *chunks)), *chunks.block_tables.shape,
            k.shape[1], q.shape[1] // k.shape[1], cache.block_size, window or NO_WINDOW, _address_of(sinks),
        )  # fmt: skip
        Program([KernelCall(self._prefill, call)])(len(q), [])
        return out

    def arguments(self, rows: DecodeRows, lens: list[int], cache: KVCache, window: Window = None) -> DecodeArguments:
        """Return the rows that all layers of a step share. lens: the values of rows.seq_lens."""
        _, num_kv_heads, block_size, _ = cache.layer(0)[0].shape
        num_seqs, max_blocks = rows.block_tables.shape
        window, addresses = window or NO_WINDOW, self._addresses_in(cache)
        num_spans = sum(-(-min(num, window) // self._span_tokens) for num in lens)
        scratch = torch.empty(num_spans * (self._span_bytes + num_kv_heads * self._partial_bytes) + 64, dtype=torch.uint8)
        partials = -(-scratch.data_ptr() // 64) * 64
        spans = partials + num_spans * num_kv_heads * self._partial_bytes
        step = DecodeArguments(
            *(index.data_ptr() for index in rows), num_seqs, max_blocks, num_spans, num_kv_heads, block_size,
            spans, partials, ctypes.addressof(addresses), window,
        )  # fmt: skip
        step.kept = rows, addresses, scratch
        self._find_spans(ctypes.byref(step))
        return step

    def computes(self, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> bool:
        """Whether `call` supports tensors with these shapes of a row."""
        return k == v and q == (k[0] * self._group, self._head_dim) and k[1] == self._head_dim

    def call(self, q: Slice, k: Slice, v: Slice, out: Slice, *, rows: int, layer: int, sinks: Sinks) -> KernelCall:
        """Return a layer's attention as a call in a program.

        rows: the index of the batch's array that is a DecodeArguments, which has the window. sinks: the result of in_fp32.
        """
        call = AttendCall(q, k, v, out, rows, layer, _address_of(sinks))
        call.kept = sinks
        return KernelCall(self._attend, call)

    def _addresses_in(self, cache: KVCache) -> "ctypes.Array[c_void_p]":
        """Return the addresses of each layer's keys and values."""
        if self._addresses is None or self._addresses[0] is not cache:
            pages = [pages.data_ptr() for layer in range(cache.num_layers) for pages in cache.layer(layer)]
            self._addresses = cache, (c_void_p * len(pages))(*pages)
        return self._addresses[1]


class KernelStep(CPUStep):
    """The Attend of one step, which may also be a part of a program."""

    backend: KernelBackend

    def as_step(self, window: Window = None) -> tuple[KernelBackend, DecodeArguments] | None:
        """Return the kernel that can compute the attention of layers with this window, and its rows. None unless all decode."""
        if self.num_decodes < len(self.metadata.slot_mapping):
            return None
        return self.backend, self.backend.arguments(self.decode_rows, self.metadata.seq_lens_cpu, self.cache, window)
