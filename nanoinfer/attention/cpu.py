"""Paged attention on a CPU. Prefill: matrix products, one sequence at a time. Decode: all sequences at once.

Prefill processes a block of queries at a time. Their scores are then still in the processor's cache when they become weights,
and the keys that no query of the block attends to are skipped. In bfloat16, for which torch's fused attention has no kernel on
a CPU, this takes 0.6 to 0.9 of the fused attention's time from 64 to 4,096 tokens (2 cores, AVX512-BF16). In float32 it takes
0.85 to 1.2 of it. After a cached prefix it needs no mask of all queries by all keys, unlike the fused attention.

Decode is bound by reading the cache. torch.compile fuses the gather, the products and the sums of `paged_decode` into loops
that read each page once and store no gathered copy. Both products run along the contiguous axis of the cache's "HND" blocks:
keys along head_dim, values along the slots. That is 1.3 to 1.6 times as fast as with values laid out like keys. Without
compilation, `paged_decode` runs on groups of sequences so small that their gathered pages stay in the processor's cache.

Compiling does not pay for small models (measured on 2 cores: 64 rows of 2 heads of 32 take 0.3 to 0.5 ms uncompiled and 0.6 ms
compiled, and 64 rows of 12 heads of 64 take twice as long uncompiled). For larger models it takes 20 to 35 s when one is first
loaded on a machine and some seconds at later loads (`warm_up`), and a second when several sequences first run together. torch
keeps the results on disk. `enforce_eager=True` never compiles. The two forms may differ in the last bit, so an engine uses one
of them throughout, unless a new shape fails to compile, which is logged.

The compiler generates different code for one sequence and for several, and for one block and for several. Before the compiled
form is first used on a machine, all four are compiled and compared (`rows_are_independent`). If a sequence's bits depend on the
other sequences or on the padding, the plain form is used instead. The constants below were chosen on one machine (2 cores, AMD
Zen 5). On another machine they can cost speed. They cannot make a row depend on the batch: another request moves none of the
boundaries that they set.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.kv_cache import KVCache, Layout, finite_values
from nanoinfer.devices.inductor import compile_options, failure_reason
from nanoinfer.devices.machine_checks import verdict
from nanoinfer.devices.process import keep_freed_memory
from nanoinfer.errors import UnsupportedError

logger = logging.getLogger(__name__)

# Below this many bytes of k and v per token and layer, the plain form is as fast as the compiled one.
SMALL_MODEL_BYTES = 2048
# Limit for the gathered pages of the plain form, so that they are still in the processor's cache when read.
SCRATCH_BYTES = 2 * 2**20
QUERY_BLOCK = 128  # of prefill
SCORES_BYTES = 4 * 2**20  # limit for the scores of a block of queries: it sets the number of heads computed at a time
MAX_PADDING = 12  # blocks of padding in a group of rows_of_similar_length


def paged_decode(
    q: Float[Tensor, "num_seqs num_heads head_dim"],
    k: Float[Tensor, "num_seqs num_kv_heads head_dim"],
    v: Float[Tensor, "num_seqs num_kv_heads head_dim"],
    k_pages: Float[Tensor, "num_blocks num_kv_heads block_size head_dim"],
    v_pages: Float[Tensor, "num_blocks num_kv_heads head_dim block_size"],
    blocks: Int[Tensor, " num_seqs"],
    offsets: Int[Tensor, " num_seqs"],
    block_tables: Int[Tensor, "num_seqs max_blocks"],
    seq_lens: Int[Tensor, " num_seqs"],
) -> Float[Tensor, "num_seqs num_heads head_dim"]:
    """Store each sequence's new k and v, then attend with its one query over all of its tokens. Sums are in fp32.

    It uses products and sums, because Inductor fuses them with the gather, and cannot fuse a matmul.

    Masked blocks at the end of a table change no bit. Where the terms that are summed over the blocks have a multiple of 64
    columns (heads times head_dim or slots), torch adds one block after another. In other columns it adds every fourth block
    to one of four sums, so the tables must then have a multiple of 4 blocks.

    Args:
        blocks: The block of each new token.
        offsets: The slot of each new token in its block.
        seq_lens: The number of tokens of each sequence, the new one included.
    """
    k_pages[blocks, :, offsets] = k
    v_pages[blocks, :, :, offsets] = v
    num_seqs, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pages.shape
    max_blocks = block_tables.shape[1]
    group = num_heads // num_kv_heads

    q = q.float().view(num_seqs, 1, num_kv_heads, group, 1, head_dim)
    keys = k_pages[block_tables].float().unsqueeze(3)  # [num_seqs, max_blocks, num_kv_heads, 1, block_size, head_dim]
    scores = (q * keys).sum(-1) * head_dim**-0.5  # [num_seqs, max_blocks, num_kv_heads, group, block_size]
    positions = torch.arange(max_blocks * block_size, device=q.device).view(1, max_blocks, 1, 1, block_size)
    scores = scores.masked_fill(positions >= seq_lens.view(-1, 1, 1, 1, 1), float("-inf"))

    largest = scores.amax(-1).amax(1)  # [num_seqs, num_kv_heads, group]
    weights = (scores - largest[:, None, :, :, None]).exp()
    total = weights.sum(1).sum(-1)
    values = v_pages[block_tables].float().unsqueeze(3)  # [num_seqs, max_blocks, num_kv_heads, 1, head_dim, block_size]
    weights = weights.unsqueeze(4)  # [num_seqs, max_blocks, num_kv_heads, group, 1, block_size]
    out = (weights * values).sum(-1).sum(1) / total.unsqueeze(-1)  # [num_seqs, num_kv_heads, group, head_dim]
    return out.view(num_seqs, num_heads, head_dim).to(k_pages.dtype)


def causal_attention(
    q: Float[Tensor, "num_queries num_heads head_dim"],
    k: Float[Tensor, "seq_len num_kv_heads head_dim"],
    v: Float[Tensor, "seq_len num_kv_heads head_dim"],
) -> Float[Tensor, "num_queries num_heads head_dim"]:
    """Attend with the last num_queries tokens of a sequence over all of its tokens so far. Scores and softmax are in fp32.

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
    """The default on a CPU. It compiles the decode attention of models that are large enough."""

    layout: Layout = "HND"
    default_block_size = 64
    supports_cuda_graph = False

    def __init__(self, *, enforce_eager: bool = False) -> None:
        self._may_compile = not enforce_eager
        self._kinds: dict[tuple[bool, bool], Callable[..., Tensor]] = {}  # (is one sequence, is one block) -> compiled form
        keep_freed_memory()

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        return None if device.type == "cpu" else f"it runs on cpu only, not on {device}"

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return _Step(cache, metadata, self.decode)

    @torch.inference_mode()
    def warm_up(self, cache: KVCache, num_heads: int) -> None:
        """Compile what one sequence needs when a model is loaded, so that no text waits for it. cache: not in use yet."""
        k_pages, v_pages = cache.layer(0)
        _, num_kv_heads, _, head_dim = k_pages.shape
        q, k, v = k_pages.new_zeros(1, num_heads + 2 * num_kv_heads, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
        for num_blocks in (1, 2):  # separate tensors: torch.compile compiles again when two arguments are no longer the same
            blocks, offsets, seq_lens = torch.tensor([0]), torch.tensor([0]), torch.tensor([1])
            indices = DecodeIndices(blocks, offsets, torch.zeros(1, num_blocks, dtype=torch.int64), seq_lens)
            self.decode(q, k, v, k_pages, v_pages, indices)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, indices: "DecodeIndices") -> Tensor:
        """paged_decode, compiled or plain, whichever is faster for the model's size."""
        _, num_heads, head_dim = q.shape
        if num_heads * head_dim % 64 or num_heads * k_pages.shape[2] % 64:  # see paged_decode
            tables = indices.block_tables
            indices = indices._replace(block_tables=F.pad(tables, (0, -tables.shape[1] % 4)))
        bytes_per_block = 2 * k_pages[0].nbytes
        if self._may_compile and bytes_per_block // k_pages.shape[2] >= SMALL_MODEL_BYTES:
            try:
                return self._compiled(q, k, v, k_pages, v_pages, indices)
            except Exception as error:  # Inductor raises many classes if a compiler is missing or broken
                self._may_compile = False
                logger.warning("the attention could not be compiled (%s); the plain form is used", failure_reason(error))
        rows = max(SCRATCH_BYTES // (indices.block_tables.shape[1] * bytes_per_block), 1)
        parts = [
            paged_decode(q[part], k[part], v[part], k_pages, v_pages, *(index[part] for index in indices))
            for part in (slice(i, i + rows) for i in range(0, len(q), rows))
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _compiled(self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, indices: "DecodeIndices") -> Tensor:
        """paged_decode, compiled.

        The sizes of heads and blocks are static, which is 2 to 3 times as fast as dynamic ones. The numbers of sequences and
        blocks are dynamic, except that 1 of either has a compiled form of its own.
        """
        if not self._kinds:
            logger.warning(
                "compiling the paged decode attention: 20 to 35 s the first time on a machine, then some seconds; "
                "enforce_eager=True (--enforce-eager) disables it"
            )
            self._check_compiled(q.shape[1], k_pages, v_pages)
        return self._run_specialized(q, k, v, k_pages, v_pages, indices)

    def _run_specialized(
        self, q: Tensor, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, indices: "DecodeIndices"
    ) -> Tensor:
        q, k, v = (x.reshape(-1).view(x.shape) for x in (q, k, v))  # slices of a larger tensor would be recompiled for
        kind = (len(q) == 1, indices.block_tables.shape[1] == 1)
        if kind not in self._kinds:
            self._kinds[kind] = _compile_copy(paged_decode)
            for tensor in (q, k, v, k_pages, v_pages, *indices):
                if len(tensor) > 1:
                    torch._dynamo.mark_dynamic(tensor, 0)
            if indices.block_tables.shape[1] > 1:
                torch._dynamo.mark_dynamic(indices.block_tables, 1)
        return self._kinds[kind](q, k, v, k_pages, v_pages, *indices)

    def _check_compiled(self, num_heads: int, k_pages: Tensor, v_pages: Tensor) -> None:
        """Compare the compiled forms, once per machine.

        Raises:
            UnsupportedError: If a row of the compiled form depends on the others.
        """
        _, num_kv_heads, block_size, head_dim = k_pages.shape
        dtype = str(k_pages.dtype).removeprefix("torch.")
        sizes = f"{num_heads} heads, {num_kv_heads} KV heads of {head_dim}, blocks of {block_size}, {dtype}"

        def measure() -> str:
            return "compiled" if rows_are_independent(self._run_specialized, num_heads, k_pages, v_pages) else "plain"

        if verdict(f"decode attention {sizes}", measure) == "plain":
            raise UnsupportedError("compiled for one sequence it gives different bits than for several")


def _compile_copy(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile of a copy of the function. torch keeps at most 8 compiled forms of a function, and counts copies apart.

    With fullgraph, exceeding the limit is an error. Without it torch would run the function uncompiled, which gives different
    bits.
    """
    copied = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    return torch.compile(copied, dynamic=False, fullgraph=True, options=compile_options())


class DecodeIndices(NamedTuple):
    """The arguments of paged_decode for each sequence: block and slot of its new token, its block table, its length."""

    blocks: Int[Tensor, " num_seqs"]
    offsets: Int[Tensor, " num_seqs"]
    block_tables: Int[Tensor, "num_seqs max_blocks"]
    seq_lens: Int[Tensor, " num_seqs"]


def rows_are_independent(decode: Callable[..., Tensor], num_heads: int, k_pages: Tensor, v_pages: Tensor) -> bool:
    """Whether decode(q, k, v, k_pages, v_pages, indices) gives a sequence the same bits alone, beside others and padded.

    Measured on pages of the same shape and dtype, in which the terms of each sum cancel. The result is then the rounding error
    of the order of addition (devices/row_forms.py says why). The second half of a key is its first half negated, and the two
    halves of a query are equal. Values are negated from one token to another.
    """
    _, num_kv_heads, block_size, head_dim = k_pages.shape
    generator = torch.Generator().manual_seed(0)
    max_blocks = 2
    wanted = (2, block_size, block_size + 2, max_blocks * block_size, 6)
    lens = torch.tensor([max(min(n, max_blocks * block_size) // 2 * 2, 2) for n in wanted])  # even: tokens cancel in pairs
    num_seqs = len(lens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(k_pages.dtype)

    columns = torch.randperm(head_dim, generator=generator)
    half = random(num_seqs, num_heads, head_dim // 2) * 256
    q = torch.cat((half, half, half[..., : head_dim % 2] * 0), dim=-1)[..., columns]
    num_slots = max_blocks * block_size
    half = random(num_seqs, num_slots, num_kv_heads, head_dim // 2)
    keys = torch.cat((half, -half, half[..., : head_dim % 2] * 0), dim=-1)[..., columns]
    values = random(num_seqs, num_slots, num_kv_heads, head_dim)
    for i, seq_len in enumerate(lens.tolist()):
        slots = torch.randperm(seq_len, generator=generator)
        values[i, slots[::2]] = -values[i, slots[1::2]]
    pages = torch.arange(num_seqs * max_blocks).view(num_seqs, max_blocks)
    with torch.inference_mode(False):  # like the cache: inference tensors would be compiled for again
        k_like, v_like = (like.new_zeros(pages.numel(), *like.shape[1:]) for like in (k_pages, v_pages))
    k_like.copy_(keys.view(-1, block_size, num_kv_heads, head_dim).transpose(1, 2))
    v_like.copy_(values.view(-1, block_size, num_kv_heads, head_dim).permute(0, 2, 3, 1))
    last = lens - 1
    k, v = keys[torch.arange(num_seqs), last], values[torch.arange(num_seqs), last]

    def of(rows: slice, num_blocks: int) -> Tensor:
        blocks = pages[rows].gather(1, last[rows, None] // block_size).squeeze(1)
        indices = DecodeIndices(blocks, last[rows] % block_size, pages[rows, :num_blocks].contiguous(), lens[rows])
        return decode(q[rows], k[rows], v[rows], k_like, v_like, indices)

    together = of(slice(num_seqs), max_blocks)
    return all(
        torch.equal(of(slice(i, i + num), num_blocks), together[i : i + num])
        for num in (1, 2)
        for i in range(num_seqs - num + 1)
        for num_blocks in (1, 2)
        if int(last[i : i + num].max()) < num_blocks * block_size
    )


def rows_of_similar_length(num_blocks: list[int]) -> list[list[int]]:
    """Split decoding rows into groups that run together, short rows first. Each is padded to its longest row, which comes last.

    A padded block costs about a tenth of another group. So a group ends before it pads MAX_PADDING blocks. Rows of one sequence
    (drafts, and batch_invariant) stay in order, because a row attends to those before it.

    >>> rows_of_similar_length([9, 2, 1, 8, 2, 1])
    [[2, 5, 1], [4, 3, 0]]
    """
    groups: list[list[int]] = []
    padding = 0
    for row in sorted(range(len(num_blocks)), key=lambda row: (num_blocks[row], row), reverse=True):
        padding += num_blocks[groups[-1][0]] - num_blocks[row] if groups else 0
        if not groups or padding >= MAX_PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(row)
    return [group[::-1] for group in reversed(groups)]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence's prompt chunk in a step."""

    queries: slice  # of the packed tokens
    block_table: Tensor
    seq_len: int
    runs: tuple[tuple[slice, int, slice], ...]  # packed tokens, their block, their slots in it


class _Step:
    """One step's attend. The constructor computes the parts that all layers share."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, decode: Callable[..., Tensor]) -> None:
        self._cache = cache
        self._decode = decode
        self._num_decodes = n = metadata.num_decodes
        num_blocks = [-(-seq_len // cache.block_size) for seq_len in metadata.seq_lens_cpu[:n]]
        self._groups = [self._group(metadata, rows, num_blocks[rows[-1]]) for rows in rows_of_similar_length(num_blocks)]
        self._chunks = [self._chunk(metadata, i) for i in range(n, len(metadata.seq_lens_cpu))]

    def _group(self, metadata: AttentionMetadata, rows: list[int], max_blocks: int) -> tuple[Tensor | slice, DecodeIndices]:
        """The rows of a group, and their indices into the cache."""
        picked = slice(self._num_decodes) if len(rows) == self._num_decodes else torch.tensor(rows)
        slots = metadata.slot_mapping[picked]
        indices = DecodeIndices(
            slots // self._cache.block_size,
            slots % self._cache.block_size,
            metadata.block_tables[picked, :max_blocks].contiguous(),
            metadata.seq_lens[picked],
        )
        return picked, indices

    def _chunk(self, metadata: AttentionMetadata, i: int) -> _Chunk:
        start, end = metadata.query_start_loc_cpu[i : i + 2]
        num_queries, seq_len, block_size = end - start, metadata.seq_lens_cpu[i], self._cache.block_size
        runs, slots = [], metadata.slot_mapping[start:end].tolist()
        first = 0
        while first < num_queries:  # slots of one block are contiguous
            block, offset = divmod(slots[first], block_size)
            length = min(block_size - offset, num_queries - first)
            runs.append((slice(start + first, start + first + length), block, slice(offset, offset + length)))
            first += length
        block_table = metadata.block_tables[i, : -(-seq_len // block_size)]
        return _Chunk(slice(start, end), block_table, seq_len, tuple(runs))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_pages, v_pages = self._cache.layer(layer)
        k, v = finite_values(k, v)
        if len(self._groups) == 1 and self._num_decodes == len(q):
            return self._decode(q, k, v, k_pages, v_pages, self._groups[0][1])
        out = torch.empty_like(q)
        for rows, indices in self._groups:
            out[rows] = self._decode(q[rows], k[rows], v[rows], k_pages, v_pages, indices)
        for chunk in self._chunks:
            for tokens, block, slots in chunk.runs:
                k_pages[block, :, slots] = k[tokens].transpose(0, 1)
                v_pages[block, :, :, slots] = v[tokens].permute(1, 2, 0)
            keys, values = k[chunk.queries], v[chunk.queries]
            if len(keys) < chunk.seq_len:
                keys, values = self._cache.gather(layer, chunk.block_table, chunk.seq_len)
            out[chunk.queries] = causal_attention(q[chunk.queries], keys, values)
        return out
