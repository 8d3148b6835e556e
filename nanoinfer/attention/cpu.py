"""Paged attention on a CPU. Prefill: matrix products, one sequence at a time. Decode: all sequences at once.

The functions `causal_attention` and `paged_decode` define both. fast/cpu/attention.py computes the same by C++ kernels.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.dense import Queries, Sinks, Window
from nanoinfer.attention.kv_cache import KVCache, Layout
from nanoinfer.system.process import keep_freed_memory

# Limit for the bytes of the gathered pages of paged_decode, so that they are still in the processor's cache when read.
SCRATCH_BYTES = 2 * 2**20
QUERY_BLOCK = 128  # the most queries that prefill computes at a time
SCORES_BYTES = 4 * 2**20  # limit for the scores of a block of queries, which sets the number of heads computed at a time


Blocks = Shaped[Tensor, "num_seqs max_blocks num_kv_heads block_size head_dim"]  # gathered, keys or values


class DecodeRows(NamedTuple):
    """The cache positions of decoding sequences: the slot of the new token, the blocks, the length with the new token."""

    slots: Int[Tensor, " num_seqs"]
    block_tables: Int[Tensor, "num_seqs max_blocks"]
    seq_lens: Int[Tensor, " num_seqs"]

    def within(self, window: int, block_size: int) -> "DecodeRows":
        """Return the same rows without the blocks before each sequence's window, as if the sequences began there."""
        skipped = (self.seq_lens - window).clamp(min=0) // block_size
        columns = skipped.unsqueeze(1) + torch.arange((window + block_size - 2) // block_size + 1)
        tables = self.block_tables.gather(1, columns.clamp(max=self.block_tables.shape[1] - 1))
        return DecodeRows(self.slots, tables, self.seq_lens - skipped * block_size)


class PrefillChunks(NamedTuple):
    """The prompt chunks of a step: their tokens' slots, their first tokens, their blocks, and their sequences' lengths so far.

    `starts` may be counted from any packed token, because only its differences count.
    """

    slots: Int[Tensor, " num_tokens"]
    starts: Int[Tensor, " num_chunks_plus_1"]
    block_tables: Int[Tensor, "num_chunks max_blocks"]
    seq_lens: Int[Tensor, " num_chunks"]


def paged_decode(
    q: Queries, keys: Blocks, values: Blocks, seq_lens: Int[Tensor, " num_seqs"], window: Window = None, sinks: Sinks = None
) -> Queries:
    """Attend with each sequence's only query over all of its tokens, in the blocks of its table. Sums are in fp32.

    It uses elementwise products and sums, because the bits of a matmul's row may depend on the number of rows.

    Masked blocks at the end of a table change no bit. Where the terms that are summed over the blocks have a multiple of 64
    columns (heads times head_dim or slots), torch adds the blocks in order. In other columns it adds every fourth block
    to one of four sums, so `decode` pads the tables to a multiple of 4 blocks.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, max_blocks, num_kv_heads, block_size, _ = keys.shape
    group, dtype = num_heads // num_kv_heads, q.dtype

    q = q.float().view(num_seqs, 1, num_kv_heads, group, 1, head_dim)
    keys = keys.float().unsqueeze(3)  # [num_seqs, max_blocks, num_kv_heads, 1, block_size, head_dim]
    scores = (q * keys).sum(-1) * head_dim**-0.5  # [num_seqs, max_blocks, num_kv_heads, group, block_size]
    positions = torch.arange(max_blocks * block_size).view(1, max_blocks, 1, 1, block_size)
    seq_lens = seq_lens.view(-1, 1, 1, 1, 1)
    scores = scores.masked_fill(positions >= seq_lens, float("-inf"))
    if window is not None:
        scores = scores.masked_fill(positions < seq_lens - window, float("-inf"))

    largest = scores.amax(-1).amax(1)  # [num_seqs, num_kv_heads, group]
    if sinks is not None:
        sinks = sinks.float().view(num_kv_heads, group)
        largest = torch.maximum(largest, sinks)
    weights = (scores - largest[:, None, :, :, None]).exp()
    total = weights.sum(1).sum(-1)
    if sinks is not None:
        total = total + (sinks - largest).exp()
    # [num_seqs, num_kv_heads, group, head_dim]
    out: Tensor = (weights.unsqueeze(-1) * values.float().unsqueeze(3)).sum(-2).sum(1) / total.unsqueeze(-1)
    return out.view(num_seqs, num_heads, head_dim).to(dtype)


def causal_attention(
    q: Float[Tensor, "num_queries num_heads head_dim"],
    k: Float[Tensor, "seq_len num_kv_heads head_dim"],
    v: Float[Tensor, "seq_len num_kv_heads head_dim"],
    window: Window = None,
    sinks: Sinks = None,
) -> Float[Tensor, "num_queries num_heads head_dim"]:
    """Attend with the last num_queries tokens of a sequence over all of its tokens so far. Scores and softmax are in fp32.

    It computes a block of queries at a time, whose scores stay in the processor's cache until they become weights. Keys that
    no query of the block attends to are skipped. In bfloat16, for which torch's fused attention has no kernel
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
        begin = 0 if window is None else max(visible - size - window + 1, 0)
        for first in range(0, num_kv_heads, num_together):
            heads = slice(first, first + num_together)
            block = queries[heads, :, start:stop].flatten(1, 2)  # [heads, group * size, head_dim]
            scores = torch.bmm(block, keys[heads, :, begin:visible]).unflatten(1, (group, size))
            scores[..., visible - size - begin :].masked_fill_(future[:size, :size], float("-inf"))
            if window is not None:
                past = torch.ones(size, visible - begin, dtype=torch.bool).tril(visible - size - begin - window)
                scores.masked_fill_(past, float("-inf"))
            if sinks is not None:
                sink = sinks.float().view(num_kv_heads, group, 1, 1)[heads].expand(-1, -1, size, 1)
                scores = torch.cat((scores, sink), -1)
            weights = scores.softmax(-1)[..., : visible - begin].to(v.dtype).flatten(1, 2)
            mixed = torch.bmm(weights, values[heads, begin:visible]).unflatten(1, (group, size))
            out[start:stop, heads] = mixed.permute(2, 0, 1, 3)
    return out.view(num_queries, num_heads, head_dim)


def num_blocks_before(position: int, window: Window, block_size: int) -> int:
    """Return the number of a sequence's first blocks that neither the query at this position nor any later query reads."""
    return 0 if window is None else max(position - window + 1, 0) // block_size


class CPUBackend:
    """The default backend on a CPU. Without enforce_eager, KernelBackend (fast/cpu/attention.py) replaces it."""

    layout: Layout = "HND"
    default_block_size = 64
    supports_cuda_graph = False
    supports_int8_cache = True
    supports_windows = True
    supports_sinks = True

    def __init__(self, *, enforce_eager: bool = False) -> None:
        """enforce_eager has no effect, because nothing is compiled here."""
        keep_freed_memory()

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        return None if device.type == "cpu" else f"it runs on cpu only, not on {device}"

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return CPUStep(cache, metadata, self)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, rows: DecodeRows, window: Window, sinks: Sinks
    ) -> Tensor:
        """Store k and v, then call paged_decode for groups of sequences whose gathered blocks fit the processor's cache."""
        cache.write(layer, rows.slots, k, v)
        if window is not None:
            rows = rows.within(window, cache.block_size)
        tables, (_, num_heads, head_dim) = rows.block_tables, q.shape
        num_together = max(SCRATCH_BYTES // (tables.shape[1] * 2 * cache.layer(layer)[0][0].nbytes), 1)
        if num_heads * head_dim % 64 or num_heads * cache.block_size % 64:
            tables = F.pad(tables, (0, -tables.shape[1] % 4))
        chunks = [
            paged_decode(q[group], *cache.gather_blocks(layer, tables[group]), rows.seq_lens[group], window, sinks)
            for group in (slice(i, i + num_together) for i in range(0, len(q), num_together))
        ]
        return torch.cat(chunks) if len(chunks) > 1 else chunks[0]

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, chunks: PrefillChunks, window: Window, sinks: Sinks
    ) -> Tensor:
        """Store the k and v of each chunk, then call causal_attention."""
        cache.write(layer, chunks.slots, k, v)
        out = torch.empty_like(q)
        starts = [start - int(chunks.starts[0]) for start in chunks.starts.tolist()]
        for i, seq_len in enumerate(chunks.seq_lens.tolist()):
            queries = slice(starts[i], starts[i + 1])
            skipped = num_blocks_before(seq_len - len(q[queries]), window, cache.block_size)
            blocks = chunks.block_tables[i, skipped : -(-seq_len // cache.block_size)]
            keys, values = cache.gather(layer, blocks, seq_len - skipped * cache.block_size)
            out[queries] = causal_attention(q[queries], keys, values, window, sinks)
        return out


class CPUStep:
    """The Attend of one step: a method of the backend for the decoding sequences, and another for the prompt chunks."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, backend: CPUBackend) -> None:
        self.cache, self.metadata, self.backend = cache, metadata, backend
        self.num_decodes = n = metadata.num_decodes
        slots, tables, lens = metadata.slot_mapping, metadata.block_tables, metadata.seq_lens
        self.decode_rows = DecodeRows(slots[:n], tables[:n], lens[:n])
        self.chunks = PrefillChunks(slots[n:], metadata.query_start_loc[n:], tables[n:], lens[n:])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: Window = None, sinks: Sinks = None) -> Tensor:
        n, options = self.num_decodes, (window, sinks)
        if n == len(q):
            return self.backend.decode(q, k, v, self.cache, layer, self.decode_rows, *options)
        prefilled = self.backend.prefill(q[n:], k[n:], v[n:], self.cache, layer, self.chunks, *options)
        if n == 0:
            return prefilled
        return torch.cat((self.backend.decode(q[:n], k[:n], v[:n], self.cache, layer, self.decode_rows, *options), prefilled))
