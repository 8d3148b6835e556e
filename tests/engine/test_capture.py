"""An engine lets its executor capture what steps lacked, one graph at a time, and only while no request runs."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from nanoinfer import LLM, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.server.engine_thread import EngineThread
from tests.helpers.fake_executor import FakeExecutor

PARAMS = SamplingParams(max_tokens=2, detokenize=False)


class Capturing(FakeExecutor):
    """num_left: the graphs to capture."""

    num_left = 3

    def capture_next(self):
        self.num_left = max(self.num_left - 1, -1)
        return self.num_left >= 0


def test_graphs_are_captured_when_no_request_runs():
    engine = LLMEngine(Capturing(), EngineConfig())
    request = engine.add_request([1, 2], PARAMS)
    engine.step()
    engine.capture_graphs()
    assert engine.executor.num_left == 3
    while request.output is None:
        engine.step()
    engine.capture_graphs(is_over=lambda: engine.executor.num_left == 1)
    assert engine.executor.num_left == 1
    engine.capture_graphs()
    assert engine.executor.num_left == -1


def test_the_thread_of_a_server_captures_while_it_is_idle_until_a_command_arrives():
    begun, go_on = threading.Event(), threading.Event()

    class Waiting(Capturing):
        num_left = 1000

        def capture_next(self):
            begun.set()
            assert go_on.wait(600)
            return super().capture_next()

    thread = EngineThread(lambda: LLMEngine(Waiting(), EngineConfig()), lambda news: None, lambda: 0)
    executor = thread.engine.executor
    assert begun.wait(600)
    called = thread.call(lambda: executor.num_left)
    go_on.set()
    assert called.result(600) == 999
    thread.close()
    thread.join(600)


@pytest.mark.parametrize("has_step_graphs", [False, True])
def test_an_executor_captures_the_graphs_of_steps_and_then_those_of_routes(has_step_graphs):
    def left(*answers):
        return SimpleNamespace(capture_next=iter(answers).__next__)

    executor = object.__new__(LocalExecutor)
    executor._in_step = nullcontext
    executor.graph_owners = [left(True, False, False, False)] * has_step_graphs
    executor.graph_owners += [left(False, True, False), left(False, False)]
    expected = [True, False, True, False] if has_step_graphs else [False, True, False]
    assert [executor.capture_next() for _ in expected] == expected


def test_the_graphs_of_a_draft_model_are_captured_with_those_of_the_model(qwen3_path, monkeypatch):
    drafts = {"method": "draft_model", "model": str(qwen3_path)}
    llm = LLM(str(qwen3_path), speculative_config=drafts, kv_cache_memory=2**22, enforce_eager=True)
    assert not llm.engine.executor.capture_next()
    monkeypatch.setattr(llm.engine.planner.proposer._executor, "capture_next", lambda: True)
    assert llm.engine.executor.capture_next()
