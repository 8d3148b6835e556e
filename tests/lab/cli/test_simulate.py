"""`nanoinfer simulate`: sweeps, searches, and mistakes in one sentence."""

import json

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.main import app

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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sweep", "max_seqs=3"), "--sweep has no option 'max_seqs'; did you mean --max-num-seqs?"),
        (("--sweep", "max_num_seqs=a"), "--sweep --max-num-seqs must be JSON, got 'a'"),
        (("--sweep", "max_num_seqs=0"), "--max-num-seqs must be >= 1, got 0"),
        (("--find", "ttft", "--goodput", "ttft:1"), "--find must be goodput, with the limits of --goodput and one workload"),
        (("--find", "goodput"), "--find must be goodput, with the limits of --goodput and one workload"),
    ],
)
def test_mistakes_are_one_sentence(run, arguments, sentence):
    result = run(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert sentence in result.stderr
