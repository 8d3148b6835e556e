"""docs/scaling.md shows what docs/scaling.py computes. `python docs/scaling.py` writes the figures after a change."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "scaling.py"
CARDS = {"0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2, "14B": 14.8, "32B": 32.8}  # billion parameters, of the model cards


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_figures_of_the_script(scaling):
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert "32B" in scaling.MARKED.search(page)[0]
    assert scaling.with_figures(page) == page, "run: python docs/scaling.py"
    assert scaling.with_figures(scaling.MARKED.sub("stale\n", page)) == page


def test_the_models_have_the_parameters_of_their_cards(scaling):
    found = {name: round(scaling.costs_of(name, 1).sizes.num_weights / 1e9, 1) for name in scaling.MODELS}
    assert found == CARDS


def test_the_formulas_give_what_one_computes_by_hand(scaling):
    sizes = scaling.costs_of("8B", 1).sizes  # 36 layers, 8 KV heads of 128, hidden 4096
    assert sizes.cache.bytes_per_token(scaling.DTYPE) == 36 * 8 * 128 * 2 * 2 == 147_456
    num_read = (sizes.num_weights - 151_936 * 4096) * 2 + 4096 * 147_456  # one row of the embedding is read
    assert scaling.step_s("8B", 1, num_seqs=1, num_new=1) == pytest.approx(num_read / 4.8e12, rel=1e-3)
    waiting_s = 36 * 2 * (10e-6 + 1.75 * 4096 * 2 / 450e9)
    assert scaling.step_s("8B", 8, num_seqs=1, num_new=1) == pytest.approx(num_read / 4.8e12 / 8 + waiting_s, rel=1e-3)
    sizes = scaling.costs_of("32B", 1).sizes
    left = 141e9 * 0.9 - sizes.num_weights * 2
    assert scaling.num_users(sizes, 1, 4096) == int(left / (4096 * 64 * 8 * 128 * 2 * 2))
