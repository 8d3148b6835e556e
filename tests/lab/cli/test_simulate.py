"""`nanoinfer simulate`: sweeps, searches, and mistakes in one sentence."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.main import app
from nanoinfer_lab.simulate import report
from nanoinfer_lab.simulate.report import SimulatedRun

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LOAD = "--num-prompts 20 --request-rate 20 --input-len 20-200 --output-len 8-40 --dtype bfloat16".split()


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2), encoding="utf-8")
    given = ["simulate", "-m", str(tmp_path / "config.json"), "--hardware", "laptop", *LOAD]
    return lambda *arguments: CliRunner().invoke(app, [*given, *arguments])


def results_of(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["results"]


def test_a_sweep_of_any_options_prints_a_row_for_each_combination(run, tmp_path):
    swept = ("--sweep", "max_num_seqs=1,8", "--sweep", "hardware=laptop,M4", "--sweep", "--input-len=20,100-200")
    found = results_of(run(*swept, "--json"))
    assert [one["choice"] for one in found] == [
        {"max_num_seqs": number, "hardware": hardware, "input_len": length}
        for number in (1, 8)
        for hardware in ("laptop", "M4")
        for length in ("20", "100-200")
    ]
    assert len({one["figures"]["ttft_ms"]["p50"] for one in found}) == len(found)
    assert len(run(*swept).stdout.splitlines()) >= len(found)
    (tmp_path / "a.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}', encoding="utf-8")
    recorded = ["simulate", "--hardware", "laptop", "--sweep", f"trace={tmp_path / 'a.jsonl'}", "--json"]
    assert "a.jsonl" in str(results_of(CliRunner().invoke(app, recorded))[0]["choice"])
    named = results_of(CliRunner().invoke(app, ["simulate", "--hardware", "laptop", "--workload", "A,B16", "--json"]))
    assert [one["choice"] for one in named] == [{"workload": "A"}, {"workload": "B16"}]


def test_a_price_is_that_of_all_devices(run):
    first, second = results_of(run("--price", "2", "--sweep", "num_engines=1,3", "--json"))
    for one, num_engines in ((first, 1), (second, 3)):
        hours, tokens = one["figures"]["duration_s"] / 3600, one["figures"]["num_output_tokens"]
        assert one["cost_per_million_output_tokens"] == pytest.approx(2 * num_engines * hours / tokens * 1e6)


def test_a_search_finds_the_best_of_a_sweep(run):
    values = ("--sweep", "max_num_seqs=1,4,8", "--goodput", "ttft:100 tpot:10", "--json")
    *tried, best = results_of(run(*values, "--find", "goodput"))
    goodputs = [one["figures"]["goodput_requests_per_s"] for one in results_of(run(*values))]
    assert best["figures"]["goodput_requests_per_s"] == max(goodputs) > min(goodputs)
    assert best in tried


def test_a_search_tries_few_of_all_settings():
    """The best is (4, 30), and neither setting alone finds it."""

    def scored(choice):
        goodput = -((choice["max_num_seqs"] - 4) ** 2) - (choice["chunk_size"] - 30) ** 2 + 10_000.0
        return SimulatedRun(choice, None, SimpleNamespace(goodput_requests_per_s=goodput), None)

    grid = {"max_num_seqs": (1, 2, 4, 8), "chunk_size": (10, 20, 30, 40, 50)}
    *tried, best = report.find(scored, grid, {"max_num_seqs": 8, "chunk_size": 50})
    assert best.choice == {"max_num_seqs": 4, "chunk_size": 30}
    assert len(tried) < 20
