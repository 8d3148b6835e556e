"""The draw: Philox against its published vectors, worked examples of weights and draws."""

import math

import numpy as np
import pytest
import torch

from nanoinfer.sampling.draw import draw, integer_weights, philox, uniform

INF = math.inf
# Random123's kat_vectors, philox4x32 10: counter, key, output. https://github.com/DEShawResearch/random123
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_its_published_words(counter, key, expected):
    assert philox(counter, key) == tuple(expected)


def test_philox_computes_each_column_independently():
    counters = np.array([counter for counter, _, _ in KNOWN_ANSWERS], dtype=np.uint64).T
    keys = np.array([key for _, key, _ in KNOWN_ANSWERS], dtype=np.uint64).T
    assert np.stack(philox(list(counters), list(keys))).T.tolist() == [expected for _, _, expected in KNOWN_ANSWERS]


def test_uniform_is_the_first_two_words_as_53_bits():
    """27 bits of the first, 26 of the second: (0x6627e8d5 >> 5) * 2^26 + (0xe169c58d >> 6), over 2^53."""
    assert uniform([0], [0]).item() == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniform([0], [0]).dtype == uniform([0] * 20, [0] * 20).dtype == torch.float64


def test_uniform_depends_on_seed_and_position_alone():
    alone = [uniform([seed], [position]).item() for seed, position in [(1, 5), (2, 5), (1, 6)]]
    assert uniform([1, 2, 1], [5, 5, 6]).tolist() == alone
    assert uniform([1, 1, 2], [6, 5, 5]).tolist() == [alone[2], alone[0], alone[1]]
    assert uniform([1, 2, 1] * 10, [5, 5, 6] * 10).tolist() == alone * 10  # many rows are computed in arrays
    torch.manual_seed(1)
    assert uniform([1], [5]).item() == alone[0]


def test_every_bit_of_a_64_bit_seed_and_of_a_position_changes_the_number():
    """Chance of two equal numbers among 128 of 53 bits, were they random: below 1e-12."""
    seeds = [0, *(1 << bit for bit in range(64))]
    positions = [1 << bit for bit in range(63)]
    numbers = uniform(seeds + [0] * len(positions), [0] * len(seeds) + positions)
    assert len(set(numbers.tolist())) == len(seeds) + len(positions)


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniform_numbers_lie_in_0_to_1_with_a_uniforms_mean_and_variance(along):
    """Each of three bounds is 5 standard errors: a false alarm in 1 of 580,000 truly random streams."""
    n = 50_000
    running, still = range(n), [7] * n
    u = uniform(running, still) if along == "seeds" else uniform(still, running)
    assert u.min() >= 0
    assert u.max() < 1
    centred = u - 0.5
    assert abs(centred.mean()) < 5 * math.sqrt(1 / 12 / n)
    assert abs(centred.square().mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    assert abs((centred[1:] * centred[:-1]).mean()) < 5 / 12 / math.sqrt(n - 1)  # neighbours are not correlated


def test_integer_weights_are_shares_of_2_to_the_32():
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.125]]).log()
    assert integer_weights(logits).tolist() == [[2**32, 2**31, 2**31, 2**30]]
    assert integer_weights(logits + 80.0)[0, 0] == 2**32  # only differences matter
    assert integer_weights(torch.tensor([[3.0, -INF, 3.0, -40.0]])).tolist() == [[2**32, 0, 2**32, 0]]  # e^-43 < 2^-32
    assert integer_weights(torch.full((1, 4), -INF)).tolist() == [[0, 0, 0, 0]]


def test_draw_finds_the_first_token_whose_cumulative_weight_exceeds_the_threshold():
    """p = [1/4, 0, 1/2, 1/4] has cumulative sums 1/4, 1/4, 3/4, 1. At equality the next token is drawn."""
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log()
    expected = {0.0: 0, 0.2: 0, 0.25 - 2**-53: 0, 0.25: 2, 0.5: 2, 0.75 - 2**-53: 2, 0.75: 3, 1 - 2**-53: 3}
    u = torch.tensor(list(expected), dtype=torch.float64)
    assert draw(logits.expand(len(u), 4), u).tolist() == list(expected.values())


@pytest.mark.parametrize("kept", [{1}, {0, 3}, {2, 3}, {1, 2}])
def test_a_masked_token_is_never_drawn_even_at_the_ends_of_u(kept):
    logits = torch.tensor([[0.0 if token in kept else -INF for token in range(5)]])
    u = torch.cat([torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64), uniform(range(500), range(500))])
    assert set(draw(logits.expand(len(u), 5), u).tolist()) == kept


def test_a_row_without_finite_logits_gets_an_id_and_changes_no_other_row():
    logits = torch.tensor([[-INF] * 4, [-INF, -INF, 0.0, -INF], [math.nan] * 4])
    for u in (0.0, 0.9, 1 - 2**-53):
        drawn = draw(logits, torch.full((3,), u, dtype=torch.float64))
        assert drawn[0] in range(4)  # the sampler replaces it, but an id past the end could crash
        assert drawn[1] == 2


def test_u_just_below_1_draws_the_last_token_of_a_large_vocabulary():
    logits = torch.zeros(1, 151_936)
    assert draw(logits, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 151_935
    assert draw(logits, torch.tensor([0.0], dtype=torch.float64)).item() == 0
