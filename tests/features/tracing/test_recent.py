"""The recorder of a server: what it keeps, and which steps it replays."""

import json
import re

import pytest

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.features.tracing import BatchBuilt, BlocksAllocated, EngineStarted, RequestAdded, StepScheduled, TokenAppended
from nanoinfer.features.tracing.recent import RecentRecorder


class Both:
    """Emits to several recorders."""

    def __init__(self, *recorders):
        self.recorders = recorders

    def emit(self, event):
        for recorder in self.recorders:
            recorder.emit(event)


def size(events):
    fields = {RequestAdded: "prompt_token_ids", StepScheduled: "sequence_ids", BatchBuilt: "input_ids"}
    return sum(1 + len(getattr(event, fields[type(event)])) if type(event) in fields else 1 for event in events)


def events_of(page):
    return json.loads(re.search(r"^const EVENTS = (.*);$", page, re.MULTILINE)[1])


def start_of(page):
    return re.search(r'^const START = "(.*)";', page, re.MULTILINE)[1]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async_scheduling"])
def run(request):
    """Forty short requests of several lengths beside one long one, which overlap."""
    whole, recent, sizes = Recorder(), RecentRecorder(max_size=1200), []
    llm = LLM("tiny-qwen3", tracer=Both(whole, recent), seed=0, block_size=8, async_scheduling=request.param)

    def add(prompt, **params):
        return llm.engine.add_request(llm.get_tokenizer().encode(prompt), SamplingParams(ignore_eos=True, **params)).request_id

    long = add("Once upon a time", max_tokens=270)
    for number in range(40):
        last = add(f"Request {number}", max_tokens=3 + number % 5, n=1 + number % 2)
        for _ in range(6):
            llm.engine.step()
            sizes.append(size(recent.events))
    while llm.engine.num_unfinished:
        llm.engine.step()
    return whole, recent, sizes, long, last


def test_it_keeps_the_newest_events_within_its_size(run):
    whole, recent, sizes, *_ = run
    assert max(sizes) <= 1200 + 200  # the prompts and blocks of unfinished requests come on top
    assert min(sizes[len(sizes) // 2 :]) >= 400
    assert size(whole.events) > 2 * 1200
    first = next(i for i, event in enumerate(recent.events) if isinstance(event, StepScheduled))
    newest = recent.events[first:]
    assert newest == whole.events[-len(newest) :]
    assert isinstance(recent.events[0], EngineStarted)


def test_unfinished_requests_keep_their_prompts_and_blocks(run):
    whole, recent, _, long, _ = run
    assert recent.of(RequestAdded)[0].request_id == long
    allocated = lambda recorder: [event for event in recorder.of(BlocksAllocated) if event.sequence_id == long]  # noqa: E731
    assert allocated(recent) == allocated(whole)
    steps = {event.step for event in recent.of(StepScheduled)}
    assert 0 not in steps
    assert len(recent.of(RequestAdded)) < 20


def test_a_replay_is_the_steps_of_its_request(run):
    whole, recent, _, long, last = run
    assert recent.replay(["1"]) is None  # dropped
    assert recent.replay(["unknown"]) is None
    assert recent.replay([]) is None
    page = recent.replay([last])
    steps = [event["step"] for event in events_of(page) if event["event"] == "StepScheduled"]
    mine = [event.step for event in whole.of(StepScheduled) if last in event.sequence_ids]
    assert steps[0] <= mine[0]
    assert mine[-1] <= steps[-1] <= mine[-1] + 1  # with async_scheduling a step is in flight when the request ends
    assert start_of(page) == f"step={mine[0]}&token={last}"
    answer = [
        event["token_id"] for event in events_of(page) if event["event"] == "TokenAppended" and event["sequence_id"] == last
    ]
    assert answer == [event.token_id for event in whole.of(TokenAppended) if event.sequence_id == last]
    assert events_of(page)[-1]["event"] in ("StepTimed", "RequestFinished", "BlocksFreed")
    both = [event["event"] for event in events_of(recent.replay([last, long]))]
    assert both.count("StepScheduled") > 50


def test_a_request_that_has_not_run_has_no_replay_and_an_aborted_one_has():
    recorder = RecentRecorder()
    llm = LLM("tiny-qwen3", tracer=recorder, seed=0)
    request = llm.engine.add_request([1, 2, 3], SamplingParams(max_tokens=100))
    assert recorder.replay([request.request_id]) is None
    for _ in range(3):
        llm.engine.step()
    assert events_of(recorder.replay(["0"]))[-1]["event"] == "StepTimed"
    llm.engine.abort("0")
    llm.engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
    llm.engine.step()
    events = events_of(recorder.replay(["0"]))
    assert [event["step"] for event in events if event["event"] == "StepScheduled"] == [0, 1, 2]
    assert sum(event["event"] == "RequestFinished" for event in events) == 1
