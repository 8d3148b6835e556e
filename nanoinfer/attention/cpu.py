"""Paged attention on a CPU. Prefill: matrix products, one sequence at a time. Decode: all sequences at once.

Each has a definition in Python, `causal_attention` and `paged_decode`, and a C++ kernel that computes the same: cpu_prefill.cpp
and cpu_decode.cpp, called by cpu_kernel.py. The kernels are compiled in two seconds when a model is first loaded on a machine,
and kept on disk. Where that fails, where the dtype is float16, or with enforce_eager=True, the definitions serve. The two forms
may differ in the last bits, so an engine uses one of them throughout.

Prefill is bound by arithmetic. The kernel takes a quarter of the definition's time in bfloat16 and a third in float32 (1,023
tokens, AVX512-BF16). It reads k and v from the cache, so a chunk after a cached prefix is no special case.

Decode is bound by reading the cache. The kernel reads each page once and only up to the end of a sequence. `paged_decode` runs
on groups of sequences so small that their gathered pages stay in the processor's cache.
"""

import logging
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.cpu_kernel import DecodeKernel, KernelRows, PrefillKernel
from nanoinfer.attention.kv_cache import KVCache, Layout, finite_values
from nanoinfer.devices.process import keep_freed_memory
from nanoinfer.errors import UnsupportedError

logger = logging.getLogger(__name__)

# Limit for the gathered pages of paged_decode, so that they are still in the processor's cache when read.
SCRATCH_BYTES = 2 * 2**20
QUERY_BLOCK = 128  # of prefill
SCORES_BYTES = 4 * 2**20  # limit for the scores of a block of queries: it sets the number of heads computed at a time


class DecodeRows(NamedTuple):
    """Where each decoding sequence is in the cache: the slot of its new token, its blocks, its length, new token included."""

    slots: Int[Tensor, " num_seqs"]
    block_tables: Int[Tensor, "num_seqs max_blocks"]
    seq_lens: Int[Tensor, " num_seqs"]


class PrefillChunks(NamedTuple):
    """A step's prompt chunks: slots of their tokens, the first token of each, blocks, and tokens so far, the chunk's included.

    starts is counted from any token.
    """

    slots: Int[Tensor, " num_tokens"]
    starts: Int[Tensor, " num_chunks_plus_1"]
    block_tables: Int[Tensor, "num_chunks max_blocks"]
    seq_lens: Int[Tensor, " num_chunks"]


def paged_decode(
    q: Float[Tensor, "num_seqs num_heads head_dim"],
    k: Float[Tensor, "num_seqs num_kv_heads head_dim"],
    v: Float[Tensor, "num_seqs num_kv_heads head_dim"],
    k_pages: Float[Tensor, "num_blocks num_kv_heads block_size head_dim"],
    v_pages: Float[Tensor, "num_blocks num_kv_heads block_size head_dim"],
    rows: DecodeRows,
) -> Float[Tensor, "num_seqs num_heads head_dim"]:
    """Store each sequence's new k and v, then attend with its one query over all of its tokens. Sums are in fp32.

    It uses products and sums. The bits of a matmul's row may depend on the number of rows.

    Masked blocks at the end of a table change no bit. Where the terms that are summed over the blocks have a multiple of 64
    columns (heads times head_dim or slots), torch adds one block after another. In other columns it adds every fourth block
    to one of four sums, so the tables are padded to a multiple of 4 blocks.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pages.shape
    k_pages[rows.slots // block_size, :, rows.slots % block_size] = k
    v_pages[rows.slots // block_size, :, rows.slots % block_size] = v
    tables = rows.block_tables
    if num_heads * head_dim % 64 or num_heads * block_size % 64:
        tables = F.pad(tables, (0, -tables.shape[1] % 4))
    max_blocks = tables.shape[1]
    group = num_heads // num_kv_heads

    q = q.float().view(num_seqs, 1, num_kv_heads, group, 1, head_dim)
    keys = k_pages[tables].float().unsqueeze(3)  # [num_seqs, max_blocks, num_kv_heads, 1, block_size, head_dim]
    scores = (q * keys).sum(-1) * head_dim**-0.5  # [num_seqs, max_blocks, num_kv_heads, group, block_size]
    positions = torch.arange(max_blocks * block_size).view(1, max_blocks, 1, 1, block_size)
    scores = scores.masked_fill(positions >= rows.seq_lens.view(-1, 1, 1, 1, 1), float("-inf"))

    largest = scores.amax(-1).amax(1)  # [num_seqs, num_kv_heads, group]
    weights = (scores - largest[:, None, :, :, None]).exp()
    total = weights.sum(1).sum(-1)
    values = v_pages[tables].float().unsqueeze(3)  # [num_seqs, max_blocks, num_kv_heads, 1, block_size, head_dim]
    out = (weights.unsqueeze(-1) * values).sum(-2).sum(1) / total.unsqueeze(-1)  # [num_seqs, num_kv_heads, group, head_dim]
    return out.view(num_seqs, num_heads, head_dim).to(k_pages.dtype)


def causal_attention(
    q: Float[Tensor, "num_queries num_heads head_dim"],
    k: Float[Tensor, "seq_len num_kv_heads head_dim"],
    v: Float[Tensor, "seq_len num_kv_heads head_dim"],
) -> Float[Tensor, "num_queries num_heads head_dim"]:
    """Attend with the last num_queries tokens of a sequence over all of its tokens so far. Scores and softmax are in fp32.

    It processes a block of queries at a time. Their scores are then still in the processor's cache when they become weights,
    and the keys that no query of the block attends to are skipped. In bfloat16, for which torch's fused attention has no kernel
    on a CPU, this takes 0.6 to 0.9 of the fused attention's time from 64 to 4,096 tokens, in float32 0.85 to 1.2.

    The queries that share a KV head are rows of one matrix, so keys are never repeated.
    """
    num_queries, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    width = min(QUERY_BLOCK, num_queries)
    num_together = max(SCORES_BYTES // (4 * group * width * seq_len), 1)

    queries = (q.float() * head_dim**-0.5).view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = k.float().permute(1, 2, 0)  # [num_kv_heads, head_dim, seq_len]
    values = v.transpose(0, 1)  # [num_kv_heads, seq_len, head_dim]
    future = torch.ones(width, width, dtype=torch.bool).triu(1)  # masks the keys of the block itself
    out = torch.empty(num_queries, num_kv_heads, group, head_dim, dtype=q.dtype)
    for start in range(0, num_queries, width):
        stop = min(start + width, num_queries)
        size, visible = stop - start, seq_len - num_queries + stop
        for first in range(0, num_kv_heads, num_together):
            heads = slice(first, first + num_together)
            block = queries[heads, :, start:stop].flatten(1, 2)  # [heads, group * size, head_dim]
            scores = torch.bmm(block, keys[heads, :, :visible]).unflatten(1, (group, size))
            scores[..., visible - size :].masked_fill_(future[:size, :size], float("-inf"))
            weights = scores.softmax(-1).to(v.dtype).flatten(1, 2)
            mixed = torch.bmm(weights, values[heads, :visible]).unflatten(1, (group, size))
            out[start:stop, heads] = mixed.permute(2, 0, 1, 3)
    return out.view(num_queries, num_heads, head_dim)


class CPUBackend:
    """The default on a CPU. An instance serves one model.

    Attributes:
        form: what computes the attention, in words. "" before the first step.
    """

    layout: Layout = "HND"
    default_block_size = 64
    supports_cuda_graph = False

    def __init__(self, *, enforce_eager: bool = False) -> None:
        self._may_compile = not enforce_eager
        self._kernels: tuple[DecodeKernel, PrefillKernel] | None = None
        self.form = ""
        keep_freed_memory()

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        return None if device.type == "cpu" else f"it runs on cpu only, not on {device}"

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return CPUStep(cache, metadata, self)

    def warm_up(self, cache: KVCache, num_heads: int) -> None:
        """Choose the form of the attention, when a model is loaded. Compiles the kernels if they have to be."""
        pages, _ = cache.layer(0)
        _, num_kv_heads, _, head_dim = pages.shape
        self.form = "Python, because enforce_eager=True"
        if self._may_compile:
            try:
                decode = DecodeKernel(pages.dtype, head_dim, num_heads // num_kv_heads)
                self._kernels = decode, PrefillKernel(pages.dtype, head_dim)
                self.form = "C++"
            except UnsupportedError as error:
                self.form = f"Python, because {error}"
                logger.warning("attention without its C++ kernels, which are faster: %s", error)

    @property
    def decode_kernel(self) -> DecodeKernel | None:
        """The kernel that computes `decode`. None if it is a function in Python, or of a subclass."""
        return None if self._kernels is None or type(self) is not CPUBackend else self._kernels[0]

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, rows: DecodeRows) -> Tensor:
        """paged_decode, by the kernel or by the function itself."""
        k_pages, v_pages = cache.layer(layer)
        if self._kernels is not None:
            return self._kernels[0](q, k, v, k_pages, v_pages, *rows)
        k, v = finite_values(k, v)
        num_together = max(SCRATCH_BYTES // (rows.block_tables.shape[1] * 2 * k_pages[0].nbytes), 1)
        parts = [
            paged_decode(q[part], k[part], v[part], k_pages, v_pages, DecodeRows(*(index[part] for index in rows)))
            for part in (slice(i, i + num_together) for i in range(0, len(q), num_together))
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, chunks: PrefillChunks) -> Tensor:
        """causal_attention for each chunk, by the kernel or by the function itself. k and v are stored first."""
        k_pages, v_pages = cache.layer(layer)
        if self._kernels is not None:
            return self._kernels[1](q, k, v, k_pages, v_pages, *chunks)
        cache.write(layer, chunks.slots, k, v)
        out = torch.empty_like(q)
        starts = [start - int(chunks.starts[0]) for start in chunks.starts.tolist()]
        for i, seq_len in enumerate(chunks.seq_lens.tolist()):
            queries = slice(starts[i], starts[i + 1])
            blocks = chunks.block_tables[i, : -(-seq_len // cache.block_size)]
            out[queries] = causal_attention(q[queries], *cache.gather(layer, blocks, seq_len))
        return out


class CPUStep:
    """One step's attend: the decoding sequences and the prompt chunks, each by a function of the backend."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, backend: CPUBackend) -> None:
        self._cache, self._backend = cache, backend
        self._num_decodes = n = metadata.num_decodes
        slots, tables, lens = metadata.slot_mapping, metadata.block_tables, metadata.seq_lens
        self._rows = DecodeRows(slots[:n], tables[:n], lens[:n])
        self._chunks = PrefillChunks(slots[n:], metadata.query_start_loc[n:], tables[n:], lens[n:])
        self._metadata = metadata

    @property
    def decode_kernel(self) -> DecodeKernel | None:
        """The kernel of a step in which every sequence decodes. It may compute all layers in one call: see decode_rows."""
        is_decode = self._num_decodes == len(self._metadata.slot_mapping)
        return self._backend.decode_kernel if is_decode else None

    def decode_rows(self, kernel: DecodeKernel) -> KernelRows:
        _, num_kv_heads, block_size, _ = self._cache.layer(0)[0].shape
        return kernel.rows(*self._rows, self._metadata.seq_lens_cpu, (num_kv_heads, block_size), self._cache.addresses)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = self._num_decodes
        if not self._backend.form:
            self._backend.warm_up(self._cache, q.shape[1])
        if n == len(q):
            return self._backend.decode(q, k, v, self._cache, layer, self._rows)
        prefilled = self._backend.prefill(q[n:], k[n:], v[n:], self._cache, layer, self._chunks)
        if n == 0:
            return prefilled
        return torch.cat((self._backend.decode(q[:n], k[:n], v[:n], self._cache, layer, self._rows), prefilled))
