"""The guards of an engine: a second caller, a failure, Ctrl-C and an abort in the middle of a step."""

import os
import signal
import threading

import pytest

from nanoinfer.engine.guards import EngineGuard, interrupt_deferred, interrupt_handler
from nanoinfer.errors import NanoinferError


@pytest.fixture
def log():
    return []


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """Also where the shell has started the tests in the background, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def guard(log):
    return EngineGuard(
        restart=lambda: log.append("restart"), flush=lambda: log.append("flush"), abort=lambda *ids: log.append(("abort", *ids))
    )


def test_a_step_that_raises_restarts_the_engine_and_one_that_does_not_does_not(guard, log):
    with guard.step():
        pass
    assert log == ["flush"]
    with pytest.raises(KeyError), guard.step():
        raise KeyError
    assert log == ["flush", "restart", "flush"]
    with pytest.raises(KeyError), guard.exclusive():
        raise KeyError
    assert log[3:] == ["flush"]
    assert not guard.is_stepping


def test_a_step_inside_a_step_is_refused_and_the_first_one_goes_on(guard):
    with guard.step():
        with pytest.raises(NanoinferError, match="was called during a step"), guard.step():
            raise AssertionError
        assert guard.is_stepping


def test_another_thread_waits_for_the_end_of_a_step_to_change_the_engine(guard, log):
    is_waiting = threading.Event()

    def change():
        is_waiting.set()
        with guard.between_steps():
            log.append("changed")

    with guard.step():
        thread = threading.Thread(target=change)
        thread.start()
        is_waiting.wait()
        thread.join(0.05)
        assert "changed" not in log
        with guard.between_steps():  # the thread that steps may
            log.append("mine")
    thread.join()
    assert log == ["mine", "flush", "changed"]


def test_an_abort_during_a_step_comes_after_it_and_another_is_not_kept(guard, log):
    with guard.step():
        assert guard.defer_abort(("a", "b"))
        assert log == []
    assert log == ["flush", ("abort", "a", "b")]
    assert not guard.defer_abort(("c",))
    with guard.step():
        pass
    assert log[2:] == ["flush"]


def test_a_tracer_that_raises_leaves_no_step_behind(guard, log):
    def broken():
        raise ValueError("mine")

    guard = EngineGuard(restart=lambda: None, flush=broken, abort=lambda *ids: log.append(ids))
    with pytest.raises(ValueError, match="mine"), guard.step():
        guard.defer_abort(("a",))
    assert log == [("a",)]
    assert not guard.is_stepping


def test_a_closed_engine_and_one_of_another_process_are_refused(guard, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    for surround in (guard.step, guard.between_steps):
        with pytest.raises(NanoinferError, match="was made in another process"), surround():
            raise AssertionError
    monkeypatch.undo()
    guard.is_closed = True
    for surround in (guard.step, guard.between_steps):
        with pytest.raises(NanoinferError, match="this LLM was closed"), surround():
            raise AssertionError


def test_ctrl_c_waits_for_the_end_of_the_block_and_the_handler_is_put_back(log):
    @interrupt_deferred()
    def interrupted():
        signal.raise_signal(signal.SIGINT)
        log.append("whole")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert log == ["whole"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loop_of_steps_sets_the_handler_once_and_between_its_steps_ctrl_c_interrupts_at_once(guard, log, monkeypatch):
    before, set_handler = signal.getsignal(signal.SIGINT), signal.signal
    monkeypatch.setattr(signal, "signal", lambda *given: (log.append("handler"), set_handler(*given))[1])
    with interrupt_handler():
        for _ in range(3):
            with guard.step():
                pass
        assert log == ["handler", "flush", "flush", "flush"]
        with pytest.raises(KeyboardInterrupt), guard.exclusive():
            log.append(signal.raise_signal(signal.SIGINT))
        assert log[4:] == [None, "flush"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with interrupt_handler(), pytest.raises(KeyboardInterrupt), guard.step():
            signal.raise_signal(signal.SIGINT)
        with guard.step():
            log.append("next")
    assert log[-2:] == ["flush", "handler"]
    assert signal.getsignal(signal.SIGINT) is before
