"""EngineThread, with an Executor that has no model: who runs what, in which order, and what is published."""

import threading

import pytest

from nanoinfer import SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.server.engine_thread import EngineThread
from tests.helpers.fake_executor import FakeExecutor


class Published:
    """Reads what an engine's thread publishes, as a stream does."""

    def __init__(self):
        self.token_ids, self.outputs, self.threads = {}, {}, set()
        self._has_output = threading.Condition()

    def __call__(self, requests):
        with self._has_output:
            self.threads.add(threading.current_thread())
            for request in requests:
                while request.deltas:
                    delta = request.deltas.popleft()
                    self.token_ids.setdefault(request.request_id, []).extend(delta.token_ids)
                    if delta.output is not None:
                        assert request.request_id not in self.outputs, "it has ended once already"
                        self.outputs[request.request_id] = delta.output
            self._has_output.notify_all()

    def wait_for(self, *request_ids):
        with self._has_output:
            assert self._has_output.wait_for(lambda: set(request_ids) <= set(self.outputs), timeout=120)
        return [self.outputs[request_id].outputs[0] for request_id in request_ids]


@pytest.fixture
def published():
    return Published()


@pytest.fixture
def thread(published):
    loaded_in = set()

    def load():
        loaded_in.add(threading.current_thread())
        return LLMEngine(FakeExecutor(), EngineConfig())

    thread = EngineThread(load, published, lambda: 0)
    thread.loaded_in = loaded_in
    yield thread
    thread.close()
    thread.join()
    assert thread.engine.block_manager.num_free_blocks == thread.engine.block_manager.num_blocks


def prepared(thread, prompt, max_tokens=5):
    return thread.engine.inputs.prepare(prompt, SamplingParams(max_tokens=max_tokens, detokenize=False))


def test_it_publishes_every_token_and_each_output_once_from_its_own_thread(thread, published):
    for i in range(5):
        thread.submit(prepared(thread, [i]), f"id {i}")
    answers = published.wait_for(*(f"id {i}" for i in range(5)))
    assert [answer.token_ids for answer in answers] == [[*range(i + 1, i + 6)] for i in range(5)]
    assert published.token_ids == {f"id {i}": answer.token_ids for i, answer in enumerate(answers)}
    assert published.threads == {thread} == thread.loaded_in


@pytest.fixture
def hold(thread):
    """Until hold.set() the thread carries out none of the commands that are given meanwhile."""
    event = threading.Event()
    thread.call(lambda: event.wait(120))
    return event


def test_commands_are_carried_out_in_their_order(thread, published, hold):
    thread.submit(prepared(thread, [1], 100), "first")
    thread.abort("first")
    thread.abort("unknown")
    thread.submit(prepared(thread, [2]), "second")
    hold.set()
    first, second = published.wait_for("first", "second")
    assert (first.finish_reason, first.token_ids) == ("abort", [])
    assert second.finish_reason == "length"


def test_a_function_is_called_in_the_thread_and_its_error_is_the_callers(thread, hold):
    cancelled, current, failed = thread.call(pytest.fail), thread.call(threading.current_thread), thread.call(lambda: 1 / 0)
    assert cancelled.cancel()
    hold.set()
    assert current.result(120) is thread
    with pytest.raises(ZeroDivisionError):
        failed.result(120)
    assert (thread.error, thread.call(lambda: "works").result(120)) == (None, "works")


def test_a_dead_engine_fails_every_request(thread, published, hold, monkeypatch):
    def broken(*_):
        raise RuntimeError("no device")

    monkeypatch.setattr(thread.engine.executor, "launch", broken)
    for number, request_id in enumerate(("first", "second"), start=1):
        thread.submit(prepared(thread, [number]), request_id)
    hold.set()
    assert {answer.finish_reason for answer in published.wait_for("first", "second")} == {"error"}
    for request_id in ("third", "fourth"):
        thread.submit(prepared(thread, [3]), request_id)
        [answer] = published.wait_for(request_id)
    assert thread.error == answer.error == "3 steps in a row have failed: RuntimeError: no device"


@pytest.fixture
def log(thread, published, monkeypatch):
    """What the thread has done: "step", ("published", ids) and whatever a test's commands append. It begins with a step.

    A step waits until it is released: log.may_step.release().
    """

    class Log(list):
        may_step = threading.Semaphore(0)

    log, step = Log(), thread.engine.step

    def logged_step():
        log.append("step")
        log.may_step.acquire(timeout=120)
        return step()

    def logged_publish(requests):
        log.append(("published", [request.request_id for request in requests]))
        published(requests)

    monkeypatch.setattr(thread.engine, "step", logged_step)
    monkeypatch.setattr(thread, "_publish", logged_publish)
    return log


def test_after_each_step_there_is_one_call_with_all_requests_that_have_new_deltas(thread, published, hold, log):
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 2)):
        thread.submit(prepared(thread, [1], max_tokens), name)
    log.may_step.release(3)
    hold.set()
    published.wait_for("a", "b", "c")
    assert log == [one for names in ("abc", "bc", "b") for one in ("step", ("published", [*names]))]


def test_commands_given_during_a_step_are_carried_out_before_the_next_one_and_not_later(thread, published, hold, log):
    thread.submit(prepared(thread, [1], 2), "a")
    hold.set()
    while not log:  # until the first step has begun
        thread.join(0.001)
    for name in ("first command", "second command"):
        thread.call(lambda name=name: log.append(name))
    log.may_step.release(2)
    published.wait_for("a")
    assert log == ["step", ("published", ["a"]), "first command", "second command", "step", ("published", ["a"])]
