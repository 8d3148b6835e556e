"""The fast path draws the tokens of the plain stages: any vocabulary, parameters, ties, masks, rows without a token."""

import math
import random
from unittest.mock import patch

import numpy as np
import pytest
import torch

from nanoinfer.fast.cuda import draw_kernel
from nanoinfer.fast.sampling import few_logits
from nanoinfer.sampling.batch import ParameterColumns, SamplingBatch
from nanoinfer.sampling.routes import Route
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.sampling_rows import BAD, PARAMS, batch_of, random_logits, random_params, sampling_by, sequence

INF, NAN = math.inf, math.nan


def as_on_a_gpu(logits, batch):
    if torch.cuda.is_available():
        batch = SamplingBatch.build(list(batch.sequences), logits.shape[-1], torch.device("cuda"))
        return SAMPLERS["fast"](logits.cuda(), batch)
    size = 2**14 if logits.shape[-1] > 2**14 else 1024  # the interpreter takes long for each part and tile
    # Half of the batches have a list that is too short for most rows.
    with patch.multiple(draw_kernel, _PART=size, _TILE=size, _LIST=(4096, 40)[batch.sequences[0].seed % 2], _TRIED=32):
        return BY_TRITON(logits, batch)


class ByTriton(Route):
    """What FewLogits does on a GPU, in Triton's interpreter. Half of the batches give seeds and positions in place of u."""

    def try_sample(self, rows, batch):
        u = None if batch.row_groups.all_greedy else batch.u
        if batch.draws is not None and batch.sequences[0].seed % 3:
            seeds, positions = (np.array(column, np.uint64).view(np.int64) for column in batch.draws[:2])
            u = torch.from_numpy(seeds), torch.from_numpy(positions)
        return few_logits.sample_on_gpu(rows.logits, batch, u)


BY_TRITON = sampling_by(ByTriton())
SAMPLERS = {"fast": sampling_by(few_logits.FewLogits()), "plain": sampling_by(), "as on a GPU": as_on_a_gpu}
NUM_AS_ON_A_GPU = 3  # rows, because Triton's interpreter takes long


def disagreeing(logits, batch, *, by_triton=True):
    """The rows whose token differs between the samplers. No row may have an error. Some rows are also drawn as on a GPU."""
    fast, plain = (sampler(logits.clone(), batch).read() for sampler in (SAMPLERS["fast"], SAMPLERS["plain"]))
    assert fast.errors == plain.errors == {}
    if by_triton:
        every = slice(None, None, max(len(logits) // NUM_AS_ON_A_GPU, 1))
        on_gpu = as_on_a_gpu(logits[every].clone(), batch_of(list(batch.sequences[every]), logits.shape[-1])).read()
        assert (on_gpu.errors, on_gpu.token_ids) == ({}, plain.token_ids[every])
    return [row for row, ids in enumerate(zip(fast.token_ids, plain.token_ids, strict=True)) if len(set(ids)) > 1]


@pytest.fixture
def plain_rows(monkeypatch):
    """How many rows ran the plain stages, one number per call."""
    numbers, plainly = [], few_logits.sample_plainly
    monkeypatch.setattr(few_logits, "sample_plainly", lambda *given: numbers.append(len(given[0])) or plainly(*given))
    return numbers


# ---- random rows


def random_history(rng, vocab_size):
    """Masks, biases and penalties, so that the stages before the temperature leave -inf, ties and changed logits."""
    pool = rng.sample(range(vocab_size), min(vocab_size, 8))
    history = {
        "prompt": rng.choices(pool, k=4),
        "output": rng.choices(pool, k=rng.randint(0, 6)),
        "allowed_token_ids": rng.sample(range(vocab_size), rng.choice([1, min(3, vocab_size), (vocab_size + 1) // 2])),
        "logit_bias": {token_id: rng.choice([-100.0, -1.0, 0.5, 100.0]) for token_id in pool},
        "repetition_penalty": rng.choice([1.0, 1.3]),
        "frequency_penalty": rng.choice([0.0, 0.5]),
        "presence_penalty": rng.choice([0.0, -1.0]),
    }
    return {name: value for name, value in history.items() if name in ("prompt", "output") or rng.random() < 0.5}


def random_batch(rng, num_rows, vocab_size, group=None):
    sequences = []
    for _ in range(num_rows):
        params = random_params(rng, vocab_size, group)
        if rng.random() < 0.4:
            params |= random_history(rng, vocab_size)
        sequences.append(sequence(rng.getrandbits(64), **params))
    return batch_of(sequences, vocab_size)


SIZES = [(1, 64), (2, 256), (7, 512), (300, 512), (1000, 256), (5000, 96), (50_257, 24)]
KINDS = ["random", "rounded to bf16", "few values", "constant"]
# By default every third pair, so that each kind has some sizes and each size has some kinds.
PAIRS = [
    pytest.param(*size, kind, marks=[pytest.mark.long] * ((i + k) % 3 > 0) + [pytest.mark.slow] * (size[0] > 1000))
    for i, size in enumerate(SIZES)
    for k, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("vocab_size", "num_rows", "kind"), PAIRS)
def test_a_mixed_batch_gets_the_tokens_of_the_plain_stages(vocab_size, num_rows, kind):
    batch = random_batch(random.Random(f"{kind} {vocab_size}"), num_rows, vocab_size)
    assert disagreeing(random_logits(kind, num_rows, vocab_size), batch) == []


@pytest.mark.parametrize("group", PARAMS)
@pytest.mark.parametrize(("vocab_size", "num_rows"), [(40, 128), (1000, 32), pytest.param(50_257, 4, marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_batch_of_one_group_gets_the_tokens_of_the_plain_stages(vocab_size, num_rows, group):
    batch = random_batch(random.Random(f"{group} {vocab_size}"), num_rows, vocab_size, group)
    assert len(getattr(batch.row_groups, f"{group}_rows")) == num_rows
    for kind in KINDS[:3] if vocab_size < 50_257 else KINDS[:1]:
        assert disagreeing(random_logits(kind, num_rows, vocab_size), batch, by_triton=kind == KINDS[0]) == []


@pytest.mark.parametrize(("tie_margin", "num_tried"), [(0, 1), (1, 2), (299, 299), (9999, 9999)])
@pytest.mark.slow
def test_the_sizes_of_the_fast_path_change_no_token(tie_margin, num_tried, monkeypatch):
    monkeypatch.setattr(few_logits, "TIE_MARGIN", tie_margin)
    monkeypatch.setattr(few_logits, "NUM_TRIED", num_tried)
    for kind in KINDS[:3]:
        batch = random_batch(random.Random(kind), 256, 300)
        assert disagreeing(random_logits(kind, 256, 300), batch, by_triton=False) == []


# ---- rows for which the largest logits are not enough


@pytest.mark.slow
def test_only_rows_whose_ties_fill_the_top_k_margin_run_the_plain_stages(plain_rows):
    """Over 300 ids, k = 5 fetches 37 columns: 36 equal ones fit, and 37 do not show that there is no 38th."""
    logits = torch.arange(300.0).neg().repeat(4, 1)
    for row, num_equal in enumerate([1, 36, 37, 300]):
        logits[row, :num_equal] = 0
    batch = batch_of([sequence(seed, top_k=5) for seed in range(4)], 300)
    assert disagreeing(logits, batch) == []
    assert plain_rows == [2]


@pytest.mark.slow
def test_only_rows_too_flat_for_top_p_run_the_plain_stages(plain_rows):
    """Over 1000 ids 256 columns are tried. Of equal ones they hold .256, and none is above the smallest of them."""
    logits = torch.zeros(4, 1000)
    logits[0, 17] = 50  # decided by one
    logits[1, 100:300] = 50  # 200 of the 256 hold everything that counts
    logits[3] = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 0.01
    batch = batch_of([sequence(seed, top_p=0.903) for seed in range(4)], 1000)
    assert disagreeing(logits, batch) == []
    assert plain_rows == [2]


@pytest.mark.slow
def test_a_tie_at_the_edge_of_the_candidates_is_not_decided_by_which_of_its_ids_are_candidates(plain_rows):
    """255 heavy ids and 745 equal light ones, of which one is tried: top_p reaches the light ones only in the second row."""
    logits = torch.full((2, 1000), -9.0)
    logits[:, torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:255]] = 0
    share = 255 / (255 + 745 * math.exp(-9))
    params = [{"top_p": share - 1e-4}, {"top_p": share + 1e-4}]
    batch = batch_of([sequence(seed, **params[seed % 2]) for seed in range(200)], 1000)
    assert disagreeing(logits.repeat(100, 1), batch) == []
    assert plain_rows == [100]


@pytest.mark.slow
def test_ordinary_rows_do_not_run_the_plain_stages(plain_rows):
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0)) * 5
    batch = batch_of([sequence(seed, **params) for params in PARAMS.values() for seed in range(10)], 5000)
    assert disagreeing(logits, batch) == []
    assert plain_rows == []


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.9}])
@pytest.mark.slow
def test_the_comparison_notices_ties_that_do_not_run_the_plain_stages(params, monkeypatch):
    """The injected fault keeps the candidates of an undecided row, which are an arbitrary part of the tied ids."""
    logits = torch.zeros(40, 1000)
    batch = batch_of([sequence(seed, **params) for seed in range(40)], 1000)
    assert disagreeing(logits, batch) == []
    monkeypatch.setattr(few_logits, "_plainly_where", lambda is_undecided, token_ids, logits, batch: token_ids)
    assert len(disagreeing(logits, batch, by_triton=False)) > 20
    keep_all = ParameterColumns()  # as if the kernels did not read top_k and top_p
    monkeypatch.setattr(few_logits, "sample_on_gpu", lambda logits, columns, u: draw_kernel.choose(logits, keep_all, u))
    with pytest.raises(AssertionError):
        disagreeing(torch.arange(1000.0).repeat(40, 1) / 500, batch)


# ---- rows without a token


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("vocab_size", [2, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_bad_row_of_any_group_gets_its_own_error_and_changes_no_other_token(vocab_size, bad):
    """Two good rows and a bad row of each group, in one batch and in a batch per group."""
    generator = torch.Generator().manual_seed(0)
    params = PARAMS | {"top_k": {"top_k": 1, "top_p": 0.95}}  # 5 would be off over 2 ids
    for groups in (list(params), *([name] for name in params)):
        sequences = [sequence(seed, **params[name]) for seed, name in enumerate(groups * 3)]
        is_bad = [len(groups) <= row < 2 * len(groups) for row in range(len(sequences))]
        good = (torch.randn(len(sequences), vocab_size, generator=generator) * 3).bfloat16().float()
        mixed = good.clone()
        for row, bad_row in enumerate(is_bad):
            if bad_row:
                BAD[bad](mixed[row])
        expected = SAMPLERS["plain"](good.clone(), batch_of(sequences, vocab_size)).read().token_ids
        for sampler in SAMPLERS.values():
            sampled = sampler(mixed.clone(), batch_of(sequences, vocab_size)).read()
            assert sampled.token_ids == [-1 if b else token_id for b, token_id in zip(is_bad, expected, strict=True)]
            assert sorted(sampled.errors) == [row for row, b in enumerate(is_bad) if b]
            assert all("logits are not finite" in error for error in sampled.errors.values())


@pytest.mark.parametrize("group", PARAMS)
@pytest.mark.slow
def test_a_row_whose_parameters_leave_no_token_gets_its_own_error(group):
    """Only id 2 is allowed, and a logits processor masks it."""
    nothing = {
        "allowed_token_ids": [2],
        "logits_processors": [lambda p, o, logits: logits.index_fill(0, torch.tensor([2]), -INF)],
    }
    sequences = [sequence(0, **PARAMS[group]), sequence(1, **PARAMS[group], **nothing), sequence(2, **PARAMS[group])]
    for vocab_size in (6, 1000):
        logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
        good = logits[::2].clone(), batch_of(sequences[::2], vocab_size)
        first, last = SAMPLERS["plain"](*good).read().token_ids
        for sampler in SAMPLERS.values():
            sampled = sampler(logits.clone(), batch_of(sequences, vocab_size)).read()
            assert sampled.token_ids == [first, -1, last]
            assert list(sampled.errors) == [1]
            assert "apply_logits_processors" in sampled.errors[1]


@pytest.mark.parametrize("group", PARAMS)
@pytest.mark.slow
def test_a_nan_that_a_mask_hides_is_still_an_error(group):
    logits = torch.zeros(2, 400)
    logits[1, 7] = NAN
    sequences = [sequence(seed, allowed_token_ids=[3], **PARAMS[group]) for seed in range(2)]
    for sampler in SAMPLERS.values():
        assert sampler(logits.clone(), batch_of(sequences, 400)).read().token_ids == [3, -1]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.slow
def test_minus_zero_ties_with_zero(sampler):
    """Of three equal tokens top_p = 0.5 keeps the first two, whatever the sign of a zero."""
    sequences = [sequence(seed=seed, temperature=1.0, top_p=0.5) for seed in range(40)]
    logits = torch.tensor([-0.0, 0.0, 0.0]).repeat(40, 1)
    assert set(SAMPLERS[sampler](logits, batch_of(sequences, 3)).read().token_ids) == {0, 1}
