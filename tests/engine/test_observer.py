"""What an engine tells its observer, and how several observers are one."""

from nanoinfer import SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.observer import Observer, together
from nanoinfer.scheduling.observer import SchedulingObserver
from tests.helpers.fake_executor import FakeExecutor

EVENTS = [name for name in (*vars(SchedulingObserver), *vars(Observer)) if not name.startswith("_")]


def writing(log, events=EVENTS, name=""):
    """An observer that notes these events."""

    def noting(event):
        return lambda self, *_: log.append(f"{name}{event}")

    return type("Writing", (Observer,), {event: noting(event) for event in events})()


def test_an_engine_tells_its_observer_a_request_in_order():
    log = []
    engine = LLMEngine(FakeExecutor(), EngineConfig(), observer=writing(log))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, detokenize=False))
    engine.step()
    engine.step()
    assert log == [
        *("request_added", "scheduling_begun", "blocks_changed", "sequence_started"),
        *("blocks_changed", "step_scheduled", "step_launched", "step_collected", "token_appended", "step_ended", "flush"),
        *("scheduling_begun", "step_scheduled", "step_launched", "blocks_changed", "step_collected", "token_appended"),
        *(2 * ["blocks_changed", "sequence_finished"]), "request_finished", "step_ended", "flush",
    ]  # fmt: skip


def test_several_observers_are_told_in_their_order_and_only_what_they_override():
    log = []
    one = together(writing(log, ["flush"], "a "), writing(log, ["flush", "block_evicted"], "b "), Observer())
    one.block_evicted(7)
    one.blocks_changed(None, None, None)
    one.flush()
    assert log == ["b block_evicted", "a flush", "b flush"]
    again = together(one, writing(log, ["flush"], "c "))
    again.flush()
    assert log[3:] == ["a flush", "b flush", "c flush"]
