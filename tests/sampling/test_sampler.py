"""The sampler as one call: greedy and sampled rows together, extreme parameters, rows without a token, any batch."""

import math
import random
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoinfer import SamplingParams
from nanoinfer.execution import memory as memory_sizes
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.sampling import sampler
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import draw, philox, uniform
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.growing import grow
from tests.helpers.sampling_rows import sampling_by

INF, NAN = math.inf, math.nan
EOS = 3


def sequence(*, seed=0, num_prompt=1, num_output=0, **params):
    seq = Sequence("r", [0] * num_prompt, SamplingParams(seed=seed, **params), seed, 999, frozenset([EOS]))
    grow(seq, *[0] * num_output)
    return seq


def sample(logits, *sequences):
    """The output of the plain stages, which the fast route must give as well."""
    logits = torch.as_tensor(logits)
    batch = SamplingBatch.build(list(sequences), logits.shape[1], logits.device)
    plain, fast = (sampler(logits.clone(), batch).read() for sampler in (sampling_by(), sampling_by(FewLogits())))
    assert plain == fast
    return plain


def test_greedy_takes_the_lowest_id_among_equal_logits():
    rows = [[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-INF, -5.0, -INF, -5.0], [2.0, 1.0, 2.0 + 2**-22, 2.0]]
    assert sample(rows, *[sequence(temperature=0)] * 4).token_ids == [1, 0, 1, 2]
    ties = torch.zeros(1, 50_257)
    ties[0, [40_000, 123, 50_000]] = 9.0
    assert sample(ties, sequence(temperature=0)).token_ids == [123]


def test_greedy_is_greedy_whatever_the_other_parameters_of_its_row_and_of_other_rows():
    logits = torch.randn(40, 100, generator=torch.Generator().manual_seed(0))
    others = {"top_k": 5, "top_p": 0.1, "min_p": 0.9}
    params = [{"temperature": 0} | others if i % 2 else {"temperature": 9.0, "top_p": 0.95} for i in range(40)]
    mixed = sample(logits, *[sequence(seed=i, **p) for i, p in enumerate(params)]).token_ids
    greedy = logits.argmax(-1).tolist()
    assert mixed[1::2] == greedy[1::2]
    assert mixed[::2] != greedy[::2]  # the sampled rows are sampled


def test_a_sampled_row_without_stages_is_the_draw_of_its_logits_at_its_seed_and_position():
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    expected = draw(logits, uniform(range(20), [5] * 20))  # prompt of 3 + 2 out: index 5 is drawn
    sampled = sample(logits, *[sequence(seed=i, num_prompt=3, num_output=2) for i in range(20)])
    assert sampled.token_ids == expected.tolist()
    assert sampled.errors == {}


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_seed_of_64_bits_is_read_as_unsigned(seed):
    logits = torch.zeros(1, 100_000)
    high, low, _, _ = philox((1, 0, 0, 0), (seed % 2**32, seed >> 32))
    u = torch.tensor([((high >> 5) * 2**26 + (low >> 6)) / 2**53], dtype=torch.float64)
    assert sample(logits, sequence(seed=seed)).token_ids == draw(logits, u).tolist()


@pytest.mark.slow
def test_the_same_seed_and_position_give_the_same_token_in_any_batch():
    """300 rows of mixed parameters: each alone, all together, and 150 of them in random order."""
    rng = random.Random(0)
    logits = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * 3
    sequences = [
        sequence(
            seed=rng.getrandbits(64),
            num_output=rng.randrange(50),
            temperature=rng.choice([0, 0.5, 1.0, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 3, 50]),
            top_p=rng.choice([1.0, 1.0, 0.5, 0.95]),
            min_p=rng.choice([0, 0, 0.05]),
            min_tokens=rng.choice([0, 10]),
        )
        for _ in range(300)
    ]
    alone = [sample(logits[i : i + 1], seq).token_ids[0] for i, seq in enumerate(sequences)]
    assert sample(logits, *sequences).token_ids == alone
    order = rng.sample(range(300), 150)
    assert sample(logits[order], *[sequences[i] for i in order]).token_ids == [alone[i] for i in order]


def test_another_position_and_another_seed_give_other_tokens():
    """200 rows of 10,000 equal tokens: the chance that more than 5 repeat a row's token is below 1e-12."""
    logits = torch.zeros(200, 10_000)
    first = sample(logits, *[sequence(seed=i) for i in range(200)]).token_ids
    later = sample(logits, *[sequence(seed=i, num_output=1) for i in range(200)]).token_ids
    others = sample(logits, *[sequence(seed=i + 1000) for i in range(200)]).token_ids
    assert sum(a == b for a, b in zip(first, later, strict=True)) <= 5
    assert sum(a == b for a, b in zip(first, others, strict=True)) <= 5


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"ignore_eos": False}])
def test_min_tokens_masks_eos_whether_or_not_it_would_stop(params):
    logits = torch.tensor([[0.0, 5.0, 1.0, 80.0]])
    assert sample(logits, sequence(temperature=0, min_tokens=1, **params)).token_ids == [1]


def test_a_row_with_no_token_left_gets_an_error_that_names_the_stage_and_changes_no_other_row():
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    others = [sequence(seed=1, temperature=0.7), sequence(seed=2, top_p=0.5)]
    barred = sequence(min_tokens=1, stop_token_ids=[0, 1, 2, 3], temperature=0.7)
    expected = sample(logits[[0, 2]], *others).token_ids
    sampled = sample(logits, others[0], barred, others[1])
    assert sampled.token_ids == [expected[0], -1, expected[1]]
    assert list(sampled.errors) == [1]
    assert "mask_min_tokens" in sampled.errors[1]


def test_the_stage_that_removed_the_last_token_is_named_and_not_one_before_it():
    def mask_everything(logits, batch):
        return torch.full_like(logits, -INF)

    sampler = sampling_by(FewLogits(), stages=(*STAGES[:2], mask_everything, *STAGES[2:]))
    sequences = [sequence(temperature=0), sequence(temperature=0.7, min_tokens=1, top_p=0.5)]
    sampled = sampler(torch.randn(2, 4), SamplingBatch.build(sequences, 4, torch.device("cpu"))).read()
    assert sampled.token_ids == [-1, -1]
    assert all("no token is left to draw after mask_everything" in error for error in sampled.errors.values())


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"top_k": 3, "min_p": 0.01}, {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.01}]
)
@pytest.mark.parametrize("bad", [[NAN, 1.0, 2.0, 3.0], [NAN] * 4, [INF, 0.0, 0.0, 0.0], [-INF] * 4, [INF, -INF, NAN, 0.0]])
def test_a_row_with_logits_that_are_not_finite_gets_its_own_error(bad, params):
    fine = [0.0, 90.0, 0.0, 0.0]
    sampled = sample([fine, bad, fine], sequence(), sequence(**params), sequence(temperature=0))
    assert sampled.token_ids == [1, -1, 1]
    assert list(sampled.errors) == [1]
    assert "logits are not finite" in sampled.errors[1]


def test_a_row_at_temperature_1_keeps_its_bits_beside_a_row_at_another_temperature():
    """Subtracting the maximum from 0.1 and 0.1 + 1e-8 rounds them to a tie, of which top_k = 2 would keep both."""
    row = torch.tensor([[1.0, 0.1, 0.1 + 1e-8]])
    for seed in range(20):
        alone = sample(row, sequence(seed=seed, top_k=2)).token_ids[0]
        assert sample(row.repeat(2, 1), sequence(seed=seed, top_k=2), sequence(temperature=0.5)).token_ids[0] == alone


class MostBytes(TorchDispatchMode):
    """The most bytes of the tensors that were made and were alive at a time."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.data_ptr() not in self.alive:
                self.alive[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage.data_ptr())
        self.most = max(self.most, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("num_parts", [1, 16])
def test_a_step_by_stages_takes_no_more_memory_than_is_kept_free(num_parts, monkeypatch):
    rows = [Sequence("r", [1], SamplingParams(temperature=0.7, min_p=0.01, top_k=40, top_p=0.9), i, 99) for i in range(64)]
    batch = SamplingBatch.build(rows, 4096, torch.device("cpu"))
    logits, plain = torch.randn(64, 4096), sampling_by()
    expected = plain(logits.clone(), batch).read().token_ids
    monkeypatch.setattr(sampler, "PART_BYTES", logits.nbytes // num_parts)
    with MostBytes() as memory:
        tokens = plain(logits.clone(), batch)
    assert tokens.read().token_ids == expected
    kept = memory_sizes.LOGITS_COPIES - 1 + memory_sizes.PART_COPIES / num_parts  # no row has log-probabilities
    assert kept / 2 < memory.most / logits.nbytes <= kept
