"""Drafts in the engine, with an executor that counts upwards: a right draft is the next number."""

import weakref
from dataclasses import replace

import pytest

from nanoinfer import SamplingParams
from nanoinfer.build import ParameterFeatures
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.features.drafts.speculator import Speculator
from nanoinfer.features.reasoning.thinking import ReasoningState
from tests.helpers.fake_executor import FakeExecutor


class CountingProposer:
    """Guesses the next numbers. The guesses from index `wrong_from` on are wrong."""

    def __init__(self, wrong_from=99):
        self.wrong_from = wrong_from
        self.forgotten = []

    def propose(self, sequences, limits):
        return [
            [seq.token_ids[-1] + 1 + i + (i >= self.wrong_from) for i in range(limit)]
            for seq, limit in zip(sequences, limits, strict=True)
        ]

    def forget(self, seq):
        self.forgotten.append(seq.request_id)


def engine_with(proposer, *, num_drafts=3, adaptive=False, num_blocks=16, max_model_len=64, **scheduler):
    config = EngineConfig(
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts, adaptive=adaptive),
        scheduler=SchedulerConfig(**scheduler),
        cache=CacheConfig(),
    )
    executor = FakeExecutor(num_blocks=num_blocks, max_model_len=max_model_len)
    planner, features = Speculator(proposer, config.speculative), [ParameterFeatures(None, executor)]
    return LLMEngine(executor, config, eos_token_ids=frozenset([900]), planner=planner, features=features)


def params(**more):
    return SamplingParams(**{"max_tokens": 9, "detokenize": False} | more)


def finish(engine, *requests):
    while engine.num_unfinished:
        engine.step()
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    return [request.output.outputs[0].token_ids for request in requests]


def drafts_of(engine):
    return [[item.draft_token_ids for item in plan.scheduled] for plan in engine.executor.launched]


def test_right_drafts_give_several_tokens_a_step():
    engine = engine_with(CountingProposer())
    assert finish(engine, engine.add_request([1, 2, 3], params())) == [list(range(4, 13))]
    assert drafts_of(engine) == [[()], [(5, 6, 7)], [(9, 10, 11)]]  # 1 + 4 + 4 tokens


def test_of_a_draft_the_tokens_before_the_first_wrong_one_count():
    engine = engine_with(CountingProposer(wrong_from=1))
    request = engine.add_request([1, 2, 3], params())
    engine.step()
    engine.step()
    seq = request.sequences[0]
    assert seq.token_ids == [1, 2, 3, 4, 5, 6]
    assert (seq.num_computed_tokens, seq.num_new_tokens) == (5, 1)  # 5 was computed as a draft, and 6 was only sampled
    assert finish(engine, request) == [list(range(4, 13))]
    metrics = engine.planner.counts
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 10, 4)
    assert metrics.num_accepted_tokens_per_pos == [4, 0, 0]


@pytest.mark.parametrize(
    ("stop", "drafts"),
    [({"max_tokens": 4}, (5, 6)), ({"stop_token_ids": [7]}, tuple(range(5, 12)))],
    ids=["nothing is drafted behind the last token", "an answer ends within an accepted draft"],
)
def test_an_answer_ends_where_it_ends_without_drafts(stop, drafts):
    engine = engine_with(CountingProposer(), num_drafts=8)
    assert finish(engine, engine.add_request([1, 2, 3], params(**stop))) == [[4, 5, 6, 7]]
    assert drafts_of(engine) == [[()], [drafts]]


def test_an_aborted_and_a_finished_sequence_are_forgotten_and_a_closed_engine_drops_the_proposer():
    engine = engine_with(proposer := CountingProposer())
    first, second = engine.add_request([1], params()), engine.add_request([2], params())
    engine.step()
    engine.abort(first.request_id)
    finish(engine, second)
    assert set(proposer.forgotten) == {"0", "1"}
    held = weakref.ref(engine.planner.proposer)  # which may hold a model
    engine.close()
    del proposer
    assert held() is None


@pytest.mark.parametrize("more", [{"repetition_penalty": 1.1}, {"logits_processors": [lambda p, o, logits: logits]}])
def test_a_sequence_whose_sampling_reads_its_output_drafts_nothing(more):
    engine = engine_with(CountingProposer())
    assert finish(engine, engine.add_request([1, 2], params(max_tokens=3, **more))) == [[3, 4, 5]]
    assert drafts_of(engine) == [[()], [()], [()]]


def test_a_draft_ends_before_the_token_that_ends_reasoning():
    engine = engine_with(CountingProposer(), num_drafts=8)
    request = engine.add_request([1, 2, 3], params())
    request.sequences[0].constraints = (ReasoningState(bytes, end_id=9, budget=5, begin=0),)
    assert finish(engine, request) == [list(range(4, 13))]
    assert drafts_of(engine)[:3] == [[()], [(5, 6, 7)], [()]]  # at index 5 the reasoning must end


def test_drafts_take_free_blocks_only_and_preempt_nobody():
    """Blocks of 4. Each sequence has at most 8 tokens, so 4 blocks hold both, and a draft finds no further block."""
    engine = engine_with(CountingProposer(), num_drafts=8, num_blocks=4)
    requests = [engine.add_request([10 * i, 10 * i + 1], params(max_tokens=6)) for i in (1, 2)]
    assert finish(engine, *requests) == [[12, 13, 14, 15, 16, 17], [22, 23, 24, 25, 26, 27]]
    assert all(request.output.metrics.num_preemptions == 0 for request in requests)


def test_where_blocks_are_short_a_draft_is_cut_to_the_block_that_the_sequence_has():
    """Blocks of 4, and 3 of them: the older sequence drafts into the free one, the younger to the end of its own."""
    engine = engine_with(CountingProposer(), num_drafts=5, num_blocks=3)
    older, younger = engine.add_request([1, 2], params(max_tokens=8)), engine.add_request([51, 52], params(max_tokens=6))
    engine.step()
    engine.step()
    assert drafts_of(engine) == [[(), ()], [(4, 5, 6, 7, 8), (54,)]]
    assert finish(engine, older, younger) == [list(range(3, 11)), list(range(53, 59))]


def test_drafts_that_are_never_right_cost_less_than_a_twentieth(monkeypatch):
    """As with a copy of the model in 4 bits: a draft token takes a third of a step, and a row that is checked a fiftieth."""
    clock = [0.0]
    engine = engine_with(CountingProposer(wrong_from=0), adaptive=True, num_blocks=200, max_model_len=800)
    monkeypatch.setattr("nanoinfer.features.drafts.speculator.time.perf_counter", lambda: clock[0])
    propose, collect = engine.planner.proposer.propose, engine.executor.collect

    def timed_propose(sequences, limits):
        clock[0] += sum(limits) / 3
        return propose(sequences, limits)

    def timed_collect(step):
        seconds = 1 + len(step.plan.rows) / 50
        clock[0] += seconds
        return replace(collect(step), seconds={"forward": seconds})

    engine.planner.proposer.propose, engine.executor.collect = timed_propose, timed_collect
    times = []  # of a request, divided by that without drafts
    for first in (1, 2):
        start = clock[0]
        finish(engine, engine.add_request([first], params(max_tokens=300, ignore_eos=True)))
        times.append((clock[0] - start) / (300 * 1.02))
    assert engine.planner.counts.num_accepted_tokens == 0
    assert times[0] < 1 / 0.95
    assert 1.005 < times[1] < 1.02  # some are tried again


def test_a_step_has_no_more_rows_than_were_planned_for(monkeypatch):
    monkeypatch.setattr("nanoinfer.features.drafts.config.MAX_ROWS", 7)
    engine = engine_with(CountingProposer(), num_drafts=3, max_num_seqs=3, num_blocks=100)
    requests = [engine.add_request([i], params()) for i in (1, 101, 201)]
    finish(engine, *requests)
    assert max(len(plan.rows) for plan in engine.executor.launched) == 7


def test_no_step_is_launched_before_the_tokens_of_the_previous_one_are_known():
    executor, config = FakeExecutor(), EngineConfig(speculative=SpeculativeConfig(method="ngram"))
    executor.info = replace(executor.info, device="cuda")
    assert LLMEngine(executor, config).async_scheduling
    assert not LLMEngine(executor, config, planner=Speculator(CountingProposer(), config.speculative)).async_scheduling
