"""Every schedule of a world: the engine's classes keep the invariants, and a shortest run shows what another class breaks."""

import pickle
import subprocess
import sys
from collections import defaultdict

import pytest

from nanoinfer.errors import InvalidValueError
from nanoinfer.features.tracing import BlocksShared, Recorder, StepScheduled, TokenAppended
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.policies import DeadlineScheduler
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer_lab.testing import schedules
from nanoinfer_lab.testing.schedules import Abort, Arrive, InvariantError, RunStep, State, World, check_scheduler, replay
from tests.lab.testing.worlds import WORLDS


def test_the_states_of_a_world_that_is_counted_by_hand():
    """A request and an answer of one token: not there, waiting, finished. With an abort it also ends without a token."""
    world = World(num_requests=1, max_prompt_len=1, max_tokens=1, num_forks=0, num_aborts=0)
    assert check_scheduler(world=world)[:3] == (3, 2, 2)
    assert check_scheduler(world=World(num_requests=1, max_prompt_len=1, max_tokens=1, num_forks=0))[:3] == (4, 4, 2)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"num_token_ids": 0}, "num_token_ids must be >= 1, got 0"),
        ({"num_blocks": 1, "block_size": 1}, r"num_blocks \* block_size must be >= 2, .*, got 1; raise"),
        ({"async_scheduling": True, "num_speculative_tokens": 2}, "must be 0 with async_scheduling, got 2"),
    ],
)
def test_a_world_in_which_a_check_would_mean_nothing_is_refused(sizes, sentence):
    with pytest.raises(InvalidValueError, match=sentence):
        World(**sizes)


LARGE = "exchanged-chunks"  # as many states as three others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "world"),
    [pytest.param(*world, id=name, marks=[pytest.mark.long] * (name == LARGE)) for name, world in WORLDS.items()],
)
def test_every_schedule_of_a_small_world_keeps_the_invariants(cls, world):
    assert check_scheduler(cls, world=world).num_states > 250


@pytest.mark.long  # 80 s each
@pytest.mark.parametrize("cls", [Scheduler, DeadlineScheduler])
def test_every_schedule_of_the_whole_world_keeps_the_invariants(cls):
    assert check_scheduler(cls).num_states > 50_000


def test_states_with_equal_keys_have_the_same_future():
    """Every run of five events is walked without leaving any out, and equal keys are followed by equal sets of keys."""
    world = World(num_requests=2, num_blocks=3, max_prompt_len=3, max_tokens=2, num_aborts=0)
    newest, followers = [schedules._dumps(State.new(world, Scheduler, BlockManager))], defaultdict(set)
    for _ in range(4):
        following = []
        for saved in newest:
            keys = []
            for event in _every_event(saved):
                state = pickle.loads(saved)
                state.apply(event)
                keys.append(state.key())
                following.append(schedules._dumps(state))
            followers[pickle.loads(saved).key()].add(frozenset(keys))
        newest = following[:: 1 + len(following) // 200]
    assert len(followers) > 50
    assert {len(sets) for sets in followers.values()} == {1}


def _every_event(saved):
    state = pickle.loads(saved)
    events = [*state.events()]
    return [*events, *state.samples(state.plan())] if state.alive else events


# ---- classes that violate an invariant


class KeepsBlocks(BlockManager):
    def free(self, seq):
        seq.block_table.clear()


class ForgetsSalts(BlockManager):
    def match_prefix(self, token_ids, cache_salt=None):
        return super().match_prefix(token_ids)

    def cache_finished_blocks(self, seq, num_tokens):
        seq.cache_salt, salt = None, seq.cache_salt
        super().cache_finished_blocks(seq, num_tokens)
        seq.cache_salt = salt


class CopiesNothing(BlockManager):
    def allocate(self, seq, num_new_tokens):
        super().allocate(seq, num_new_tokens)
        return []


class ComputesAgain(Scheduler):
    """Drops what was sampled, and computes the token before once more."""

    def append(self, seq, token_id):
        seq.num_tokens -= 1
        seq.num_computed_tokens -= 1


class NeverStartsTheSecond(Scheduler):
    def may_start(self, seq):
        return seq.request_id == "0" or len(seq.prompt_token_ids) == 1


class CutsAnywhere(Scheduler):
    def next_chunk(self, seq, start):
        return 1


class KeepsWhatFailed(BlockManager):
    def forget_cached(self, seq):
        pass


@pytest.mark.parametrize(
    ("classes", "invariant", "num_events"),
    [
        ((Scheduler, KeepsBlocks), "a block has a reference for each block table", 2),
        ((Scheduler, ForgetsSalts), "the prefix cache must have the blocks that sequence 1 filled", 4),
        ((Scheduler, CopiesNothing), "must hold token", 3),
        ((NeverStartsTheSecond, BlockManager), "the class raised NanoinferError", 4),
        ((CutsAnywhere, BlockManager), "a step must compute 2 of 0, .* got 1 of 0", 2),
        ((ComputesAgain, BlockManager), "every answer ends", None),
        ((Scheduler, KeepsWhatFailed), "blocks of a failed request leave the prefix cache", 3),
    ],
    ids=lambda value: value[0].__name__ + value[1].__name__ if isinstance(value, tuple) else None,
)
def test_a_shortest_run_shows_what_a_wrong_class_breaks(classes, invariant, num_events):
    world = World(num_requests=2, num_salts=2, max_tokens=2) if num_events else World(num_requests=1)
    with pytest.raises(InvariantError, match=invariant) as broken:
        check_scheduler(*classes, world)
    assert num_events in (None, len(broken.value.events))
    assert f"\n{len(broken.value.events)}. " in str(broken.value)


def test_a_run_is_recorded_for_the_page_that_replays_it():
    events = [Arrive((0, 1)), RunStep(((1, False),)), Arrive((0, 1, 0)), RunStep(((0, True), (1, False))), Abort(0)]
    recorder = Recorder()
    replay(Scheduler, BlockManager, World(), events, recorder)
    assert [event.running for event in recorder.of(StepScheduled)] == [("0",), ("0", "1")]
    assert [event.blocks for event in recorder.of(BlocksShared) if event.blocks] == [(0,)]
    assert [event.token for event in recorder.of(TokenAppended)] == ["1", "0", "1"]


def test_exploring_imports_no_torch():
    code = "import sys, nanoinfer.testing.schedules; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
