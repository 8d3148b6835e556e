"""100,000 draws by each route of the sampler against the exact distribution in float64, and injected faults that must fail."""

import functools
import math
from dataclasses import replace

import pytest
import torch

from nanoinfer import SamplingParams
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import uniform
from nanoinfer.sampling.routes import HeadRows
from nanoinfer.sampling.sampler import STAGES, Sampler
from nanoinfer.sampling.stages import apply_temperature, keep_min_p, keep_top_k, keep_top_p
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.sampling_rows import sampling_by

pytestmark = pytest.mark.slow

INF = math.inf
# degrees of freedom -> the value that chi-square exceeds with probability 1e-6
CRITICAL = {4: 33.377, 5: 35.888, 6: 38.258, 7: 40.522, 15: 56.493}
NUM_ROWS, NUM_TIMES = 20_000, 5

# 16 ids, none of them near a threshold of the parameters below. There are two ties, one at the 5th place. Sums to 1.
PROBABILITIES = [0.02, 0.15, 0.01, 0.07, 0.03, 0.22, 0.005, 0.07, 0.04, 0.13, 0.015, 0.09, 0.06, 0.025, 0.06, 0.005]
PARAMS = {
    "temperature": {"temperature": 0.7},
    "high temperature": {"temperature": 1.6},
    "min_p": {"min_p": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    # of min_p and top_k the stricter one decides, so it takes two rows to see all four act
    "all, min_p stricter": {"temperature": 1.4, "min_p": 0.3, "top_k": 12, "top_p": 0.9},
    "all, top_k stricter": {"temperature": 1.4, "min_p": 0.2, "top_k": 5, "top_p": 0.8},
    "nothing": {},
}


def unchanged(logits, batch):
    return logits


SAMPLERS = {"fast": sampling_by(FewLogits()), "plain": sampling_by()}


def exact(*, temperature=1.0, min_p=0.0, top_k=16, top_p=1.0):
    """The distribution by its definition, a plain list of floats."""
    p = [x ** (1 / temperature) for x in PROBABILITIES]
    p = [x if x >= min_p * max(p) else 0.0 for x in p]
    p = [x if x >= sorted(p, reverse=True)[top_k - 1] else 0.0 for x in p]
    kept, total = 0.0, sum(p)
    for i in sorted(range(16), key=lambda i: (-p[i], i)):
        reached = kept >= top_p * total
        kept, p[i] = kept + p[i], 0.0 if reached and top_p < 1 else p[i]
    return [x / sum(p) for x in p]


@functools.cache
def batch_of(name):
    """20,000 rows of the same parameters. The draws below replace their random numbers."""
    seq = Sequence("r", [0], SamplingParams(**PARAMS[name]), seed=0, max_num_tokens=99)
    return SamplingBatch.build([seq] * NUM_ROWS, 16, torch.device("cpu"))


def chi_square(sampler, name):
    """Of 100,000 draws. Infinite if one of them should be impossible."""
    logits = torch.tensor(PROBABILITIES).log().expand(NUM_ROWS, 16)
    counts = torch.zeros(16, dtype=torch.int64)
    for start in range(0, NUM_ROWS * NUM_TIMES, NUM_ROWS):
        u = uniform(range(start, start + NUM_ROWS), [1] * NUM_ROWS)
        sampled = sampler(logits, replace(batch_of(name), u=u)).read()
        assert sampled.errors == {}
        counts += torch.tensor(sampled.token_ids).bincount(minlength=16)
    expected = torch.tensor(exact(**PARAMS[name]), dtype=torch.float64) * counts.sum()
    outside = expected == 0
    return INF if counts[outside].any() else ((counts - expected) ** 2 / expected)[~outside].sum().item()


def critical(name):
    return CRITICAL[sum(p > 0 for p in exact(**PARAMS[name])) - 1]


def with_stage(stage, instead):
    """The plain stages with one of them replaced."""
    sampler = Sampler()
    sampler.stages = tuple(instead if each is stage else each for each in STAGES)  # the constructor would refuse it
    return lambda logits, batch: sampler(HeadRows(logits, lambda logits: logits), batch)


# ---- the sampler


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("route", SAMPLERS)
def test_draws_have_the_frequencies_of_the_exact_distribution(route, name):
    """Seeds are fixed, so the result is deterministic. Of random streams, 1 in a million would fail."""
    assert chi_square(SAMPLERS[route], name) < critical(name)


def test_the_exact_distributions_are_those_worked_out_on_paper():
    """Falling: .22 .15 .13 .09 .07 .07 .06 .06 .04 ...: top_k 5 keeps 6, min_p .3 (>= .066) too, top_p .8 keeps 8 (.85)."""
    kept = {name: [i for i, p in enumerate(exact(**params)) if p > 0] for name, params in PARAMS.items()}
    six = [1, 3, 5, 7, 9, 11]
    assert math.isclose(sum(PROBABILITIES), 1)
    assert (kept["top_k"], kept["min_p"], kept["top_p"]) == (six, six, [1, 3, 5, 7, 9, 11, 12, 14])
    assert len(kept["nothing"]) == len(kept["temperature"]) == 16
    # p ** (1 / 1.4) over the largest: 1 .761 .687 .528 .441 .441 .395 .395 .296 ...
    assert kept["all, min_p stricter"] == [*six, 12]  # 8 of 4.65 are above .3, and 7 are 4.25 > .9 * 4.65
    assert kept["all, top_k stricter"] == [1, 3, 5, 9, 11]  # 6 of 3.86, and 5 are 3.42 > .8 * 3.86
    assert exact(**PARAMS["top_k"])[5] == pytest.approx(0.22 / 0.73)
    assert exact(**PARAMS["temperature"])[5] / exact(**PARAMS["temperature"])[1] == pytest.approx((22 / 15) ** (1 / 0.7))


# ---- injected faults


def with_columns(batch, **columns):
    return replace(batch, **columns)


def dropping_the_crossing_token(logits, batch):
    """The first known trap: `cumsum > p` without the shift."""
    falling, ids = logits.sort(dim=-1, descending=True, stable=True)
    dropped = falling.softmax(-1).cumsum(-1) > batch.top_p[:, None]
    return logits.masked_fill(dropped.scatter(-1, ids, dropped), -INF)


def keeping_one_more(logits, batch):
    return keep_top_p(logits, with_columns(batch, top_p=batch.top_p + 0.06))  # past .85, where the next one enters


def with_a_floor(logits, batch):
    """The second known trap, masked_fill(mask, 0).clamp_min(floor): here 2e-4, so that 100,000 draws meet it."""
    masked = keep_top_p(logits, batch)
    return masked.softmax(-1).clamp_min(2e-4).log()


def warmer(logits, batch):
    return apply_temperature(logits, with_columns(batch, temperature=batch.temperature * 1.05))


@pytest.mark.parametrize(
    ("name", "stage", "fault"),
    [
        ("top_p", keep_top_p, dropping_the_crossing_token),
        ("top_p", keep_top_p, keeping_one_more),
        ("top_p", keep_top_p, with_a_floor),
        ("temperature", apply_temperature, warmer),
        ("min_p", keep_min_p, unchanged),
        ("all, min_p stricter", keep_min_p, unchanged),
        ("all, top_k stricter", keep_top_k, unchanged),
    ],
)
def test_the_chi_square_notices(name, stage, fault):
    assert chi_square(with_stage(stage, fault), name) > critical(name)


def test_the_chi_square_notices_draws_that_share_their_numbers():
    """Rows share 200 numbers: the frequencies are those of a few draws, repeated a hundred times."""

    def repeating(logits, batch):
        return SAMPLERS["fast"](logits, replace(batch, u=batch.u[:200].repeat(NUM_ROWS // 200)))

    assert chi_square(repeating, "nothing") > critical("nothing")
