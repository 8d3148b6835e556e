"""How torch's threads wait: they sleep when they lack cores, and spin again when the machine was quiet for a while."""

import threading

import pytest

from nanoinfer.devices import openmp
from nanoinfer.devices.openmp import QUIET_OBSERVATIONS, WaitPolicy


class Machine:
    """A clock, and two threads that lack a core for a share of the time."""

    def __init__(self, monkeypatch):
        self.now, self.delays = 100.0, {"1": 0.0, "2": 0.0}
        monkeypatch.setattr(openmp.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(openmp, "thread_delays", lambda: dict(self.delays))
        monkeypatch.setattr(openmp, "_is_supported", lambda: True)

    def run(self, policy, seconds, share=0.0, step=0.05):
        for _ in range(round(seconds / step)):
            self.now += step
            self.delays["2"] += share * step
            policy.observe()


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def teams():
    return [thread for thread in threading.enumerate() if thread.name == "nanoinfer-openmp-team"]


def test_beside_a_busy_program_threads_sleep_and_spin_again_when_it_has_been_quiet_for_a_while(machine):
    policy = WaitPolicy()
    machine.run(policy, 3, share=0.01)
    assert not policy.sleeps
    machine.run(policy, 0.4, share=0.9)
    machine.run(policy, 0.4, share=0.01)
    machine.run(policy, 0.4, share=0.9)
    assert not policy.sleeps  # a program that runs for a moment
    machine.run(policy, 0.4, share=0.3)
    assert policy.sleeps
    (team,) = teams()
    machine.run(policy, 60, share=0.3)
    assert teams() == [team]  # one, however long it lasts
    machine.run(policy, QUIET_OBSERVATIONS * openmp.INTERVAL / 2, share=0.01)
    assert policy.sleeps  # not yet
    machine.run(policy, QUIET_OBSERVATIONS * openmp.INTERVAL, share=0.01)
    assert not policy.sleeps
    team.join(timeout=10)
    assert teams() == []


def test_a_short_quiet_in_between_does_not_switch_back(machine):
    policy = WaitPolicy()
    for _ in range(10):
        machine.run(policy, 0.8, share=0.3)
        machine.run(policy, 1.0, share=0.0)
        assert policy.sleeps
    policy.spin()


def test_steps_of_many_seconds_are_judged_too_and_an_idle_time_is_quiet(machine):
    policy = WaitPolicy()
    machine.run(policy, 30, share=0.01, step=7.5)
    machine.now += 600  # nothing runs
    policy.observe()
    assert not policy.sleeps
    machine.run(policy, 22.5, share=0.3, step=7.5)
    assert policy.sleeps
    policy.spin()


def test_a_thread_that_has_just_begun_is_not_judged_by_its_whole_past(machine):
    policy = WaitPolicy()
    machine.delays["3"] = 50.0
    machine.run(policy, 0.5)
    assert not policy.sleeps


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_has_set_stays(name, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv(name, "7")
    assert not WaitPolicy().is_supported
    assert openmp.describe() == f"{name}=7, set in the environment"


def test_fewer_threads_than_processors_are_left_alone(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(openmp.os, "sched_getaffinity", lambda pid: set(range(10_000)), raising=False)
    assert not WaitPolicy().is_supported
    assert openmp.describe() == "as OpenMP does by default"


def test_a_system_that_counts_no_delays_is_left_alone(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delattr(openmp.os, "sched_getaffinity", raising=False)
    assert not WaitPolicy().is_supported
    WaitPolicy().observe()
