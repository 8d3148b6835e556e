"""Sweeps and searches of settings, and the table."""

from dataclasses import replace

import pytest

from nanoinfer.config import EngineArgs
from nanoinfer_lab.bench.workloads import described
from nanoinfer_lab.simulate import report
from nanoinfer_lab.simulate.costs import ModelSizes
from nanoinfer_lab.simulate.hardware import HARDWARE
from nanoinfer_lab.simulate.report import SimulatedRun
from nanoinfer_lab.simulate.simulator import requests_of, simulate

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LIMITS = {"ttft": 300.0, "tpot": 30.0}
WORKLOAD = described(num_prompts=30, input_len="20-200", output_len="8-40", request_rate=20.0, sampling={}, seed=0)


def run(choice):
    settings = EngineArgs(dtype="bfloat16", **choice)
    result = simulate(ModelSizes.of(GPT2), HARDWARE["laptop"], settings, requests_of(WORKLOAD))
    return SimulatedRun.of(choice, result, LIMITS, price_per_hour=2.0)


@pytest.fixture(scope="module")
def runs():
    return report.sweep(run, {"chunk_size": (64, 256), "max_num_seqs": (1, 4, 16)})


def test_a_sweep_has_the_cost_and_the_goodput_of_every_combination(runs):
    assert [tuple(one.choice.values()) for one in runs] == [(c, n) for c in (64, 256) for n in (1, 4, 16)]
    assert runs[0].cost == pytest.approx(2.0 * runs[0].figures.duration_s / 3600 * 1e6 / sum(WORKLOAD.output_lens))
    for one in runs:
        num_good = sum(timing.ttft <= 0.3 and timing.tpot <= 0.03 for timing in one.result.timings)
        assert one.figures.goodput_requests_per_s == pytest.approx(num_good / one.figures.duration_s)
    assert len({one.figures.goodput_requests_per_s for one in runs}) > 1


def test_a_search_ends_with_the_best_settings(runs):
    calls = []

    def scored(choice):  # the best is (4, 30), and neither setting alone finds it
        calls.append(choice)
        goodput = -((choice["max_num_seqs"] - 4) ** 2) - (choice["chunk_size"] - 30) ** 2 + 10_000.0
        return SimulatedRun(choice, runs[0].result, replace(runs[0].figures, goodput_requests_per_s=goodput), None)

    grid = {"max_num_seqs": (1, 2, 4, 8), "chunk_size": (10, 20, 30, 40, 50)}
    *tried, best = report.find(scored, grid, {"max_num_seqs": 8, "chunk_size": 50})
    assert best.choice == {"max_num_seqs": 4, "chunk_size": 30}
    assert len(tried) == len(calls) < 20 + 1


def test_the_table_has_a_row_for_each_run_and_leaves_empty_columns_out(runs):
    columns, rows = report.table(runs)
    assert columns[:2] == ["chunk_size", "max_num_seqs"]
    assert [row[:2] for row in rows] == [[str(value) for value in one.choice.values()] for one in runs]
    assert "per M tok" in columns
    without = [SimulatedRun.of({}, runs[0].result, {}, None)]
    assert not {"per M tok", "goodput/s", "chunk_size"} & set(report.table(without)[0])
