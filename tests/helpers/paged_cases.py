"""Sequences scattered over a paged cache, for every backend: attend, and compare with the definition in float64."""

import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.base import AttentionMetadata, select_backend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.features.hybrid.attention import HybridReferenceBackend
from nanoinfer.features.int8_cache.cache import Int8Cache, SplitInt8Cache, numbers_of, quantized_heads
from nanoinfer.features.int8_cache.sizes import SCALE_BYTES


def in_float64(q, k, v, window=None, sinks=None):
    """Causal attention, the queries being the last tokens of the sequence. [tokens, heads, head_dim]

    A sink is written as in gpt-oss's own code: one more column of the scores, whose weight is dropped.
    """
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    if window is not None:
        distance = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
        future |= distance >= window
    scores = scores.masked_fill(future, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1)[..., : len(k)], v)


def metadata_for(lengths, block_size, num_blocks, generator, device="cpu"):
    """lengths: (tokens in the cache before, new tokens) of each sequence, single-token ones first. Blocks are scattered."""
    scattered = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = [[next(scattered) for _ in range(-(-(old + new) // block_size))] for old, new in lengths]
    width = max(map(len, tables))
    slots = [
        table[i // block_size] * block_size + i % block_size
        for table, (old, new) in zip(tables, lengths, strict=True)
        for i in range(old, old + new)
    ]
    starts = [sum(new for _, new in lengths[:i]) for i in range(len(lengths) + 1)]
    seq_lens = [old + new for old, new in lengths]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, device=device),
        seq_lens=torch.tensor(seq_lens, device=device),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], device=device),
        slot_mapping=torch.tensor(slots, device=device),
        max_query_len=max(new for _, new in lengths),
        max_seq_len=max(seq_lens),
        num_decodes=sum(new == 1 for _, new in lengths),
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
    )


def replaced(metadata, **changes):
    return AttentionMetadata(**{name: changes.get(name, getattr(metadata, name)) for name in AttentionMetadata.__slots__})


FAULTS = {  # each takes metadata, and gives it back with something wrong
    "swapped blocks": lambda m: replaced(m, block_tables=m.block_tables.flip(1)),
    "a length off by one": lambda m: replaced(m, seq_lens=m.seq_lens - 1, seq_lens_cpu=[n - 1 for n in m.seq_lens_cpu]),
    "swapped slots": lambda m: replaced(m, slot_mapping=m.slot_mapping.roll(1)),
}


def cache_of(layout, dtype, in_int8, *, head_dim, **options):
    """A cache as the engine makes it for the layout of a backend."""
    if not in_int8:
        return KVCache(layout=layout, dtype=dtype, head_dim=head_dim, **options)
    cache_class = SplitInt8Cache if layout == "NHD" else Int8Cache
    return cache_class(layout=layout, dtype=torch.int8, head_dim=head_dim + SCALE_BYTES, **options)


def as_stored(x, in_int8):
    return numbers_of(quantized_heads(x)) if in_int8 else x


def compare(
    backend, lengths, *, block_size, num_kv_heads, group, head_dim, dtype=torch.float32, spoil=None, device="cpu", packed=False,
    poisoned=None, in_int8=False, window=None, has_sinks=False, tolerance=None,
):  # fmt: skip
    """The largest difference from attention in float64. backend: a name, or KernelBackend.

    tolerance: from what in_float64 takes, the difference of each element that counts as 1. None: 1.

    window, has_sinks: of the layer. Blocks before the window are -1, as if they had been freed.
    in_int8: the cache has 8 bits, and the definition is given the keys and values as they are rounded.

    `spoil(metadata)` may inject a fault. packed: q, k and v are views of one tensor, as a fused projection gives them.
    poisoned: (sequence, new token) whose value in the first KV head is NaN. The queries from it on must be NaN, no others.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = sorted(lengths, key=lambda pair: pair[1] > 1)
    num_blocks = sum(-(-(old + new) // block_size) for old, new in lengths) + 2
    metadata = metadata_for(lengths, block_size, num_blocks, generator, device)
    if isinstance(backend, str):
        _, backend = select_backend(backend, torch.device(device), dtype, head_dim, block_size=block_size)
    elif isinstance(backend, type):
        heads = {"num_heads": num_kv_heads * group, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        backend = backend(dtype, **heads, has_int8_pages=in_int8)
    if isinstance(backend, ReferenceBackend) and (has_sinks or window is not None):
        backend = HybridReferenceBackend()
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    cache = cache_of(backend.layout, dtype, in_int8, num_layers=2, device=device, **sizes)
    for pages, rest in zip(cache.layer(1), (127, 70) if in_int8 else (float("nan"), 1e4), strict=True):
        pages.fill_(rest)  # what a failed request may leave in slots that are nobody's now
    for scales, rest in zip(cache.scales(1), (float("nan"), 1e4), strict=True):
        if scales is not None:
            scales.fill_(rest)
    options = {} if window is None else {"window": window}
    if has_sinks:
        options["sinks"] = torch.randn(num_kv_heads * group, 2, generator=generator).to(device, dtype)[:, 0]
    keys, values, queries, expected, tolerances = [], [], [], [], []
    for i, (old, new) in enumerate(lengths):
        k, v = torch.randn(2, old + new, num_kv_heads, head_dim, generator=generator).to(device, dtype)
        q = torch.randn(new, num_kv_heads * group, head_dim, generator=generator).to(device, dtype)
        table = metadata.block_tables[i].tolist()
        old_slots = [table[j // block_size] * block_size + j % block_size for j in range(old)]
        cache.write(1, torch.tensor(old_slots, dtype=torch.int64, device=device), k[:old], v[:old])
        stored = [as_stored(x, in_int8) for x in (k, v)]
        expected.append(in_float64(q, *stored, **options))
        tolerances.append(tolerance(q, *stored, **options) if tolerance else torch.ones(()).expand(q.shape).to(device))
        if window is not None:
            metadata.block_tables[i, : max(old - window + 1, 0) // block_size] = -1
        if poisoned and poisoned[0] == i:
            v[old + poisoned[1], 0, -1] = float("nan")
            expected[-1][poisoned[1] :, :group] = float("nan")
        keys.append(k[old:])
        values.append(v[old:])
        queries.append(q)
    q, k, v = torch.cat(queries), torch.cat(keys), torch.cat(values)
    if packed:
        q, k, v = torch.cat((q, k, v), dim=1).split([num_kv_heads * group, num_kv_heads, num_kv_heads], dim=1)
    attend = backend.begin_step(cache, spoil(metadata) if spoil else metadata)
    out = attend(1, q, k, v, **options)
    assert out.dtype is dtype
    assert out.shape == q.shape
    assert not any(pages.count_nonzero() for pages in cache.layer(0))  # nobody's business
    difference = torch.where(out.isnan() & torch.cat(expected).isnan(), 0.0, (out.double() - torch.cat(expected)).abs())
    return (difference / torch.cat(tolerances)).nan_to_num(nan=float("inf")).max().item()


def compare_drafts(
    backend, sequences, *, num_kv_heads=2, group=2, head_dim=64, dtype=torch.float32, window=None, has_sinks=False,
    tolerance=None, are_alone=False, in_int8=False, device="cpu",
):  # fmt: skip
    """As compare, for a step of decodes: the tokens in the cache and the decodes of each sequence, of which most are drafts.

    It is infinite if a decode's keys and values are not in their slots.

    are_alone: whether the backend does not know which decodes are of one sequence.
    """
    generator, num_blocks = torch.Generator().manual_seed(0), sum(-(-(old + new) // 16) for old, new in sequences)
    chunks = metadata_for(sequences, 16, num_blocks, generator, device)
    numbers = [new for _, new in sequences]
    firsts = [first for first, new in zip(chunks.query_start_loc_cpu, numbers, strict=False) for _ in range(new)]
    lengths = [old + i + 1 for old, new in sequences for i in range(new)]
    sizes = {"num_blocks": num_blocks, "block_size": 16, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    cache = cache_of(backend.layout, dtype, in_int8, num_layers=1, device=device, **sizes)
    options = {} if window is None else {"window": window}
    if has_sinks:
        options["sinks"] = torch.randn(num_kv_heads * group, generator=generator).to(device, dtype)
    given, tolerances = [], []
    for (old, new), table in zip(sequences, chunks.block_tables.tolist(), strict=True):
        k, v = torch.randn(2, old + new, num_kv_heads, head_dim, generator=generator).to(device, dtype)
        q = torch.randn(new, num_kv_heads * group, head_dim, generator=generator).to(device, dtype)
        slots = torch.tensor([table[i // 16] * 16 + i % 16 for i in range(old)], dtype=torch.int64, device=device)
        cache.write(0, slots, k[:old], v[:old])
        stored = [as_stored(x, in_int8) for x in (k, v)]
        given.append((q, k[old:], v[old:], in_float64(q, *stored, **options)))
        tolerances.append(tolerance(q, *stored, **options) if tolerance else torch.ones(()).expand(q.shape).to(device))
    rows = replaced(
        chunks, query_start_loc=torch.arange(len(lengths) + 1, device=device),
        seq_lens=torch.tensor(lengths, device=device),
        block_tables=chunks.block_tables.repeat_interleave(torch.tensor(numbers, device=device), dim=0), max_query_len=1,
        num_decodes=len(lengths), query_start_loc_cpu=list(range(len(lengths) + 1)), seq_lens_cpu=lengths,
        first_decodes=None if are_alone else torch.tensor(firsts, device=device),
        max_num_decodes=1 if are_alone else max(numbers),
    )  # fmt: skip
    q, k, v, expected = (torch.cat(parts) for parts in zip(*given, strict=True))
    out = backend.begin_step(cache, rows)(0, q, k, v, **options)
    slots, found = rows.slot_mapping, cache.gather(0, torch.arange(num_blocks, device=device), 16 * num_blocks)
    are_stored = all(torch.equal(one[slots], as_stored(new, in_int8)) for one, new in zip(found, (k, v), strict=True))
    difference = (out.double() - expected).abs() / torch.cat(tolerances)
    return difference.nan_to_num(nan=float("inf")).max().item() if are_stored else float("inf")


def check_poison_free_reuse(path, backend, **settings):
    """A request whose hidden values are not finite ends with "error". Those beside it and after it are not touched.

    All prompts begin with the same two blocks. The poisoned one is in flight, its blocks in the prefix cache, when another
    starts from them, and two more are given its freed blocks.

    path: of a model whose LM head is not tied, so that a NaN in the embedding reaches only the requests that have its id.
    """
    bad_id, shared = 90, list(range(1, 9))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    settings |= {"attention_backend": backend, "block_size": 4, "chunk_size": 12, "max_num_batched_tokens": 12}
    prompts = [[*shared, 11], [*shared, 12, 13, 14], [7] * 15]
    clean = LLM(path, enable_prefix_caching=False, **settings)
    expected = [output.outputs[0].token_ids for output in clean.generate(prompts, params, use_tqdm=False)]

    block_bytes = clean.info.num_cache_bytes // clean.info.num_blocks
    llm = LLM(path, kv_cache_memory=14 * block_bytes, max_model_len=32, **settings)
    embedding = next(weight for weight in llm.engine.executor.runner.model.parameters() if len(weight) > bad_id)
    embedding.data[bad_id] = float("nan")
    poisoned = llm.engine.add_request([*shared, bad_id, *range(20, 33)], params)  # two chunks
    llm.engine.step()
    beside = llm.engine.add_request(prompts[0], params)
    while llm.engine.num_unfinished:
        llm.engine.step()
    assert poisoned.output.outputs[0].finish_reason == "error"
    assert beside.output.metrics.num_cached_tokens == len(shared)
    answers = [beside.output, *llm.generate(prompts[1:], params, use_tqdm=False)]
    assert [answer.outputs[0].token_ids for answer in answers] == expected
