"""Ranks that hold intervals of the vocabulary draw the tokens of the full rows, and send little for ordinary rows."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer.fast.sampling import few_logits
from nanoinfer.features.distributed import split_sampling
from tests.helpers.sampling_rows import BAD, INF, PARAMS, batch_of, random_logits, random_params, sampling_by, sequence
from tests.helpers.thread_ranks import on_ranks

PLAIN = sampling_by()


def plain_ids(logits, batch):
    return PLAIN(logits.clone(), batch).read().token_ids


def sample(logits, batch, size=2):
    """The token ids, after checking that all ranks return the same, and what rank 0 sent, as (dtype, number of elements)."""
    vocab_size = logits.shape[-1]
    shards = torch.nn.functional.pad(logits, (0, -vocab_size % size), value=-INF).chunk(size, dim=-1)

    def run(member):
        ids = split_sampling.sample_shard(shards[member.rank].contiguous(), batch, vocab_size, member)
        return ids.tolist(), member.sent

    (first, sent), *others = on_ranks(size, run)
    assert all(ids == first for ids, _ in others)
    return first, sent


def sent_for(logits, batch):
    """What rank 0 sends for rows that get the tokens of the full rows."""
    ids, sent = sample(logits, batch)
    assert ids == plain_ids(logits, batch)
    return sent


# ---- the same tokens


def random_step(seed, kind, groups, vocab_size, masked, bad):
    """Logits with ties, a share of -inf, and a bad row if bad has a name, with a batch of rows of these groups."""
    rng = random.Random(seed)
    logits = random_logits(kind, len(groups), vocab_size)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < masked] = -INF
    if bad:
        BAD[bad](logits[rng.randrange(len(groups))])
    sequences = [sequence(rng.getrandbits(64), **random_params(rng, vocab_size, group)) for group in groups]
    return logits, batch_of(sequences, vocab_size)


STEPS = st.builds(
    dict,
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["random", "rounded to bf16", "few values", "constant"]),
    groups=st.lists(st.sampled_from([*PARAMS]), min_size=1, max_size=6),
    vocab_size=st.one_of(st.integers(2, 30), st.integers(31, 700)),
    masked=st.sampled_from([0, 0.3, 0.95]),
    bad=st.sampled_from([None, None, *BAD]),
)
SIZES = st.sampled_from([(0, 1), (1, 2), (3, 20), (32, 256)])  # TIE_MARGIN, NUM_TRIED


@pytest.mark.slow
def test_every_rank_returns_the_tokens_of_the_plain_stages(monkeypatch):
    sent_rows = []  # of each step, whether full rows were sent

    @settings(max_examples=80, database=None, derandomize=True)
    @given(step=STEPS, num_ranks=st.integers(1, 4), sizes=SIZES, scratch_bytes=st.sampled_from([1, 2000, 2**20]))
    def check(step, num_ranks, sizes, scratch_bytes):
        monkeypatch.setattr(split_sampling, "SCRATCH_BYTES", scratch_bytes)
        for name, number in zip(("TIE_MARGIN", "NUM_TRIED"), sizes, strict=True):
            monkeypatch.setattr(few_logits, name, number)
        logits, batch = random_step(**step)
        ids, sent = sample(logits, batch, num_ranks)
        assert ids == plain_ids(logits, batch)
        sent_rows.append(torch.float32 in [dtype for dtype, _ in sent])

    check()
    assert len(sent_rows) / 4 < sum(sent_rows) < len(sent_rows) * 3 / 4  # both ways are well tested


def test_equal_logits_on_both_sides_of_a_cut_enter_top_p_by_rising_id():
    """Four equal ids, the last two of rank 0 and the first two of rank 1: top_p = 0.7 keeps three."""
    logits = torch.full((200, 2000), -20.0)
    logits[:, 998:1002] = 0
    ids, sent = sample(logits, batch_of([sequence(seed, top_p=0.7) for seed in range(200)], 2000))
    assert set(ids) == {998, 999, 1000}
    assert torch.float32 not in [dtype for dtype, _ in sent]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_of_any_group_gets_no_token_and_no_full_rows_are_sent(bad):
    sequences = [sequence(seed, **PARAMS[name]) for seed, name in enumerate([*PARAMS] * 3)]
    logits = torch.randn(len(sequences), 1201, generator=torch.Generator().manual_seed(0)) * 5
    expected = plain_ids(logits, batch_of(sequences, 1201))
    for row in range(len(PARAMS), 2 * len(PARAMS)):
        BAD[bad](logits[row])
        expected[row] = -1
    ids, sent = sample(logits, batch_of(sequences, 1201))
    assert ids == expected
    assert torch.float32 not in [dtype for dtype, _ in sent]


# ---- what is sent


@pytest.mark.parametrize("size", [2, 4])
def test_ordinary_rows_send_what_the_table_says(size):
    logits = torch.randn(10, 5000, generator=torch.Generator().manual_seed(0)) * 5
    candidates = {"greedy": 0, "top_k": 5 + 32, "top_p": 256, "other": 0}
    rounds = {"greedy": [], "top_k": [], "top_p": [(torch.int64, 10)], "other": [(torch.int64, 10), (torch.int64, 10)]}
    for group, params in PARAMS.items():
        _, sent = sample(logits, batch_of([sequence(seed, **params) for seed in range(10)], 5000), size)
        assert sent == [(torch.int32, 10 * (2 + 2 * candidates[group])), *rounds[group]]


def test_only_the_rows_that_the_candidates_do_not_decide_are_sent():
    """256 of a rank are listed: 255 equal ones fit, 256 do not show that there is no 257th. Flat rows do not reach top_p."""
    logits = torch.arange(2000.0).neg().repeat(6, 1)
    for row, num_equal in enumerate([1, 255, 256]):
        logits[row, 1000 : 1000 + num_equal] = 0
        logits[row, :1000] -= 3000
    logits[4:] = 0
    batch = batch_of([sequence(seed, **params) for seed, params in enumerate([{"top_k": 5}] * 3 + [{"top_p": 0.9}] * 3)], 2000)
    assert sent_for(logits, batch)[-1] == (torch.float32, 3 * 1000)


def test_rows_are_sent_at_once_where_candidates_would_be_as_large():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    batch = batch_of([sequence(seed, top_k=200) for seed in range(4)], 300)
    assert sent_for(logits, batch) == [(torch.float32, 4 * 150)]


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.9}])
def test_the_comparison_notices_ties_that_are_not_sent(params, monkeypatch):
    """The injected fault keeps the candidates of an undecided row, which are an arbitrary part of the tied ids."""
    logits = torch.zeros(50, 2000)
    batch = batch_of([sequence(seed, **params) for seed in range(50)], 2000)
    expected = plain_ids(logits, batch)
    assert sample(logits, batch)[0] == expected
    for name in ("decide_few", "decide_top_p"):
        decide = getattr(few_logits, name)
        decided = lambda *arguments, decide=decide: (decide(*arguments)[0], torch.zeros(50, dtype=torch.bool))  # noqa: E731
        monkeypatch.setattr(few_logits, name, decided)
    assert sum(a != b for a, b in zip(sample(logits, batch)[0], expected, strict=True)) > 25
