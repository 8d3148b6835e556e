"""`nanoinfer bench`: described workloads, hand-checked figures and counts, tables and JSON."""

import itertools
import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import transformers
from typer.testing import CliRunner

from nanoinfer import LLM
from nanoinfer.cli.main import app
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.tracing import Recorder, StepScheduled
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer_lab.bench import ladder, offline, random_models, roofline, workloads
from nanoinfer_lab.bench.offline import run_workload
from nanoinfer_lab.bench.timing import RequestTiming, Run, figures
from nanoinfer_lab.bench.workloads import Workload
from nanoinfer_lab.cli import bench
from tests.helpers import tiny_models

pytestmark = pytest.mark.slow

SMALL = Workload(name="small", input_lens=(3, 9, 1), output_lens=(5, 1, 4))


def described(**changes):
    arguments = {"num_prompts": 50, "input_len": "4-9", "output_len": "7", "request_rate": math.inf, "sampling": {}, "seed": 0}
    return workloads.described(**arguments | changes)


def test_a_described_workload_has_its_lengths_and_its_rate():
    workload = described(request_rate=100.0)
    assert set(workload.input_lens) == {4, 5, 6, 7, 8, 9}  # one missed: 1 in 1,500 seeds, and the seed is fixed
    assert set(workload.output_lens) == {7}
    assert list(workload.arrivals) == sorted(workload.arrivals)
    assert 0.2 < workload.arrivals[-1] < 1.0  # 49 gaps of 0.01 s on average, standard deviation 0.07
    assert described().arrivals == ()
    assert described(request_rate=100.0) == workload != described(request_rate=100.0, seed=1)


def test_requests_come_in_bursts_if_the_user_says_so():
    """A gamma distribution of shape k has a variance of mean squared / k."""
    for burstiness in (0.1, 1.0, 10.0):
        arrivals = described(num_prompts=2001, request_rate=10.0, burstiness=burstiness).arrivals
        gaps = [after - before for before, after in pairwise(arrivals)]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(0.1, rel=0.2)
        assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.01 / burstiness, rel=0.3)


def test_the_prompts_of_a_session_grow():
    workload = described(num_prompts=9, input_len="300", output_len="200", request_rate=1.0, turns=3, think_time=5.0)
    assert sorted(workload.input_lens) == [300] * 3 + [800] * 3 + [1300] * 3
    assert list(workload.arrivals) == sorted(workload.arrivals)
    prompts = workload.prompts(vocab_size=256, run=1)
    for long in (prompt for prompt in prompts if len(prompt) > 300):
        assert sum(long[:-500] == prompt for prompt in prompts) == 1


def test_every_run_of_a_workload_has_different_tokens_and_the_same_lengths():
    first, second = SMALL.prompts(50, 1), SMALL.prompts(50, 2)
    assert [*map(len, first)] == [*map(len, second)] == [3, 9, 1]
    assert first == SMALL.prompts(50, 1) != second
    one, other = (workloads.WORKLOADS[name].prompts(50257, 1)[0][:32] for name in ("A", "C"))
    assert one != other


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"input_len": "0"}, "input_len must be a number of tokens such as 128, or a range such as 16-256, got '0'"),
        ({"output_len": "9-4"}, "output_len must be .*, got '9-4'"),
        ({"output_len": "many"}, "output_len must be .*, got 'many'"),
        ({"request_rate": 0.0}, r"request_rate must be > 0 requests per second, got 0.0; inf is all at once"),
        ({"burstiness": 0.0, "request_rate": 2.0}, "burstiness must be finite and > 0, got 0.0"),
        ({"burstiness": math.inf, "request_rate": 2.0}, "burstiness must be finite and > 0, got inf"),
        ({"burstiness": 0.5}, "burstiness must be 1 with request_rate inf, got 0.5; leave burstiness out"),
        ({"think_time": 5.0}, "turns must be > 1 with think_time 5.0, got 1; leave think_time out"),
        ({"think_time": -1.0, "turns": 2}, "think_time must be finite and > 0 seconds, got -1.0"),
        ({"think_time": math.inf, "turns": 2}, "think_time must be finite and > 0 seconds, got inf"),
    ],
)
def test_an_impossible_workload_is_refused(changes, sentence):
    with pytest.raises(InvalidValueError, match=sentence):
        described(**changes)


def test_hand_checked_figures():
    """Two requests: tokens at 1, 2, 4 s from an arrival at 0; one token at 3 s from an arrival at 1."""
    found = figures([RequestTiming(0.0, [1.0, 2.0, 4.0], 5, 3), RequestTiming(1.0, [3.0], 1, 1)])
    assert (found.duration_s, found.output_tokens_per_s, found.total_tokens_per_s, found.requests_per_s) == (4, 1, 2.5, 0.5)
    assert (found.ttft_ms.p50, found.itl_ms.p50, found.tpot_ms.p50) == (1500, 1500, 1500)
    assert found.itl_ms.p99 == 1990  # between 1000 and 2000, linearly
    assert figures([RequestTiming(0.0, [1.0], 1, 1)]).itl_ms is None


def test_every_token_of_a_workload_has_a_time():
    llm = LLM("tiny-gpt2", kv_cache_memory=2**22)
    late = Workload(name="late", input_lens=(3, 3), output_lens=(2, 2), arrivals=(0.0, 0.3))
    for workload in (SMALL, late):
        ours = run_workload(llm, workload, 1)
        assert [len(timing.token_times) for timing in ours] == list(workload.output_lens)
        for timing in ours:
            assert timing.arrival < timing.token_times[0]
            assert timing.token_times == sorted(timing.token_times)
    assert ours[1].arrival - ours[0].arrival == pytest.approx(0.3)


def parts_of(family, folder, **step):
    model = loader.on_meta(Checkpoint.open(str(tiny_models.save(family, folder / family))))[0]
    return {part.name: part for part in roofline.count(model, torch.float32, **step)}


def test_the_parts_of_a_step_have_hand_checked_counts(tmp_path):
    """2 layers of 48, 4 heads, fp32: 48 x 144 + 48 x 48 weights in a layer's projections, 2 x 48 x 192 in its MLP."""
    parts = parts_of("gpt2", tmp_path, num_seqs=3, num_new=1, context=10)
    projections, mlp = 2 * (48 * 144 + 48 * 48), 2 * 2 * 48 * 192
    expected = {  # bytes and operations
        "attention projections": (4 * projections, 2 * 3 * projections),
        "MLP": (4 * mlp, 2 * 3 * mlp),
        "attention": (3 * 10 * 2 * 48 * 2 * 4, 3 * 10 * 4 * 48 * 2),  # sequences, tokens, k and v, hidden, layers, bytes
        "cache write": (3 * 2 * 48 * 2 * 4, 0),
    }
    assert {name: (parts[name].num_bytes, parts[name].num_operations) for name in expected} == expected
    assert parts["LM head"].num_operations == 2 * 3 * 48 * tiny_models.VOCAB_SIZE
    prefill = parts_of("gpt2", tmp_path, num_seqs=1, num_new=4, context=4)
    assert prefill["attention"].num_operations == (1 + 2 + 3 + 4) * 4 * 48 * 2


def test_windows_states_and_experts_have_hand_checked_counts(tmp_path):
    """A window of 24; two layers with a state of 4 x 12 x 8 and 80 x 3 numbers, and one of attention; 3 of 8 experts."""
    attention = parts_of("mistral_window", tmp_path, num_seqs=3, num_new=1, context=100)["attention"]
    assert attention.num_bytes == 3 * 24 * 2 * (2 * 2 * 8) * 4  # sequences, tokens, layers, a token's k and v, bytes
    attention = parts_of("mistral_window", tmp_path, num_seqs=1, num_new=10, context=100)["attention"]
    assert attention.num_bytes == 33 * 2 * (2 * 2 * 8) * 4  # the first of the ten sees 23 tokens before it
    attention = parts_of("mistral_window", tmp_path, num_seqs=1, num_new=26, context=26)["attention"]
    assert attention.num_operations == (sum(range(1, 25)) + 24 + 24) * 2 * 4 * (4 * 8)
    attention = parts_of("qwen3_5", tmp_path, num_seqs=3, num_new=1, context=100)["attention"]
    assert attention.num_bytes == 3 * 100 * (2 * 2 * 16) * 4 + 2 * 3 * 2 * (4 * 12 * 8 + 80 * 3) * 4
    mlp = parts_of("qwen3_moe", tmp_path, num_seqs=1, num_new=1, context=1)["MLP"]
    assert mlp.num_bytes == 2 * (3 * (3 * 48 * 32) + 8 * 48) * 4  # layers, experts and router


def test_all_sequences_of_a_workload_run_at_once_in_the_memory_that_bench_takes_beside_a_draft_model(tmp_path):
    workload = described(num_prompts=16, input_len="60", output_len="4")
    large_states = {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 32}
    for family, overrides in (("qwen3_5", large_states), ("gemma3_window", {})):
        path, recorder = str(tiny_models.save(family, tmp_path / family, **overrides)), Recorder()
        with offline.load(path, [workload], dtype="auto", device="cpu", tracer=recorder) as llm:
            run_workload(llm, workload, 1)
        assert [event.num_new_tokens for event in recorder.of(StepScheduled)[-3:]] == [(1,) * 16] * 3
    drafter = {"method": "draft_model", "model": "tiny-qwen3"}
    with offline.load(None, [workload], dtype="auto", device="cpu", speculative_config=drafter) as llm:
        assert llm.info.num_blocks * llm.info.block_size >= sum(workload.num_tokens)


def test_the_least_time_of_a_run_is_that_of_its_steps(gpt2_path):
    """Two prompts in one step, then a step of both and a third prompt, and one of the second. Only reading takes time."""
    model = loader.on_meta(Checkpoint.open(str(gpt2_path)))[0]
    machine = roofline.Machine(bandwidth=1.0, gemm_rates={torch.float32: float("inf")})
    timings = [
        RequestTiming(0.0, token_times=[1.0, 2.0], num_prompt_tokens=3),
        RequestTiming(0.0, token_times=[1.0, 2.0, 3.0], num_prompt_tokens=5),
        RequestTiming(0.0, token_times=[2.0], num_prompt_tokens=4),
    ]

    def num_bytes(bits=None, **step):
        return sum(part.num_bytes for part in roofline.count(model, torch.float32, **step, weight_bits=bits))

    for bits in (None, 8):
        steps = ((2, 4, 4), (2, 1, 5), (1, 1, 7))  # sequences, new tokens, the mean context
        expected = sum(num_bytes(bits, num_seqs=n, num_new=new, context=context) for n, new, context in steps)
        weights = num_bytes(bits, num_seqs=0, num_new=0, context=0)
        expected += num_bytes(bits, num_seqs=1, num_new=4, context=4) - weights  # of the third, in the step of two others
        assert roofline.least_s_of_run(timings, machine, model, torch.float32, bits) == expected
    assert num_bytes(8, num_seqs=1, num_new=1, context=1) < num_bytes(num_seqs=1, num_new=1, context=1)


def test_a_random_model_is_a_checkpoint_of_its_sizes(tmp_path, monkeypatch):
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4}
    monkeypatch.setitem(random_models.RANDOM_MODELS, "tiny", ("GPT2Config", sizes, "bfloat16"))
    random_models.write_checkpoint("tiny", tmp_path)
    model = loader.load_model(Checkpoint.open(str(tmp_path)))
    assert (model.config.hidden_size, model.config.vocab_size) == (48, 50257)
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


OWN = ("--model", "tiny-gpt2", "--num-prompts", "2", "--input-len", "4", "--output-len", "2-3", "--repeats", "1")


def test_a_report_has_each_request_what_was_counted_and_where_it_was_measured():
    drafts = ("--speculative-config", '{"method": "ngram", "adaptive": false}')
    result = run("throughput", *OWN[:4], "--output-len", "60", "--repeats", "2", "--max-num-seqs", "1", *drafts, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["machine"].keys() == {"CPU", "cores", "memory", "system", "GPU"}
    assert report["versions"]["torch"] == torch.__version__
    settings = report["settings"]
    assert (settings["max_num_seqs"], settings["threads"]) == (1, torch.get_num_threads())
    assert (settings["dtype"], settings["device"]) == ("float32", "cpu")  # auto, before
    [measured] = report["results"]
    assert measured["workload"]["input_lens"] == [128, 128]
    assert len(measured["runs"]) == 2
    for one in measured["runs"]:
        counts = one["counts"]
        assert (counts["prefix_cache_queries"], counts["prefix_cache_hits"], counts["num_preemptions"]) == (256, 0, 0)
        assert 0 < counts["spec_decode_num_accepted_tokens"] <= counts["spec_decode_num_draft_tokens"]
        for row in one["requests"]:
            assert row["itl_ms"].count(0) > 0  # tokens of a draft arrive together
            assert (row["num_prompt_tokens"], row["num_output_tokens"], row["finish_reason"]) == (128, 60, "length")
            assert sum(row["itl_ms"]) == pytest.approx(59 * row["tpot_ms"], abs=0.1)
        assert one["requests"][1]["ttft_ms"] > sum(one["requests"][0]["itl_ms"])  # one sequence at a time
        assert one["figures"]["output_tokens_per_s"] == pytest.approx(120 / one["figures"]["duration_s"])
    speeds = [one["figures"]["output_tokens_per_s"] for one in measured["runs"]]
    assert measured["figures"]["output_tokens_per_s"] == max(speeds)  # the upper of two medians


def test_a_run_has_what_the_counters_grew_by():
    timings = [RequestTiming(5.0, [5.5], 3, 1, "length"), RequestTiming(4.5, error="refused")]
    found = Run.of(
        figures(timings), timings, {"num_preemptions": 3}, {"num_preemptions": 5, "prefix_cache_hits": 7, "other": 1}
    )
    assert found.counts == {"num_preemptions": 2, "prefix_cache_hits": 7}
    good, failed = found.requests
    assert (good["arrival_s"], good["ttft_ms"], good["tpot_ms"]) == (0.5, 500.0, None)
    assert (failed["arrival_s"], failed["ttft_ms"], failed["error"]) == (0.0, None, "refused")


def test_a_report_is_a_table():
    for command, words in (("throughput", ("yours", "output tok/s", "TTFT ms")), ("latency", ("TPOT", "ITL", "p95 ms"))):
        result = run(command, *OWN)
        assert result.exit_code == 0, result.stderr
        assert [word for word in words if word not in result.stdout] == []


def test_the_roofline_reports_shares_of_the_limit(small_roofline):
    result = run("roofline", "--model", "tiny-gpt2", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [phase["num_decoding"] for phase in report["phases"]] == [0, 1, 4, 8, 4]
    for phase in report["phases"]:
        assert phase["least_ms"] == pytest.approx(sum(part["least_ms"] for part in phase["parts"]))
        assert phase["share_of_limit"] == pytest.approx(phase["least_ms"] / phase["measured_ms"])


RECORDING = """
{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}
{"timestamp": 1000, "input_length": 1030, "output_length": 3, "hash_ids": [7, 8, 11], "session": "a field of another tool"}

{"timestamp": 1500.5, "input_length": 4, "output_length": 1}
"""


@pytest.fixture
def recording(tmp_path):
    (tmp_path / "calls.jsonl").write_text(RECORDING)
    return tmp_path / "calls.jsonl"


def test_a_recording_gives_arrivals_lengths_and_shared_prefixes(recording):
    workload = workloads.recorded(recording, sampling={"temperature": 0.5})
    assert (workload.name, workload.arrivals) == ("calls", (0.0, 0.5005, 2.0))
    assert (workload.input_lens, workload.output_lens) == ((1030, 4, 600), (3, 1, 5))
    first, second, third = workload.prompts(vocab_size=256, run=1)
    assert [len(prompt) for prompt in (first, second, third)] == [1030, 4, 600]
    assert first[:512] == third[:512]
    assert first[512:600] != third[512:]
    assert workload.prompts(vocab_size=256, run=2)[0][:512] != first[:512]
    assert workloads.recorded(recording, num_prompts=2, sampling={}).arrivals == (0.0, 0.5005)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"


def test_a_recording_of_azure_gives_arrivals_and_lengths(tmp_path):
    (path := tmp_path / "azure.csv").write_text(AZURE)
    workload = workloads.recorded(path, sampling={})
    assert (workload.input_lens, workload.output_lens, workload.hash_ids) == ((374, 396), (44, 109), ())
    assert workload.arrivals == (0.0, pytest.approx(4.314579, abs=1e-5))


GOOD_LINE = '{"timestamp": 1, "input_length": 4, "output_length": 1}\n'
WRONG_LINE = "calls.jsonl, line 2, must be such as .* got"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GOOD_LINE + "5", WRONG_LINE),
        (GOOD_LINE + "{", WRONG_LINE),
        (GOOD_LINE + '{"timestamp": 1, "input_length": 4}', WRONG_LINE),
        (GOOD_LINE + '{"timestamp": -1, "input_length": 4, "output_length": 1}', WRONG_LINE),
        (GOOD_LINE + '{"timestamp": "soon", "input_length": 4, "output_length": 1}', WRONG_LINE),
        (GOOD_LINE + '{"timestamp": 1, "input_length": 4, "output_length": 1.5}', WRONG_LINE),
        (GOOD_LINE + '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}', WRONG_LINE),
        (GOOD_LINE + '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": 3}', WRONG_LINE),
        (AZURE + "2023-11-16 18:15:46.6805900,374,0", "calls.jsonl, line 4, must be such as 2023-11-16 .* got"),
        (AZURE + "today,374,44", "calls.jsonl, line 4, must be such as 2023-11-16 .* got"),
        ("\n", "has no requests"),
        (None, "cannot be read"),
    ],
)
def test_a_recording_that_is_no_list_of_requests_is_refused(recording, text, sentence):
    recording.unlink() if text is None else recording.write_text(text)
    with pytest.raises(InvalidValueError, match=sentence):
        workloads.recorded(recording, sampling={})


def test_a_recording_is_run_under_a_policy_of_the_users(recording):
    recording.write_text("\n".join(f'{{"timestamp": {i}, "input_length": {8 + i}, "output_length": 2}}' for i in range(4)))
    policy = ("--scheduler-cls", "examples.shortest_job_first.ShortestJobFirst", "--repeats", "1")
    result = run("latency", "--model", "tiny-gpt2", "--trace", str(recording), "--num-prompts", "3", *policy, "--json")
    assert result.exit_code == 0, result.stderr
    [measured] = json.loads(result.stdout)["results"]
    assert (measured["workload"]["name"], measured["figures"]["num_requests"]) == ("calls", 3)


@pytest.fixture
def small_ladder(monkeypatch):
    """Four greedy requests, two at a time, at a clock that each look at it moves by a second."""
    seconds = itertools.count()
    monkeypatch.setattr(ladder, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    monkeypatch.setattr(offline, "time", ladder.time)
    monkeypatch.setattr(ladder, "NUM_SEQS", 2)
    greedy = replace(ladder.WORKLOAD, input_lens=(24,) * 4, output_lens=(2, 6) * 2, sampling={"temperature": 0.0})
    monkeypatch.setattr(ladder, "WORKLOAD", greedy)
    return greedy


def test_the_plain_versions_have_the_engines_tokens_and_batches_take_fewer_steps(small_ladder):
    model = loader.load_model(Checkpoint.open("tiny-gpt2"), "float32")
    prompts = small_ladder.prompts(model.config.vocab_size, 1)
    assert len({tuple(prompt[:18]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4
    outputs = LLM("tiny-gpt2", kv_cache_memory=2**22, enforce_eager=True).generate(
        prompts, small_ladder.params(), use_tqdm=False
    )
    steps = []
    with torch.inference_mode():
        for arguments in ladder.PLAIN.values():
            if "num_seqs" in arguments:
                arguments = arguments | {"num_seqs": 2}
            timings, answers = ladder.run_plainly(model, small_ladder, 1, **arguments)
            assert answers == [list(output.outputs[0].token_ids) for output in outputs]
            assert [timing.num_output_tokens for timing in timings] == [2, 6, 2, 6]
            steps.append(max(timing.token_times[-1] for timing in timings) - timings[0].arrival)
    assert steps == [16, 16, 12, 10]  # 2 + 6 + 2 + 6, the longest of each pair, and 6 + 2 beside 2 + 6, which is one idle place


def test_a_rung_has_the_medians_of_its_runs(gpt2_path):
    """One request whose tokens come after 1, 2 and 4 seconds, or at half or a quarter of that speed."""
    model = loader.on_meta(Checkpoint.open(str(gpt2_path)))[0]
    runs = [[RequestTiming(0.0, [1.0 * n, 2.0 * n, 4.0 * n], num_prompt_tokens=5, num_output_tokens=3)] for n in (4, 1, 2)]
    steps = ((5, 5), (1, 6), (1, 7))  # new tokens, and those that the last of them sees
    num_bytes = sum(
        part.num_bytes
        for num_new, context in steps
        for part in roofline.count(model, torch.float32, num_seqs=1, num_new=num_new, context=context)
    )
    found = ladder.rung("any", runs, 1000.0, model, torch.float32)
    assert found == ladder.Rung("any", 3 / 8, pytest.approx(num_bytes / 1000 / 8), 8000.0)


def test_the_ladder_has_eleven_versions_with_one_more_idea_each(small_ladder, monkeypatch):
    names, given, load = {name for arguments in ladder.ENGINE.values() for name in arguments}, [], offline.load

    def loaded(checkpoint, workloads, **arguments):
        given.append({name: arguments.get(name) for name in names})
        return load(checkpoint, workloads, **arguments)

    monkeypatch.setattr(ladder, "load", loaded)
    monkeypatch.setattr(roofline, "measure_bandwidth", lambda device: 1e9)
    result = run("ladder", "--model", "tiny-gpt2", "--repeats", "1", "--json")
    assert result.exit_code == 0, result.output
    rungs = json.loads(result.stdout)["rungs"]
    assert [rung["version"] for rung in rungs] == [*ladder.PLAIN, *ladder.ENGINE]
    assert len(rungs) == 11
    assert [sum(before[name] != after[name] for name in names) for before, after in pairwise(given)] == [2, 1, 2, 1, 2, 1]
    assert all(rung["tokens_per_s"] > 0 and rung["bandwidth_share"] > 0 for rung in rungs)
    bench._show_ladder({"machine": "this machine", "rungs": rungs})
