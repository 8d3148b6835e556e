"""The cases of the tasks inside the model and its cache: attention, positions, integers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan
from nanoinfer_course.learn.check import Case, calling, written
from nanoinfer_course.learn.workbook import Version


def _random(seed: int, *shape: int) -> Tensor:
    """Return random numbers with two decimals, so that a case shows all of their digits."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(100).round() / 100


def _attention_cases() -> Iterator[Case]:
    for seed in range(60):
        kv_heads, group, head_dim = 1 + seed % 2, 1 + seed // 20, 2 + 2 * (seed % 3)
        seq_len = 1 + seed // 6
        num_tokens = 1 + seed % seq_len
        dtype = torch.bfloat16 if seed % 9 == 8 else torch.float32
        q = _random(seed, num_tokens, kv_heads * group, head_dim).to(dtype)
        k, v = (_random(seed + i, seq_len, kv_heads, head_dim).to(dtype) for i in (1, 2))
        first = seq_len - num_tokens
        rows = [f"  query {i}  {_seen(first + i, seq_len)}" for i in range(num_tokens)]
        picture = "\n".join(["Which keys each query sees (#):", *rows])
        is_exact = dtype == torch.bfloat16 and num_tokens == 1
        yield calling(picture, exact=is_exact, q=q, k=k, v=v)
    large = torch.tensor([[[200.0, 0.0]], [[199.0, 0.0]]])
    q = torch.tensor([[[2.0**0.5, 0.0]]])
    yield calling("Scores are near 200.", exact=False, comes_last=True, q=q, k=large, v=_random(0, 2, 1, 2))


def _seen(position: int, seq_len: int) -> str:
    return " ".join("#" if key <= position else "." for key in range(seq_len))


def _paged_cases() -> Iterator[Case]:
    """Yield sequences in mixed blocks, some of which already have tokens in the cache."""

    def prepared(seed: int) -> tuple[KVCache, ForwardBatch, dict[str, Any]]:
        generator = torch.Generator().manual_seed(seed)
        block_size, num_seqs = 1 + seed % 4, 1 + seed // 15
        cache = KVCache(num_layers=2, num_blocks=24, block_size=block_size, num_kv_heads=1, head_dim=4)
        seq_lens = torch.randint(1, 5 * block_size, (num_seqs,), generator=generator).clamp(max=24 // num_seqs * block_size)
        query_lens = [1 + int(torch.randint(0, int(n), (1,), generator=generator)) for n in seq_lens]
        blocks = torch.randperm(24, generator=generator)
        items = []
        for query_len, seq_len, table in zip(query_lens, seq_lens.tolist(), blocks.split(24 // num_seqs), strict=False):
            seq = Sequence("r", [0] * seq_len, SamplingParams(), seed=0, max_num_tokens=seq_len)
            seq.block_table, seq.num_computed_tokens = table[: -(-seq_len // block_size)].tolist(), seq_len - query_len
            items.append(ScheduledSequence(seq, query_len))
            old = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(seq_len - query_len)])
            if len(old):
                cache.write(1, old, _random(seed + 5, len(old), 1, 4), _random(seed + 6, len(old), 1, 4))
        num = sum(query_lens)
        new = {"q": _random(seed + 1, num, 2, 4), "k": _random(seed + 2, num, 1, 4), "v": _random(seed + 3, num, 1, 4)}
        batch = ForwardBatch.build(StepPlan(tuple(items)), block_size, torch.device("cpu"))
        return cache, batch, new

    def observe(version: Version, seed: int) -> object:
        cache, batch, given = prepared(seed)
        return version(cache, batch.attention, 1, *given.values())

    for seed in range(40):
        cache, batch, given = prepared(seed)
        metadata = {
            f"metadata.{name}": getattr(batch.attention, name)
            for name in ("query_start_loc_cpu", "seq_lens_cpu", "block_tables", "slot_mapping")
        }
        rows = [f"The cache has blocks of {cache.block_size}. In layer 1 it already holds:"]
        starts = batch.attention.query_start_loc_cpu
        for i, seq_len in enumerate(batch.attention.seq_lens_cpu):
            num_old = seq_len - (starts[i + 1] - starts[i])
            k, v = cache.gather(1, batch.attention.block_tables[i], num_old)
            rows += [f"keys of sequence {i}: {written(k[:, 0])}", f"values of sequence {i}: {written(v[:, 0])}"]
        yield Case({**metadata, "layer": 1, **given}, partial(observe, seed=seed), exact=False, picture="\n".join(rows))


def _rotary_cases() -> Iterator[Case]:
    for seed in range(30):
        half, tokens, heads = 1 + seed // 10, 1 + seed % 3, 1 + seed % 2
        angles = _random(seed + 1, tokens, 1, half)
        angles = torch.cat((angles, angles), dim=-1)
        yield calling(exact=False, x=_random(seed, tokens, heads, 2 * half), cos=angles.cos(), sin=angles.sin())


def _eight_bit_cases() -> Iterator[Case]:
    def judge(seen: Any) -> object:
        """Ignore the scales of groups of zeros, if they are finite."""
        integers, scales, zeros = seen
        is_free = (integers.view(*scales.shape, -1) == 128).all(-1) & scales.isfinite()
        return integers, scales.masked_fill(is_free, 1.0), zeros

    for seed in range(40):
        groups = _random(seed, 1 + seed // 15, 1 + seed % 2, 2 + seed // 4) * 10.0 ** (seed % 3 - 1)
        if seed % 4 == 3:
            groups[0, 0] = 0
        case = calling(groups=groups)
        yield Case(case.given, case.observe, judge=judge)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "rotary": _rotary_cases,
    "causal_attention": _attention_cases,
    "paged_attention": _paged_cases,
    "eight_bits": _eight_bit_cases,
}
