"""The tasks inside the model and its cache: attention, positions, norms, integers, the LM head's split."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.lab.learn.check import Case, Task, calling
from nanoinfer.lab.learn.workbook import Function, Version
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attention_cases() -> Iterator[Case]:
    for seed in range(60):
        kv_heads, group, head_dim = 1 + seed % 2, 1 + seed // 20, 2 + 2 * (seed % 3)
        seq_len = 1 + seed // 6
        num_tokens = 1 + seed % seq_len
        window = 1 + seed % 5 if seed % 4 == 3 else None
        sinks = _random(seed + 3, kv_heads * group) if seed % 5 == 4 else None
        dtype = torch.bfloat16 if seed % 9 == 8 else torch.float32
        words = f"{num_tokens} of {seq_len} tokens, {kv_heads * group} heads, {kv_heads} KV heads, head_dim {head_dim}, {dtype}"
        words += ("" if window is None else f", window {window}") + ("" if sinks is None else f", sinks {sinks.tolist()}")
        q = _random(seed, num_tokens, kv_heads * group, head_dim).to(dtype)
        k, v = (_random(seed + i, seq_len, kv_heads, head_dim).to(dtype) for i in (1, 2))
        yield Case(words, calling(q, k, v, window, sinks), dtype == torch.bfloat16 and num_tokens == 1)


def _paged_cases() -> Iterator[Case]:
    """Yield sequences in mixed blocks, some of which already have tokens in the cache."""
    for seed in range(40):

        def observe(version: Version, seed: int = seed) -> object:
            generator = torch.Generator().manual_seed(seed)
            block_size, num_seqs = 1 + seed % 4, 1 + seed // 15
            cache = KVCache(num_layers=2, num_blocks=24, block_size=block_size, num_kv_heads=1, head_dim=4)
            seq_lens = torch.randint(1, 5 * block_size, (num_seqs,), generator=generator).clamp(max=24 // num_seqs * block_size)
            query_lens = [1 + int(torch.randint(0, int(n), (1,), generator=generator)) for n in seq_lens]
            blocks = torch.randperm(24, generator=generator)
            items = []
            for query_len, seq_len, table in zip(query_lens, seq_lens.tolist(), blocks.split(24 // num_seqs), strict=False):
                seq = Sequence("r", [0] * seq_len, SamplingParams(), seed=0, max_num_tokens=seq_len)
                seq.block_table, seq.num_computed_tokens = table.tolist(), seq_len - query_len
                items.append(ScheduledSequence(seq, query_len))
                old = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(seq_len - query_len)])
                if len(old):
                    cache.write(1, old, _random(seed + 5, len(old), 1, 4), _random(seed + 6, len(old), 1, 4))
            metadata = ForwardBatch.build(StepPlan(tuple(items)), block_size, torch.device("cpu")).attention
            num = sum(query_lens)
            q, sinks = _random(seed + 1, num, 2, 4), _random(seed + 4, 2)
            k, v = _random(seed + 2, num, 1, 4), _random(seed + 3, num, 1, 4)
            window = 1 + seed % 5 if seed % 4 == 3 else None
            return version(cache, metadata, 1, q, k, v, window=window, sinks=sinks if seed % 5 == 4 else None)

        words = f"{1 + seed // 15} sequence(s) in blocks of {1 + seed % 4}" + (", with a window" if seed % 4 == 3 else "")
        yield Case(f"{words + (', with sinks' if seed % 5 == 4 else '')} (case {seed})", observe, False)


def _rotary_cases() -> Iterator[Case]:
    for seed in range(30):
        half, tokens, heads = 1 + seed // 10, 1 + seed % 3, 1 + seed % 2
        x, angles = _random(seed, tokens, heads, 2 * half), _random(seed + 1, tokens, 1, half)
        angles = torch.cat((angles, angles), dim=-1)
        words = f"{tokens} token(s), {heads} head(s) of {2 * half} numbers: x {[round(n, 2) for n in x.flatten().tolist()[:8]]}"
        yield Case(words, calling(x, angles.cos(), angles.sin()), False)


def _eight_bit_cases() -> Iterator[Case]:
    for seed in range(40):
        groups = _random(seed, 1 + seed // 15, 1 + seed % 2, 2 + seed // 4) * 10.0 ** (seed % 3 - 1)
        if seed % 4 == 3:
            groups[0, 0] = 0
        words = f"groups {[[float(f'{x:.3g}') for x in g] for g in groups.flatten(0, 1).tolist()]}"
        yield Case(words, calling(groups))


def _even_cases() -> Iterator[Case]:
    for size in (1, 2, 3, 4):
        for total in range(size, 14):
            for rank in range(size):
                words = f"{total} rows, rank {rank} of {size}"
                yield Case(words, calling(total, rank, size))


TASKS = [
    Task(
        "rotary",
        Function("nanoinfer.models.layers", "apply_rotary"),
        "02",
        "turn pairs of numbers by an angle that grows with the position.\n\n"
        "The pair of number i is (x[i], x[i + head_dim/2]). By an angle of 90 degrees (cos 0, sin 1), [1, 2] becomes [-2, 1].",
        (
            "first, second = the two halves of the last dimension.",
            "A rotation: first' = first * cos - second * sin, second' = second * cos + first * sin.",
        ),
        _rotary_cases,
    ),
    Task(
        "causal_attention",
        Function("nanoinfer.attention.dense", "causal_attention"),
        "02",
        "attention of the last tokens of a sequence over all of its tokens.\n\n"
        "With several query heads per KV head, query head h uses KV head h // (num_heads // num_kv_heads).",
        (
            "repeat_interleave gives every query head its key head.",
            "scores = q . k / sqrt(head_dim), in fp32. Query i is at position seq_len - num_tokens + i and sees no later key.",
            "Scores of later keys, and of those before the window, become -inf before the softmax. A sink is one more score\n"
            "of each head, without a value. The result goes back to q's dtype.",
        ),
        _attention_cases,
    ),
    Task(
        "paged_attention",
        Function("nanoinfer.attention.reference", "paged_attention"),
        "03",
        "attention of a packed step over pages.\n\n"
        "cache.write(layer, slots, k, v) stores, cache.gather(layer, block_table, seq_len) collects one sequence's keys and\n"
        "values in order. Sequence i has the queries metadata.query_start_loc_cpu[i] .. [i + 1] - 1. With a window, the first\n"
        "cache.num_blocks_before(position of the first query, window) blocks may have been freed: leave them out.",
        (
            "Store the new keys and values first, because a token attends to itself, too.",
            "One sequence at a time: gather, causal_attention with its own queries, put the result in its place.",
            "Pass window and sinks on. Blocks that are left out make the sequence that you gather shorter.",
        ),
        _paged_cases,
    ),
    Task(
        "eight_bits",
        Function("nanoinfer.loading.quantization", "_in_eight_bits"),
        "04",
        "round a weight to 8 bits, one scale per group.\n\n"
        "Returns integers in uint8 where 128 means 0 (groups joined again), the scales [out, groups], and the zeros (128).\n"
        "A group [1.27, -0.64] has the scale 0.01 and the integers 255 and 64.",
        (
            "The scale maps the largest magnitude of a group to 127.",
            "A group of zeros has scale 0, and 0 / 0 is NaN. Keep scales at least as large as the smallest normal fp32 number.",
        ),
        _eight_bit_cases,
    ),
    Task(
        "column_slice",
        Function("nanoinfer.distributed.sharding", "_even"),
        "11",
        "which rows of a weight one of several devices holds.\n\n"
        "Together the slices cover 0 .. total - 1 in order, each row once.",
        ("total * rank // size is where a device's part begins.",),
        _even_cases,
    ),
]
