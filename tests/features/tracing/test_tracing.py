"""The events are complete and correct, and tracing changes no answer.

The events are replayed with simple data structures (a list of blocks per sequence) and compared with the engine's own state.
"""

import functools
import json
import random
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nanoinfer import LLM, BeamSearchParams, Recorder, SamplingParams
from nanoinfer.errors import InvalidValueError
from nanoinfer.execution import local_executor
from nanoinfer.features import tracing
from nanoinfer.features.tracing import StageApplied, StepScheduled, TokenAppended, TokenDrawn, stage_trace
from nanoinfer.features.tracing.stage_trace import TracingSampler
from nanoinfer.sampling.draw import uniform
from nanoinfer.sampling.sampler import Sampler
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan
from tests.helpers.tiny_models import assert_nothing_is_left

PREFIX = "Once upon a time, there was a kind duck named Max. Every morning, he ate three pancakes for breakfast."
PROMPTS = [PREFIX, f"{PREFIX} One", "Lily was", f"{PREFIX} One Wednesday", "Once upon a time", PREFIX]
PARAMS = [
    SamplingParams(temperature=0.7, seed=3, max_tokens=30, stop=["pancakes"]),
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(n=3, seed=5, top_k=5, max_tokens=12),
    SamplingParams(temperature=1.5, min_p=0.1, top_p=0.8, seed=1, max_tokens=25, logprobs=2),
    SamplingParams(presence_penalty=1.0, repetition_penalty=1.2, no_repeat_ngram_size=3, seed=9, max_tokens=18),
    SamplingParams(seed=2, max_tokens=9, prompt_logprobs=1),
]


@functools.cache
def bytes_of_a_block():
    return 2**20 // LLM(block_size=8, kv_cache_memory=2**20).engine.block_manager.num_blocks


def llm_with(tracer=None, num_blocks=15, **arguments):
    """Blocks of 8 tokens, few enough for preemptions and evictions."""
    return LLM(block_size=8, kv_cache_memory=num_blocks * bytes_of_a_block(), chunk_size=16, tracer=tracer, **arguments)


def run(prompts, params, **arguments):
    """What a recorder records of one call, and the outputs."""
    recorder = Recorder(**arguments)
    return recorder, LLM(tracer=recorder).generate(prompts, params, use_tqdm=False)


def answers_of(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_nothing_is_left(llm)
    return [output.outputs for output in outputs]


@pytest.fixture(scope="module")
def recorded():
    recorder = Recorder(stages=True)
    llm = llm_with(recorder)
    return recorder, [answers_of(llm), answers_of(llm)]


class Replay:
    """The block tables and the cached blocks, rebuilt from the events alone."""

    def __init__(self):
        self.tables = {}
        self.cached = set()

    def emit(self, event):
        match event:
            case tracing.BlocksShared(sequence_id, blocks):
                self.tables[sequence_id] = list(blocks)
            case tracing.BlocksAllocated(sequence_id, blocks):
                self.tables.setdefault(sequence_id, []).extend(blocks)
            case tracing.BlocksForked(parent_id, sequence_id, blocks):
                assert list(blocks) == self.tables[parent_id]
                self.tables[sequence_id] = list(blocks)
            case tracing.BlockCopied(sequence_id, source, target):
                table = self.tables[sequence_id]
                table[table.index(source)] = target
            case tracing.BlocksFreed(sequence_id, blocks):
                assert self.tables.pop(sequence_id) == list(blocks)
            case tracing.BlocksCached(_, blocks):
                self.cached |= set(blocks)
            case tracing.BlockEvicted(block):
                self.cached.remove(block)


@pytest.mark.slow
def test_a_tracer_changes_no_answer(recorded):
    answers = answers_of(llm_with())
    assert recorded[1][0] == answers
    for stages, async_scheduling in ((False, False), (False, True), (True, True)):
        assert answers_of(llm_with(Recorder(stages=stages), async_scheduling=async_scheduling)) == answers


def test_every_kind_of_event_is_emitted_and_becomes_a_line_of_json(recorded, tmp_path):
    recorder, answers = recorded
    drafting = Recorder()
    llm = llm_with(drafting, speculative_config={"method": "ngram", "adaptive": False})
    assert answers_of(llm) == answers[0]
    kinds = {type(event) for event in recorder.events + drafting.events}
    assert kinds | {tracing.BlocksReleased} == set(tracing.Event.__args__)  # that one: tests/features/hybrid/test_kv_groups.py
    recorder.to_jsonl(tmp_path / "run.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["event"] for row in rows] == [type(event).__name__ for event in recorder.events]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_block_events_replayed_are_the_engines_block_tables_after_every_step(async_scheduling):
    replay = Replay()
    engine, num_steps = llm_with(replay, async_scheduling=async_scheduling).engine, 0
    requests = [engine.add_request(engine.tokenizer.encode(p), params) for p, params in zip(PROMPTS, PARAMS, strict=True)]
    while engine.num_unfinished:
        engine.step()
        sequences = [seq for request in requests for seq in request.sequences]
        assert replay.tables == {seq.sequence_id: seq.block_table for seq in sequences if seq.block_table}
        assert replay.cached == set(engine.block_manager.index.ids.values())
        num_steps += 1
    assert num_steps > 20
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    assert replay.tables == {}


def test_beams_have_ids_of_their_own_and_release_all_blocks():
    replay, recorder = Replay(), Recorder()
    for tracer in (replay, recorder):
        llm_with(tracer).beam_search([PREFIX, "Lily was"], BeamSearchParams(beam_width=3, max_tokens=10))
    assert replay.tables == {}
    parents = {event.sequence_id: event.parent_id for event in recorder.of(tracing.BlocksForked)}
    assert len(parents) == len(recorder.of(tracing.BlocksForked)) > 20
    assert {name.split(".")[0] for name in parents} == {"beam0", "beam1"}
    computed = {name.split(".")[0] for event in recorder.of(tracing.BatchBuilt) for name in event.sequence_ids}
    assert computed == {"beam0", "beam1"}


def test_batch_built_has_every_tokens_id_position_and_slot(recorded):
    """Slots follow from the replayed block tables, positions from the lengths, ids from the prompts and the drawn tokens."""
    recorder, _ = recorded
    replay, known, num_tokens = Replay(), {}, 0
    block_size = recorder.of(tracing.EngineStarted)[0].block_size
    for event in recorder.events:
        replay.emit(event)
        if isinstance(event, tracing.RequestAdded):
            assert "".join(event.tokens) in PROMPTS
            for index in range(3):
                name = f"{event.request_id}.{index}" if index else event.request_id
                known[name] = list(event.prompt_token_ids)
        elif isinstance(event, TokenAppended):
            assert event.position == len(known[event.sequence_id])
            known[event.sequence_id].append(event.token_id)
        elif isinstance(event, tracing.BatchBuilt):
            for i, name in enumerate(event.sequence_ids):
                packed = slice(event.query_start_loc[i], event.query_start_loc[i + 1])
                positions = event.positions[packed]
                assert positions[-1] + 1 == event.seq_lens[i]
                assert event.input_ids[packed] == tuple(known[name][at] for at in positions)
                table = replay.tables[name]
                slots = tuple(table[at // block_size] * block_size + at % block_size for at in positions)
                assert event.slot_mapping[packed] == slots
                num_tokens += len(positions)
    assert num_tokens > 200
    steps = recorder.of(StepScheduled)  # each is counted, and timed
    assert (
        [event.step for event in steps] == list(range(len(steps))) == [event.step for event in recorder.of(tracing.StepTimed)]
    )
    assert all(set(event.sequence_ids) <= set(event.running) for event in steps)
    assert any(event.preempted for event in steps)


def test_the_released_texts_joined_are_the_answer(recorded):
    recorder, (first, _) = recorded
    shown, ends = {}, {}
    for event in recorder.of(TokenAppended):
        shown[event.sequence_id] = shown.get(event.sequence_id, "") + event.text
        if event.finish_reason:
            assert event.held == ""
            ends[event.sequence_id] = event.finish_reason
    expected = {f"{i}.{one.index}" if one.index else str(i): one for i, answer in enumerate(first) for one in answer}
    for name, one in expected.items():
        assert (shown[name], ends[name]) == (one.text, one.finish_reason)


def test_the_beginning_of_a_stop_string_is_reported_as_held():
    params = SamplingParams(temperature=0, max_tokens=40, stop=[" kindly"])
    recorder, [output] = run("Once upon a time, there was a", params)
    events = recorder.of(TokenAppended)
    held = [event for event in events if event.held]
    assert " kind" in output.outputs[0].text
    assert {event.held for event in held} <= {" ", " k", " ki", " kin", " kind", " kindl"}
    assert held[0].token.startswith(held[0].held)
    assert events[events.index(held[0]) + 1].text.startswith(held[0].held)  # it was no stop string after all


def test_u_is_in_the_interval_of_the_drawn_token(recorded):
    recorder, _ = recorded
    greedy = {event.request_id for event in recorder.of(tracing.RequestAdded) if event.params.get("temperature") == 0}
    appended = {(event.sequence_id, event.position, event.token_id) for event in recorder.of(TokenAppended)}
    for event in recorder.of(TokenDrawn):
        assert (event.sequence_id, event.position, event.token_id) in appended
        if event.sequence_id in greedy:
            assert event.u is None
            assert event.high - event.low == pytest.approx(max(part.high - part.low for part in event.intervals))
        else:
            assert event.low <= event.u < event.high
        ids = [part.token_id for part in event.intervals]
        assert ids == sorted(ids)
        assert all(a.high <= b.low for a, b in pairwise(event.intervals))
    # The number is a function of seed and position: request 0's seed is 3.
    first = next(event for event in recorder.of(TokenDrawn) if event.sequence_id == "0")
    assert first.u == uniform([3], [first.position]).item()


def test_a_rows_stages_follow_each_other_from_the_model_to_the_draw(recorded):
    recorder, _ = recorded
    by_position, order = {}, ["model", "apply_temperature", "keep_min_p", "keep_top_p"]
    for event in recorder.of(StageApplied):
        if event.sequence_id == "3":
            by_position.setdefault(event.position, []).append(event)
    for events in by_position.values():
        names = [event.stage for event in events][: len({event.stage for event in events})]
        assert names == [name for name in order if name in names]
        assert names[:2] == order[:2]
        for earlier, later in pairwise(events):
            if later.stage != "model":  # a second run of the prompt begins again
                after = {one.token_id: one.after for one in earlier.candidates}
                assert all(one.before == after[one.token_id] for one in later.candidates if one.token_id in after)
                assert later.num_left <= earlier.num_left


def test_stage_applied_and_token_drawn_equal_a_case_worked_out_by_hand():
    """p = [.5, .25, .25, 0]. Then the first is halved and the third dropped: [.5, .5, 0, 0]."""
    observer = tracing.TracingObserver(recorder := Recorder(), 4)
    seq = Sequence("7", [1, 2, 3], SamplingParams(), seed=0, max_num_tokens=9)
    observer.launched = StepPlan((ScheduledSequence(seq, 3),), rows=((seq, 2),))
    watch, p = TracingSampler(Sampler(), observer), torch.tensor([[0.5, 0.25, 0.25, 0.0]])
    watch.begin()
    for stage, left in (("model", p), ("nothing", p), ("mine", torch.tensor([[0.25, 0.25, 0.0, 0.0]]))):
        watch.after_stage(stage, left.log())
    watch.after_draw([0.6], torch.tensor([1]))
    observer.flush()
    model, mine, drawn = recorder.events
    assert (model.stage, model.position, model.num_left, model.entropy) == ("model", 3, 3, 1.5)
    assert (mine.stage, mine.num_left, mine.entropy) == ("mine", 2, 1)
    for event, after in ((model, [0.5, 0.25, 0.25]), (mine, [0.5, 0.5, 0.0])):
        assert [one.token_id for one in event.candidates] == [0, 1, 2]
        assert [one.before for one in event.candidates] == pytest.approx([0.5, 0.25, 0.25])
        assert [one.after for one in event.candidates] == pytest.approx(after)
    assert (drawn.sequence_id, drawn.position, drawn.token_id, drawn.u, drawn.low, drawn.high) == ("7", 3, 1, 0.6, 0.5, 1.0)
    assert [(part.token_id, part.low, part.high) for part in drawn.intervals] == [(0, 0.0, 0.5), (1, 0.5, 1.0)]


def test_the_cost_of_recording_stages_is_in_no_phase(monkeypatch):
    """On this clock, only the description of a row's candidates takes time: 100 s."""
    recorder = Recorder(stages=True)
    llm, params = LLM(tracer=recorder), SamplingParams(max_tokens=3, ignore_eos=True)
    llm.generate(["Lily", "Tom"], params, use_tqdm=False)  # the first call of a function prepares the checks of its shapes
    recorder.clear()
    candidates = TracingSampler._candidates
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    for module in (stage_trace, local_executor):
        monkeypatch.setattr(module, "time", clock)

    def slow_candidates(*args):
        clock.now += 100
        return candidates(*args)

    monkeypatch.setattr(TracingSampler, "_candidates", slow_candidates)
    llm.generate(["Lily", "Tom"], params, use_tqdm=False)
    stages = Counter(event.position for event in recorder.of(StageApplied))
    for timed, num_stages in zip(recorder.of(tracing.StepTimed), stages.values(), strict=True):
        assert (timed.trace, timed.sample) == (100 * num_stages, 0)


def test_a_notebook_gets_the_page_or_a_sentence_or_nothing(monkeypatch, tmp_path):
    assert Recorder()._repr_html_() is None  # Jupyter then shows repr()
    with pytest.raises(InvalidValueError, match="there is no step of generate"):
        Recorder().to_html(tmp_path / "page.html")
    recorder, _ = run('It\'s <b>"5 &amp; 6"</b></iframe>', SamplingParams(max_tokens=2))
    assert [timed.trace for timed in recorder.of(tracing.StepTimed)] == [0, 0]  # without stages, recording them costs nothing
    frames = []
    parser = HTMLParser(convert_charrefs=True)
    parser.handle_starttag = lambda tag, attributes: frames.append((tag, dict(attributes)))
    parser.feed(recorder._repr_html_())
    recorder.to_html(tmp_path / "page.html")
    [(tag, attributes)] = frames
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert attributes["srcdoc"] == (tmp_path / "page.html").read_text(encoding="utf-8")
    for limit in (len(attributes["srcdoc"]) - 1, 50 * len(recorder.events)):
        monkeypatch.setattr("nanoinfer.features.tracing.recorder.MAX_FRAME_CHARS", limit)
        assert recorder._repr_html_().startswith(f"<p>{recorder!r} makes a page of more than")
        assert 'recorder.to_html("trace.html")' in recorder._repr_html_()


def test_only_the_last_llm_that_took_a_recorder_is_shown_and_kept(tmp_path):
    recorder = Recorder()
    for prompt in ("Lily", "Once upon"):
        LLM(tracer=recorder).generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    recorder.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('"event":"EngineStarted"') == page.count('"event":"RequestAdded"') == 1
    assert '"prompt":"Once upon"' in page
    recorder.clear()
    assert [type(event) for event in recorder.events] == [tracing.EngineStarted]


def test_the_engine_is_reported_when_it_starts_and_tokens_that_only_the_device_knows_are_minus_one():
    recorder = Recorder()
    llm = LLM("tiny-gpt2", tracer=recorder, block_size=16, max_num_seqs=7, async_scheduling=True)
    [event] = recorder.events
    assert (event.model, event.num_parameters, event.dtype, event.device) == ("tiny-gpt2", 1_109_632, "float32", "cpu")
    assert (event.vocab_size, event.block_size, event.max_num_seqs) == (1959, 16, 7)
    assert event.num_blocks == llm.engine.block_manager.num_blocks
    llm.generate("Lily was", SamplingParams(max_tokens=5, ignore_eos=True, seed=1), use_tqdm=False)
    prompt, *others = [event.input_ids for event in recorder.of(tracing.BatchBuilt)]
    assert prompt == tuple(llm.get_tokenizer().encode("Lily was"))
    assert others == [(-1,)] * 4


@pytest.mark.slow
def test_every_preemption_is_reported(qwen3_path):
    """Also one in a step without sequences, which emits no StepScheduled."""
    rng, num_counted, recorder = random.Random(0), 0, Recorder()
    llm = LLM(qwen3_path, tracer=recorder, block_size=4, kv_cache_memory=8 * 2048, async_scheduling=True)
    for seed in range(20):
        prompts = [[rng.randrange(96) for _ in range(rng.randint(1, 12))] for _ in range(5)]
        params = [SamplingParams(max_tokens=rng.randint(1, 16), seed=seed, detokenize=False) for _ in prompts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        num_counted += sum(output.metrics.num_preemptions for output in outputs)
    assert sum(len(event.preempted) for event in recorder.of(StepScheduled)) == num_counted > 10


def test_an_answer_with_no_tokens_left_has_stages_and_no_draw_and_an_end_of_its_own():
    """Only the second answer's processor masks every token."""

    def second_fails(prompt_ids, output_ids, logits):
        return torch.full_like(logits, -torch.inf) if len(output_ids) == 3 and output_ids[0] == second else logits

    prompt, params = "Once upon a time, there was a", {"n": 2, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    _, [output] = run(prompt, SamplingParams(**params))
    first, second = (answer.token_ids[0] for answer in output.outputs)
    assert first != second
    recorder, _ = run(prompt, SamplingParams(**params, logits_processors=[second_fails]), stages=True)
    assert recorder.of(tracing.RequestFinished)[0].finish_reasons == ("length", "error")
    last = [event for event in recorder.of(StageApplied) if event.sequence_id == "0.1"][-1]
    assert (last.stage, last.num_left, last.entropy) == ("apply_logits_processors", 0, 0)
    assert all(one.after == 0 for one in last.candidates)
    assert Counter(event.sequence_id for event in recorder.of(TokenDrawn)) == {"0": 6, "0.1": 3}


def test_events_that_a_tracer_causes_are_emitted_in_order():
    class Meddler(Recorder):
        def emit(self, event):
            super().emit(event)
            if event == tracing.RequestFinished("0", ("abort",), 0):
                llm.engine.abort("2")

    llm = LLM(tracer=(recorder := Meddler()), kv_cache_memory=2**22)
    for _ in range(3):
        llm.engine.add_request([1, 2, 3], SamplingParams())
    llm.engine.abort("0", "1")
    assert [event.request_id for event in recorder.of(tracing.RequestFinished)] == ["0", "1", "2"]
    assert_nothing_is_left(llm)
