"""The other programs of benchmarks/: a report in Markdown, generation with and without drafts, drawing for 64 rows."""

import datetime
import json
import re

import pytest
from typer.testing import CliRunner

from benchmarks import compare, contexts, lora, prefix_cache_dir, report, sampler, scheduling, speculation, weights
from nanoinfer.engine.observer import Planner
from nanoinfer_lab.bench import workloads

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_report_compares_what_is_too_large_for_a_padded_batch_with_the_roofline_alone(small_roofline, monkeypatch):
    monkeypatch.setattr(report, "LARGEST_BATCH", 200)
    # Transformers pads the first, and a wrong number of its tokens would be an error.
    mixed = workloads.Workload(name="A", input_lens=(3, 9, 1), output_lens=(5, 1, 4), sampling={"top_k": 4, "top_p": 0.9})
    large = workloads.Workload(name="F", input_lens=(9, 90), output_lens=(3, 30))
    monkeypatch.setattr(workloads, "WORKLOADS", {one.name: one for one in (mixed, large)})
    result = CliRunner().invoke(report.app, ["--model", "tiny-gpt2", "--workload", "A,F", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert re.match(rf"### tiny-gpt2 in float32 on .*{datetime.date.today()}\n", result.stdout)
    rows = re.findall(r"^\| ([AF]) \| [\d,]+ tok/s \| [\d,]+ tok/s \| \d+\.\d\d \|$", result.stdout, re.MULTILINE)
    assert rows == ["A"]
    assert result.stdout.count("\n| decode, ") == 4
    (row,) = re.findall(r"^\| F, [\d,]+ tok/s \| ([\d.,]+) \| ([\d.,]+) \| (\d+)% \|$", result.stdout, re.MULTILINE)
    least, measured, share = (float(number.replace(",", "")) for number in row)
    assert 0 < least < measured
    assert share == pytest.approx(100 * least / measured, abs=1)


def test_a_line_of_results_has_the_median_and_the_range_of_every_run_and_a_prefill_is_in_milliseconds():
    runs = {"nanoinfer": [5.0, 4.0, 8.0], "vllm": [2.0, 2.5, 1000 / 3]}
    prefill, other = (compare.Comparison(name, name == "C", runs, {"vllm": "vLLM 1.2"}) for name in ("C", "E, temperature 1.0"))
    first, second = compare.result_lines([prefill, other], "Zen 4", "GPT-2", "float32")
    assert (first["unit"], first["nanoinfer"], first["other"], first["runs"]) == ("ms", [200, 125, 250], [400, 3.0, 500], 3)
    assert (second["unit"], second["nanoinfer"], second["other"]) == ("tokens/s", [5.0, 4.0, 8.0], [2.5, 2.0, 333])
    assert (second["workload"], second["note"]) == ("E", "a temperature alone")
    assert (first["machine"], first["baseline"], first["date"]) == ("Zen 4", "vLLM 1.2", str(datetime.date.today()))


def test_a_row_of_results_that_cannot_be_written_is_refused_before_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "compare", None)
    for arguments, sentence in (
        ("--repeats 4 --machine m", "a row of results needs repeats >= 5, a machine and a dtype"),
        ("--repeats 5 --machine m", "r.jsonl: there is no such folder; give another path"),
    ):
        given = ["--results", str(tmp_path / "no folder" / "r.jsonl"), "--dtype", "float32", *arguments.split()]
        assert sentence in " ".join(CliRunner().invoke(compare.app, given).stderr.split())


def test_speculation_is_measured_with_and_without_drafts(monkeypatch):
    monkeypatch.setattr(speculation, "PROMPT_LEN", 4)
    monkeypatch.setattr(speculation, "OUTPUT_LEN", 40)
    monkeypatch.setattr(speculation, "CASES", (("one id", [5], 1), ("two streams", None, 2)))
    run_workload, runs = speculation.run_workload, set()

    def watched(llm, *arguments):
        runs.add((type(llm.engine.planner) is Planner, llm.engine.observer is llm.engine.scheduler.observer))
        return run_workload(llm, *arguments)

    monkeypatch.setattr(speculation, "run_workload", watched)
    result = CliRunner().invoke(speculation.app, ["--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    assert runs == {(True, True), (False, False)}  # without drafts the speculator does not observe either
    repeating, _ = json.loads(result.stdout)
    assert repeating["name"] == "one id"
    assert repeating["accepted"] == repeating["drafted"] > 30  # two runs of 39 tokens, nearly all of them drafted
    assert repeating["ratio"] == repeating["drafting"] / repeating["plain"] > 0
    assert repeating["propose_us"] > 0
    refused = CliRunner().invoke(speculation.app, ["--train-steps", "2"])
    assert "--train-steps trains a random model, got none; give --random-model" in " ".join(refused.stderr.split())


def test_every_case_of_the_sampler_is_timed(monkeypatch):
    monkeypatch.setattr(sampler, "VOCAB_SIZES", (500,))
    result = CliRunner().invoke(sampler.app, ["--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    cases = json.loads(result.stdout)
    assert len(cases) == 8
    for case in cases:
        assert case["ratio"] == pytest.approx(case["theirs_ms"] / case["ours_ms"])


def test_weights_adapters_and_prefixes_of_a_folder_are_measured(qwen3_path):
    path, small = str(qwen3_path), {"rows": 3, "adapters": 2, "rank": 4, "tokens": 2, "rounds": 1}
    for medians, expected in (
        (weights.measure(path, "float32", rounds=1), ["load", "update_weights", "update_weights_from_path"]),
        (lora.measure(path, "float32", **small), ["plain", "no row with an adapter", "2 adapters"]),
        (prefix_cache_dir.measure(path, "float32", 200, 1), ["first token, cold", "in memory", "after a restart"]),
    ):
        assert list(medians)[-3:] == expected
        assert min(medians.values()) > 0


def test_the_scheduler_is_timed_alone(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scheduling", "--repeats", "1"])
    monkeypatch.setattr(scheduling, "PROMPT_TOKENS", 320)
    scheduling.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("us  ")[1] for line in lines] == list(scheduling.CASES)
    assert all(float(line.split()[0]) > 0 for line in lines)


@pytest.mark.parametrize("name", contexts.MODELS)
def test_decode_steps_are_timed_after_short_and_long_texts(name):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = contexts.SIZES | small | {"max_position_embeddings": 1024}
    steps = contexts.measure(name, "float32", [5, 600], 3, sizes)
    assert len(steps) == 2
    assert min(steps) > 0
