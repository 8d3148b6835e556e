"""LLMEngine.step() with an Executor that has no model: what is launched when, and what becomes of the tokens."""

import random

import pytest

from nanoinfer import SamplingParams
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.execution.executor import SequenceOutput
from nanoinfer.features.metrics.engine_metrics import EngineMetrics
from tests.helpers.fake_executor import FakeExecutor


def engine_for(executor, *, is_async=False, **scheduler):
    config = EngineConfig(async_scheduling=is_async, scheduler=SchedulerConfig(**scheduler), cache=CacheConfig())
    return LLMEngine(executor, config, eos_token_ids=frozenset([900]), observer=EngineMetrics())


def params(max_tokens=5, **more):
    return SamplingParams(max_tokens=max_tokens, detokenize=False, **more)


def finish(engine, *requests):
    for _ in range(1000):
        if not engine.num_unfinished:
            break
        engine.step()
    assert engine.num_unfinished == 0
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    return [request.output.outputs[0] for request in requests]


@pytest.mark.parametrize("must_sync", [False, True])
def test_with_async_scheduling_a_step_is_launched_first_unless_the_tokens_must_reach_the_host(must_sync):
    engine = engine_for(FakeExecutor(must_sync=must_sync), is_async=True)
    request = engine.add_request([1], params())
    engine.step()
    seq = request.sequences[0]
    assert (seq.num_tokens - len(seq.token_ids), seq.num_output_tokens) == ((0, 1) if must_sync else (1, 0))


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7])
def test_a_sequence_may_receive_several_tokens_per_step(tokens_per_step):
    engine = engine_for(FakeExecutor(tokens_per_step=tokens_per_step), chunk_size=4)
    requests = [engine.add_request([n] * (n + 1), params(max_tokens=10)) for n in range(4)]
    for n, answer in enumerate(finish(engine, *requests)):
        assert answer.token_ids == list(range(n + 1, n + 11))
        assert answer.finish_reason == "length"


def test_tokens_behind_a_stop_are_dropped():
    engine = engine_for(FakeExecutor(tokens_per_step=4))
    by_eos = engine.add_request([897], params(max_tokens=20))
    by_id = engine.add_request([10], params(max_tokens=20, stop_token_ids=[12]))
    answers = finish(engine, by_eos, by_id)
    assert [answer.token_ids for answer in answers] == [[898, 899, 900], [11, 12]]
    assert [(answer.finish_reason, answer.stop_reason) for answer in answers] == [("stop", None), ("stop", 12)]


def test_a_row_without_a_token_ends_with_its_error_and_its_blocks_leave_the_prefix_cache():
    class Failing(FakeExecutor):
        def sample(self, seq):
            return SequenceOutput(seq, error="broken") if seq.request_id == "0" else super().sample(seq)

    engine = engine_for(Failing())
    prompts = [[3] * 9, [4] * 9]
    answers = finish(engine, *(engine.add_request(prompt, params()) for prompt in prompts))
    assert [answer.finish_reason for answer in answers] == ["error", "length"]
    assert answers[0].error == "broken"
    again = [engine.add_request(prompt, params()) for prompt in prompts]
    finish(engine)
    assert [request.output.metrics.num_cached_tokens for request in again] == [0, 8]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("part", ["launch", "collect"])
def test_after_a_failed_step_every_request_is_computed_again(part, is_async):
    engine = engine_for(FakeExecutor(), is_async=is_async)
    requests = [engine.add_request([n] * 5, params()) for n in (1, 2, 3)]
    engine.step()
    engine.step()
    works = getattr(engine.executor, part)
    setattr(engine.executor, part, lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    setattr(engine.executor, part, works)
    assert [answer.token_ids for answer in finish(engine, *requests)] == [list(range(n + 1, n + 6)) for n in (1, 2, 3)]


def test_what_is_in_flight_for_an_aborted_request_is_dropped():
    engine = engine_for(FakeExecutor(), is_async=True)
    doomed, kept = (engine.add_request([n], params()) for n in (1, 2))
    engine.step()
    engine.abort(doomed.request_id)
    answers = finish(engine, doomed, kept)
    assert [answer.finish_reason for answer in answers] == ["abort", "length"]
    assert answers[0].token_ids == []


def test_an_abort_during_a_step_takes_effect_when_the_step_is_over():
    engine = engine_for(FakeExecutor())
    doomed, kept = (engine.add_request([n], params()) for n in (1, 2))
    launch = engine.executor.launch
    engine.executor.launch = lambda *arguments: engine.abort(doomed.request_id) or launch(*arguments)
    answers = finish(engine, doomed, kept)
    assert [answer.finish_reason for answer in answers] == ["abort", "length"]
    assert answers[0].token_ids == [2]


def test_random_requests_end_right_and_lose_no_block():
    rng = random.Random(0)
    for tokens_per_step in (1, 3):
        executor = FakeExecutor(num_blocks=20, tokens_per_step=tokens_per_step)
        engine = engine_for(executor, is_async=tokens_per_step == 1, max_num_seqs=6, chunk_size=8)
        requests = []
        for _ in range(100):
            prompt = [rng.randrange(500)] * rng.randint(1, 40)
            requests.append(engine.add_request(prompt, params(max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 3]))))
            engine.step()
        finish(engine)
        for request in requests:
            first, length = request.output.prompt_token_ids[-1] + 1, request.sequences[0].params.max_tokens
            assert all(answer.token_ids == list(range(first, first + length)) for answer in request.output.outputs)
