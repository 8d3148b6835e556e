"""Attention on a CPU by C++ kernels. It computes the same as attention/cpu.py, which should be read first.

In: the steps of a CPUBackend. Out: the same, from paged_decode.cpp and paged_prefill.cpp. Their bits may differ from those
of the functions in Python, so an engine never mixes the two.

Prefill is bound by arithmetic. The kernel takes a quarter of the time of `causal_attention` in bfloat16 and a third in float32
(1,023 tokens, AVX512-BF16). It reads k and v from the cache, so a chunk after a cached prefix is no special case. Decode is
bound by reading the cache. The kernel reads each page once, and only up to the end of a sequence.
"""

import ctypes
from collections.abc import Iterable
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.cpu import CPUBackend, CPUStep, DecodeRows, PrefillChunks
from nanoinfer.attention.dense import Sinks, Window, with_whole_heads
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.program import KernelCall, Program, Slice, fields, tile_definitions

NO_WINDOW = 2**31 - 1  # longer than any sequence


class AttentionArguments(ctypes.Structure):
    """The sequences of a call, the same for all layers. kept: the tensors to which they point."""

    kept: tuple[object, ...]
    _fields_ = fields(
        (c_void_p, "slots starts block_tables seq_lens"),
        (c_int64, "num_sequences max_blocks num_kv_heads block_size window"),
        (c_void_p, "pages spans partials"),
        (c_int64, "num_spans"),
    )


class AttendCall(ctypes.Structure):
    """The attention of a layer. kept: the tensor to which `sinks` points."""

    kept: object
    _fields_ = fields((Slice, "q k v out"), (c_int64, "rows layer"), (c_void_p, "sinks"))


def in_fp32(sinks: Tensor) -> Tensor:
    """Return the sinks as the kernels read them."""
    return sinks.detach().float().contiguous()


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
        structures, source = (AttentionArguments, AttendCall), Path(__file__).with_name("paged_decode.cpp")
        library = native.load(source, f"GROUP={self._group}", *definitions, structures=structures)
        self._find_spans, self._attend = library.find_spans, library.attend
        sizes = (c_int64.in_dll(library, name).value for name in ("span_tokens", "span_bytes", "partial_bytes"))
        self._span_tokens, self._span_bytes, self._partial_bytes = sizes
        definitions += tile_definitions(dtype, head_dim)
        self._prefill = native.load(source.with_name("paged_prefill.cpp"), *definitions, structures=structures).prefill
        self._addresses: tuple[KVCache, ctypes.Array[c_void_p]] | None = None  # of the cache that was used last

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype, *, has_int8_pages: bool = False) -> "KernelBackend":
        """Make the backend of a model of a family's config."""
        sizes = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
        return cls(dtype, **sizes, head_dim=config.head_dim, has_int8_pages=has_int8_pages)

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return KernelStep(cache, metadata, self)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, rows: DecodeRows, window: Window, sinks: Sinks
    ) -> Tensor:
        return self._compute(self._attend, self.arguments(rows, rows.seq_lens.tolist(), cache, window), q, k, v, layer, sinks)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, chunks: PrefillChunks, window: Window, sinks: Sinks
    ) -> Tensor:
        return self._compute(self._prefill, self._arguments_of(chunks, chunks.starts, cache, window), q, k, v, layer, sinks)

    def _compute(
        self, kernel: Any, arguments: AttentionArguments, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Sinks
    ) -> Tensor:
        """Compute a layer's attention outside of a program."""
        q, k, v = (with_whole_heads(x) for x in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype)
        slices = [Slice(array, 0, x.stride(0)) for array, x in enumerate((q, k, v, out))]
        call = _call(kernel, slices, len(slices), layer, None if sinks is None else in_fp32(sinks))
        Program([call])(len(q), [q, k, v, out, arguments])
        return out

    def arguments(self, rows: DecodeRows, lens: list[int], cache: KVCache, window: Window = None) -> AttentionArguments:
        """Return the rows that all layers of a decode step share. lens: the values of rows.seq_lens."""
        arguments = self._arguments_of(rows, None, cache, window)
        num_spans = sum(-(-min(num, arguments.window) // self._span_tokens) for num in lens)
        partial_bytes = num_spans * arguments.num_kv_heads * self._partial_bytes
        scratch = torch.empty(num_spans * self._span_bytes + partial_bytes + 64, dtype=torch.uint8)
        arguments.partials = partials = -(-scratch.data_ptr() // 64) * 64
        arguments.spans, arguments.num_spans = partials + partial_bytes, num_spans
        arguments.kept += (scratch,)
        self._find_spans(ctypes.byref(arguments))
        return arguments

    def _arguments_of(
        self, rows: DecodeRows | PrefillChunks, starts: Tensor | None, cache: KVCache, window: Window
    ) -> AttentionArguments:
        _, num_kv_heads, block_size, _ = cache.layer(0)[0].shape
        pages = self._addresses_in(cache)
        arguments = AttentionArguments(
            rows.slots.data_ptr(), None if starts is None else starts.data_ptr(), rows.block_tables.data_ptr(),
            rows.seq_lens.data_ptr(), *rows.block_tables.shape, num_kv_heads, block_size, window or NO_WINDOW,
            ctypes.addressof(pages),
        )  # fmt: skip
        arguments.kept = rows, pages
        return arguments

    def computes(self, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> bool:
        """Whether `call` supports tensors with these shapes of a row."""
        return k == v and q == (k[0] * self._group, self._head_dim) and k[1] == self._head_dim

    def call(self, q: Slice, k: Slice, v: Slice, out: Slice, *, rows: int, layer: int, sinks: Sinks) -> KernelCall:
        """Return a layer's attention in decode steps as a call in a program.

        rows: the index of the batch's array that is the result of `arguments`. sinks: the result of in_fp32.
        """
        return _call(self._attend, (q, k, v, out), rows, layer, sinks)

    def _addresses_in(self, cache: KVCache) -> "ctypes.Array[c_void_p]":
        """Return the addresses of each layer's keys and values."""
        if self._addresses is None or self._addresses[0] is not cache:
            pages = [pages.data_ptr() for layer in range(cache.num_layers) for pages in cache.layer(layer)]
            self._addresses = cache, (c_void_p * len(pages))(*pages)
        return self._addresses[1]


def _call(kernel: Any, slices: Iterable[Slice], rows: int, layer: int, sinks: Sinks) -> KernelCall:
    call = AttendCall(*slices, rows, layer, None if sinks is None else sinks.data_ptr())
    call.kept = sinks
    return KernelCall(kernel, call)


class KernelStep(CPUStep):
    """The Attend of one step, which may also be a part of a program."""

    backend: KernelBackend

    def as_step(self, window: Window = None) -> tuple[KernelBackend, AttentionArguments] | None:
        """Return the kernel that can compute the attention of layers with this window, and its rows. None unless all decode."""
        if self.num_decodes < len(self.metadata.slot_mapping):
            return None
        return self.backend, self.backend.arguments(self.decode_rows, self.metadata.seq_lens_cpu, self.cache, window)
