"""Paged attention on a CPU: prefill by torch's fused attention, one sequence at a time; decode for all sequences at once.

The cache's blocks are "HND", so that one head's keys of one block are a plain matrix. Decode is bound by reading the cache:
`paged_decode` is written so that torch.compile fuses the gather, the products and the sums into loops that read each page
once and store no gathered copy. Until it is compiled it runs as it stands, on as many sequences at a time as keep the gathered
pages small.

Small models are not worth compiling for (measured on 2 cores: 64 rows of 2 heads of 32 take 0.3-0.5 ms as they stand and 0.6 ms
compiled; 64 rows of 12 heads of 64 take twice as long as they stand). For the others it takes seconds at the first token; torch
keeps the result on disk for later runs. `enforce_eager=True` never compiles. The two forms may differ in the last bit, so an
engine uses one of them from beginning to end (unless a new shape fails to compile, which is told).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.kv_cache import KVCache, Layout

logger = logging.getLogger(__name__)

# Below this many bytes of k and v per token and layer, the plain form is as fast as the compiled one.
SMALL_MODEL_BYTES = 2048
# Gathered pages of the plain form stay within this many bytes, so that they are still in the processor's cache when read.
SCRATCH_BYTES = 2 * 2**20


def paged_decode(
    q: Float[Tensor, "num_seqs num_heads head_dim"],
    k_pages: Float[Tensor, "num_blocks num_kv_heads block_size head_dim"],
    v_pages: Float[Tensor, "num_blocks num_kv_heads block_size head_dim"],
    block_tables: Int[Tensor, "num_seqs max_blocks"],
    seq_lens: Int[Tensor, "num_seqs"],
) -> Float[Tensor, "num_seqs num_heads head_dim"]:
    """One new query per sequence over all of its tokens, by way of its block table; sums in fp32.

    Products and sums rather than matmul, because Inductor fuses those with the gather and cannot fuse a matmul.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pages.shape
    max_blocks = block_tables.shape[1]
    group = num_heads // num_kv_heads

    q = q.float().view(num_seqs, 1, num_kv_heads, group, 1, head_dim)
    k = k_pages[block_tables].float().unsqueeze(3)  # [num_seqs, max_blocks, num_kv_heads, 1, block_size, head_dim]
    v = v_pages[block_tables].float().unsqueeze(3)
    scores = (q * k).sum(-1) * head_dim**-0.5  # [num_seqs, max_blocks, num_kv_heads, group, block_size]
    positions = torch.arange(max_blocks * block_size, device=q.device).view(1, max_blocks, 1, 1, block_size)
    scores = scores.masked_fill(positions >= seq_lens.view(-1, 1, 1, 1, 1), float("-inf"))

    by_head = scores.permute(0, 2, 3, 1, 4)  # [num_seqs, num_kv_heads, group, max_blocks, block_size]
    weights = by_head.flatten(3).softmax(-1).view(by_head.shape).permute(0, 3, 1, 2, 4)
    out = (weights.unsqueeze(-1) * v).sum((1, 4))  # [num_seqs, num_kv_heads, group, head_dim]
    return out.view(num_seqs, num_heads, head_dim).to(k_pages.dtype)


class CPUBackend:
    layout: Layout = "HND"
    default_block_size = 64

    def __init__(self, *, enforce_eager: bool = False) -> None:
        self._may_compile = not enforce_eager
        self._decode: Callable[..., Tensor] | None = None  # the compiled form, once there is one
        _keep_freed_memory()

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return _Step(cache, metadata, self.decode)

    def decode(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
        """paged_decode, in the form that pays."""
        bytes_per_block = 2 * k_pages[0].nbytes
        if self._may_compile or self._decode is not None:
            if block_tables.shape[1] == 1:  # a size of 1 would be compiled for by itself; a masked second block costs less
                block_tables = F.pad(block_tables, (0, 1))
            if self._may_compile and bytes_per_block // k_pages.shape[2] >= SMALL_MODEL_BYTES:
                self._compile(q, k_pages, v_pages, block_tables, seq_lens)
        if self._decode is not None:
            try:
                return self._decode(q, k_pages, v_pages, block_tables, seq_lens)
            except Exception as error:  # a shape that needs compiling again, and it failed
                self._give_up(error)
        rows = max(SCRATCH_BYTES // (block_tables.shape[1] * bytes_per_block), 1)
        parts = [
            paged_decode(q[i : i + rows], k_pages, v_pages, block_tables[i : i + rows], seq_lens[i : i + rows])
            for i in range(0, len(q), rows)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _compile(self, *example: Any) -> None:
        """Compile, and try it on the arguments at hand; without a compiler the plain form stays.

        Shapes are dynamic, but one sequence is compiled for apart from several.
        """
        self._may_compile = False
        logger.warning("compiling the paged decode attention; this takes some seconds, enforce_eager=True leaves it out")
        compiled = torch.compile(paged_decode, dynamic=True)
        try:
            compiled(*example)
        except Exception as error:  # whatever a missing or broken compiler makes Inductor raise
            self._give_up(error)
        else:
            self._decode = compiled

    def _give_up(self, error: Exception) -> None:
        self._decode = None
        logger.warning("the attention could not be compiled (%s); the plain form is used", str(error).split("\n")[0])


def _keep_freed_memory() -> None:
    """Make glibc keep freed megabytes for the next step, instead of giving them back and faulting them in again.

    Freeing one large block raises its limits for blocks like it (`man mallopt`, M_MMAP_THRESHOLD: at most 32 MiB); where there
    is another allocator nothing happens. A decode step of 64 rows of tiny-gpt2 took 7.8 ms without this and 3.6 ms with it.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The part of a step that is one sequence's prompt chunk."""

    queries: slice  # of the packed tokens
    block_table: Tensor | None  # None: the chunk starts its sequence, so all keys are at hand
    seq_len: int
    visible: Tensor | None  # [num_queries, seq_len], None: plainly causal


class _Step:
    """One step's attend: what the layers share is worked out in the constructor."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, decode: Callable[..., Tensor]) -> None:
        self._cache = cache
        self._slot_mapping = metadata.slot_mapping
        self._decode = decode
        self._num_decodes = n = metadata.num_decodes
        max_blocks = -(-max(metadata.seq_lens_cpu[:n], default=0) // cache.block_size)
        self._block_tables = metadata.block_tables[:n, :max_blocks].contiguous()
        self._seq_lens = metadata.seq_lens[:n]
        self._chunks = [self._chunk(metadata, i) for i in range(n, len(metadata.seq_lens_cpu))]

    def _chunk(self, metadata: AttentionMetadata, i: int) -> _Chunk:
        queries = slice(metadata.query_start_loc_cpu[i], metadata.query_start_loc_cpu[i + 1])
        num_queries, seq_len = queries.stop - queries.start, metadata.seq_lens_cpu[i]
        if num_queries == seq_len:
            return _Chunk(queries, None, seq_len, None)
        num_blocks = -(-seq_len // self._cache.block_size)
        visible = torch.ones(num_queries, seq_len, dtype=torch.bool).tril(seq_len - num_queries)
        return _Chunk(queries, metadata.block_tables[i, :num_blocks], seq_len, visible)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.write(layer, self._slot_mapping, k, v)
        n = self._num_decodes
        out = torch.empty_like(q)
        if n:
            out[:n] = self._decode(q[:n], *self._cache.layer(layer), self._block_tables, self._seq_lens)
        for chunk in self._chunks:
            if chunk.block_table is None:
                keys, values = k[chunk.queries], v[chunk.queries]
            else:
                keys, values = self._cache.gather(layer, chunk.block_table, chunk.seq_len)
            # scaled_dot_product_attention wants [batch, heads, tokens, head_dim]; without the batch axis it is 3 times slower
            mixed = F.scaled_dot_product_attention(
                q[chunk.queries].transpose(0, 1).unsqueeze(0),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                attn_mask=chunk.visible,
                is_causal=chunk.visible is None,
                enable_gqa=True,
            )
            out[chunk.queries] = mixed.squeeze(0).transpose(0, 1)
        return out
