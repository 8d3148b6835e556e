"""AsyncLLM: many coroutines, one engine. The tokens are those of LLM.generate, and nothing is left behind."""

import asyncio
import importlib
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from nanoinfer import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, StructuredOutputsParams
from nanoinfer.errors import (
    CheckpointNotFoundError,
    EngineDeadError,
    InvalidPromptError,
    InvalidTypeError,
    InvalidValueError,
    NanoinferError,
    QueueFullError,
)
from nanoinfer.features.structured import grammar
from nanoinfer.outputs import Counter, Delta, Gauge
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.server import async_llm as async_llm_module
from nanoinfer.server.async_llm import merged
from tests.helpers import tiny_models
from tests.helpers.limited_steps import limited_steps
from tests.helpers.starts import recorded_starts

PROMPTS = ["Once upon a time", "The cat", "One day, Lily", "Tim and Anna went"]


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny-qwen3", max_num_seqs=8, seed=0)


def serve(scenario, **arguments):
    """Run a coroutine with an AsyncLLM. Afterwards every block is free."""

    async def main():
        async_llm = AsyncLLM("tiny-qwen3", **{"max_num_seqs": 8, "kv_cache_memory": 2**24, "seed": 0} | arguments)
        try:
            return await asyncio.wait_for(scenario(async_llm), timeout=120)
        finally:
            await async_llm.shutdown()
            tiny_models.assert_nothing_is_left(async_llm)
            assert len(asyncio.all_tasks()) == 1

    return asyncio.run(main())


async def submit(async_llm, prompt, its_params, request_id=None, priority=0):
    prepare = partial(async_llm.engine.inputs.prepare_prompt, prompt, its_params, priority=priority)
    return await async_llm.submit(prepare, num_answers=its_params.n, request_id=request_id)


async def final(async_llm, prompt, params):
    async for output in async_llm.generate(prompt, replace(params, output_kind="final_only")):
        result = output
    return result


def params(**more):
    return SamplingParams(**{"max_tokens": 12, "seed": 3} | more)


async def end_of(async_llm):
    """Wait until the ends of all answers are delivered."""
    while async_llm.num_unfinished_answers:
        await asyncio.sleep(0.001)


def test_without_streaming_only_finished_answers_are_delivered(llm):
    async def scenario(async_llm):
        return [output async for output in async_llm.generate(PROMPTS[0], params(n=2, max_tokens=40))]

    outputs = serve(scenario, streaming=False)
    [expected] = llm.generate(PROMPTS[0], params(n=2, max_tokens=40), use_tqdm=False)
    assert [answer.text for answer in outputs[-1].outputs] == [answer.text for answer in expected.outputs]
    assert len(outputs) == 1


def test_cumulative_outputs_grow_and_deltas_add_up(llm):
    its_params = params(n=3, temperature=0.8, logprobs=1)
    expected = llm.generate(PROMPTS[0], its_params, use_tqdm=False)[0].outputs

    async def scenario(async_llm):
        cumulative = [output async for output in async_llm.generate(PROMPTS[0], its_params)]
        deltas = [output async for output in async_llm.generate(PROMPTS[0], replace(its_params, output_kind="delta"))]
        return cumulative, deltas

    cumulative, deltas = serve(scenario)
    assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]
    assert cumulative[-1].outputs == expected
    for before, after in pairwise(cumulative):
        grown = {answer.index: answer.text for answer in after.outputs}
        assert all(grown[answer.index].startswith(answer.text) for answer in before.outputs)
    for index, answer in enumerate(expected):
        parts = [part for output in deltas for part in output.outputs if part.index == index]
        assert "".join(part.text for part in parts) == answer.text
        assert [i for part in parts for i in part.token_ids] == answer.token_ids
        assert [one for part in parts for one in part.logprobs or []] == answer.logprobs
        assert [part.finish_reason for part in parts if part.finish_reason] == [answer.finish_reason]


def test_a_stream_that_is_left_and_a_task_that_is_cancelled_at_any_time_leave_nothing():
    async def scenario(async_llm):
        long = params(max_tokens=400, ignore_eos=True)
        generator = async_llm.generate(PROMPTS[0], long)
        with limited_steps(async_llm.engine, 20):  # so that no answer can end by itself
            await anext(generator)
            await generator.aclose()
            tasks = [asyncio.create_task(final(async_llm, PROMPTS[0], replace(long, seed=i))) for i in range(20)]
            for i, task in enumerate(tasks):
                if i % 3:  # every third task is cancelled before it has begun
                    await asyncio.sleep(0.005)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            while async_llm.engine.num_unfinished:
                await asyncio.sleep(0.001)

    serve(scenario)


def test_a_bad_prompt_is_refused_and_a_long_one_ends_with_an_error():
    async def scenario(async_llm):
        with pytest.raises(InvalidPromptError):
            await final(async_llm, [], params())
        return await final(async_llm, [5] * 2000, params())

    assert serve(scenario).outputs[0].finish_reason == "error"


def test_beyond_the_queue_a_request_is_refused_and_each_answer_counts():
    async def scenario(async_llm):
        long = params(max_tokens=300, ignore_eos=True)
        with limited_steps(async_llm.engine, 5):
            streams = [await submit(async_llm, PROMPTS[0], replace(long, n=8))]
            with pytest.raises(QueueFullError, match="8 answers run or wait, and at most 10 may"):
                await submit(async_llm, PROMPTS[0], params(n=3))
            with pytest.raises(InvalidValueError, match="11 answers are requested, and at most 10 may run or wait"):
                await submit(async_llm, PROMPTS[0], params(n=11))
            streams += [await submit(async_llm, PROMPTS[0], long) for _ in range(2)]
            streams[1].close()
            while async_llm.num_unfinished_answers == 10:  # until the end of this one is delivered
                await asyncio.sleep(0.01)
            streams.append(await submit(async_llm, PROMPTS[0], params(max_tokens=1)))
            for stream in streams:
                stream.close()
        await end_of(async_llm)
        return await final(async_llm, PROMPTS[0], params(n=10, max_tokens=2))

    assert len(serve(scenario, max_num_queued_requests=2).outputs) == 10


def test_a_new_grammar_that_takes_long_delays_no_request_without_one_and_one_that_has_failed_waits(monkeypatch):
    """Clients repeat what has failed."""
    pytest.importorskip("llguidance")
    may_end, waits, sleep = threading.Event(), [], asyncio.sleep
    form = StructuredOutputsParams(regex="a")
    monkeypatch.setattr(grammar._trial_process, "ask", lambda request: "too slow" if may_end.wait(120) else None)

    async def scenario(async_llm):
        formats = [StructuredOutputsParams(regex=f"a{{{i}}}b") for i in range(40)]
        slow = [asyncio.create_task(final(async_llm, PROMPTS[0], params(structured_outputs=one))) for one in formats]
        await asyncio.sleep(0.1)
        free = await final(async_llm, PROMPTS[0], params())
        assert not any(task.done() for task in slow)
        may_end.set()
        errors = await asyncio.gather(*slow, return_exceptions=True)
        prepared = async_llm.engine.inputs.prepare_prompt("x", SamplingParams(structured_outputs=form))
        prepared.compile.func.__self__._refuse(form, "a limit")
        monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0, waits.append(seconds)))
        with pytest.raises(InvalidValueError, match="it has just reached a limit"):
            await submit(async_llm, "x", SamplingParams(structured_outputs=form))
        monkeypatch.undo()
        return free, errors

    free, errors = serve(scenario)
    assert free.finished
    assert {str(error) for error in errors} == {"regex cannot be used: too slow"}
    assert waits == [async_llm_module.REFUSAL_SECONDS]


def test_metrics_are_read_while_it_runs_and_while_it_is_idle():
    async def scenario(async_llm):
        async def values():
            return {one.name: one.value for one in await async_llm.get_metrics() if isinstance(one, Counter | Gauge)}

        idle = await values()
        with limited_steps(async_llm.engine, 5):
            stream = await submit(async_llm, PROMPTS[0], params(max_tokens=300, ignore_eos=True))
            await anext(aiter(stream))
            running = await values()
        cancelled = asyncio.create_task(async_llm.get_metrics())
        await asyncio.sleep(0)
        cancelled.cancel()
        stream.close()
        return idle, running

    idle, running = serve(scenario)
    assert (idle["vllm:num_requests_running"], running["vllm:num_requests_running"]) == (0, 1)
    assert 0 < running["vllm:generation_tokens"] <= 5


class FailingStage:
    """A stage that raises in the calls whose numbers are in `fails`, or for a row whose prompt is `poison` ids long."""

    def __init__(self):
        self.num_calls, self.fails, self.poison = 0, (), None

    def __call__(self, logits, batch):
        self.num_calls += 1
        if self.num_calls in self.fails or (self.poison and any(one.temperature == self.poison for one in batch.params)):
            raise RuntimeError("the stage failed")
        return logits


def test_a_failed_step_is_made_again_then_its_requests_end_and_after_three_in_a_row_the_engine_is_dead(llm):
    stage = FailingStage()

    async def scenario(async_llm):
        stage.fails = (5,)
        outputs = [await final(async_llm, PROMPTS[0], params())]
        stage.poison = 0.123
        outputs.append(await final(async_llm, PROMPTS[0], params(temperature=0.123)))  # two failed steps
        outputs.append(await final(async_llm, PROMPTS[0], params()))
        async_llm.check_health()  # it is not dead
        outputs += [
            await final(async_llm, PROMPTS[0], params(temperature=0.123)) for _ in range(2)
        ]  # two failed steps, and one
        with pytest.raises(EngineDeadError, match="3 steps in a row have failed: RuntimeError: the stage failed; it must be"):
            await submit(async_llm, PROMPTS[0], params())
        return [output.outputs[0] for output in outputs]

    again, failed, good, *dead = serve(scenario, stages=[*STAGES, stage])
    assert again.token_ids == llm.generate(PROMPTS[0], params(), use_tqdm=False)[0].outputs[0].token_ids
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: the stage failed")
    assert [answer.finish_reason for answer in (good, *dead)] == ["length", "error", "error"]


def test_a_panic_of_a_library_fails_the_request_and_not_the_thread():
    class Panic(BaseException):
        pass

    def panic(output_ids, logits):
        raise Panic("a Rust library panicked")

    async def scenario(async_llm):
        bad = await final(async_llm, PROMPTS[0], params(logits_processors=[panic]))
        return bad, await final(async_llm, PROMPTS[0], params())

    bad, good = serve(scenario)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].error) == ("error", "Panic: a Rust library panicked")
    assert good.outputs[0].finish_reason == "length"


def test_a_second_event_loop_and_a_thread_that_has_ended_are_refused():
    async_llm = AsyncLLM("tiny-qwen3", seed=0, kv_cache_memory=2**22)
    asyncio.run(final(async_llm, PROMPTS[0], params(max_tokens=1)))
    with pytest.raises(NanoinferError, match="belongs to the event loop of its first request"):
        asyncio.run(final(async_llm, PROMPTS[0], params()))
    async_llm._thread.close()
    async_llm._thread.join()
    with pytest.raises(EngineDeadError, match="thread has ended"):
        async_llm.check_health()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "./nowhere"}, CheckpointNotFoundError, "there is no folder './nowhere'"),
        ({"max_num_seq": 3}, InvalidTypeError, r"AsyncLLM\(\) has no argument 'max_num_seq'; did you mean max_num_seqs?"),
        ({"max_num_seqs": 0}, InvalidValueError, "max_num_seqs must be >= 1, got 0"),
        ({"pipeline_parallel_size": 2}, InvalidValueError, "pipeline_parallel_size=2 is not supported"),
        ({"max_num_queued_requests": -1}, InvalidValueError, "max_num_queued_requests must be >= 0, got -1"),
        ({"streaming": 1}, InvalidTypeError, "streaming must be True or False, got 1"),
    ],
)
def test_an_error_of_an_argument_or_of_loading_is_raised_by_the_constructor(arguments, error, message):
    with pytest.raises(error, match=message):
        AsyncLLM(**arguments)


def test_the_model_is_loaded_in_the_thread_that_steps(monkeypatch):
    threads = []
    monkeypatch.setattr("nanoinfer.llm.load_engine", record(threads, "nanoinfer.llm.load_engine"))

    async def scenario(async_llm):
        monkeypatch.setattr(async_llm.engine, "step", record(threads, async_llm.engine.step))
        return await final(async_llm, PROMPTS[0], params())

    assert serve(scenario).finished
    assert len(threads) > 2
    assert set(threads) == {"nanoinfer engine"}


def record(threads, function):
    """The function, which notes the thread that calls it."""
    if isinstance(function, str):
        module, _, name = function.rpartition(".")
        function = getattr(importlib.import_module(module), name)

    def recorded(*args):
        threads.append(threading.current_thread().name)
        return function(*args)

    return recorded


# ---- ids


def test_a_given_id_is_used_unless_an_unfinished_request_has_it_and_a_made_id_is_no_given_one():
    async def scenario(async_llm):
        long = params(max_tokens=400, ignore_eos=True)
        running = async_llm.generate(PROMPTS[0], long, "mine")
        with limited_steps(async_llm.engine, 5):
            assert (await anext(running)).request_id == "mine"
            for bad in ("mine", 5):
                with pytest.raises(InvalidValueError, match="request_id must be a string that no unfinished request has, got"):
                    await anext(async_llm.generate(PROMPTS[1], long, bad))
            await async_llm.abort("mine")
            *_, last = [output async for output in running]
        assert last.outputs[0].finish_reason == "abort"
        again = [output async for output in async_llm.generate(PROMPTS[0], params(), "mine")]  # free again
        assert {output.request_id for output in again} == {"mine"}
        assert again[-1].outputs[0].finish_reason == "length"
        with limited_steps(async_llm.engine, 5):  # all are unfinished at the same time
            streams = [await submit(async_llm, PROMPTS[0], params(), str(i)) for i in (0, 2, 4, 6)]
            streams += [await submit(async_llm, PROMPTS[0], params()) for _ in range(4)]
        for stream in streams:
            assert [deltas[-1].request_id async for deltas in stream][-1] == stream.request_id
        return {stream.request_id for stream in streams}

    assert len(serve(scenario)) == 8


def test_an_abort_while_the_prompt_is_prepared_is_not_lost(monkeypatch):
    async def scenario(async_llm):
        has_begun, may_end, prepare = threading.Event(), threading.Event(), async_llm.engine.inputs.prepare_prompt

        def waiting(*args, **options):
            has_begun.set()
            may_end.wait(120)
            return prepare(*args, **options)

        monkeypatch.setattr(async_llm.engine.inputs, "prepare_prompt", waiting)
        generator = async_llm.generate(PROMPTS[0], params(max_tokens=400, ignore_eos=True), "mine")
        first = asyncio.create_task(anext(generator))
        assert await asyncio.to_thread(has_begun.wait, 120)
        await async_llm.abort("mine")
        may_end.set()
        return [await first, *[output async for output in generator]]

    outputs = serve(scenario)
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs[-1].outputs[0].token_ids) < 400


# ---- deliveries


async def sizes_of_the_first(async_llm, num_streams, steps):
    """Generate 40 tokens in each of several streams. Returns the numbers of tokens in the deliveries to the first one.

    steps: Called with the limit of the engine's steps, and with those numbers so far, before each wait of a millisecond.
    """
    sizes, its_params = [], params(max_tokens=40, ignore_eos=True)

    async def read(stream, is_first):
        async for deltas in stream:
            if is_first:
                sizes.append(sum(len(delta.token_ids) for delta in deltas))

    with limited_steps(async_llm.engine, 0) as limit:
        streams = [await submit(async_llm, PROMPTS[0], its_params) for _ in range(num_streams)]
        readers = asyncio.gather(*(read(stream, stream is streams[0]) for stream in streams))
        while not readers.done():
            steps(limit, sizes)
            await asyncio.sleep(0.001)
        await readers
    return sizes


def one_at_a_time(limit, sizes):
    """Allow a step when the tokens of all steps so far are delivered."""
    if sum(sizes) == limit.num_allowed:
        limit.allow(1)


def first_and_rest(limit, sizes):
    """Allow the step that gives the first token, and the others when it is delivered."""
    limit.num_allowed = 100 if sizes else 1


@pytest.mark.parametrize("is_held", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_few_streams_a_token_needs_no_further_step_to_be_delivered(monkeypatch, is_held):
    if is_held:
        monkeypatch.setattr(async_llm_module, "HOLD_SECONDS_PER_STREAM", 1.0)
        monkeypatch.setattr(async_llm_module, "MAX_HOLD_SECONDS", 0.005)
    scenario = partial(sizes_of_the_first, num_streams=2, steps=one_at_a_time)
    assert serve(scenario, async_scheduling=False) == [1] * 40


def test_with_many_streams_tokens_are_delivered_together_except_for_the_first(monkeypatch):
    monkeypatch.setattr(async_llm_module, "MAX_HOLD_SECONDS", 1e6)
    monkeypatch.setattr(async_llm_module, "HOLD_SECONDS_PER_STREAM", 1e6)
    scenario = partial(sizes_of_the_first, num_streams=8, steps=first_and_rest)
    assert serve(scenario, async_scheduling=False) == [1, 39]  # held until the end


def test_a_stream_that_is_not_read_keeps_one_delta_per_answer_and_holds_back_no_other():
    async def scenario(async_llm):
        its_params = params(max_tokens=40, ignore_eos=True)
        with limited_steps(async_llm.engine, 0) as limit:
            unread = await submit(async_llm, PROMPTS[1], replace(its_params, n=2))
            read, sizes = await submit(async_llm, PROMPTS[0], its_params), []
            limit.allow(1)
            async for deltas in read:
                sizes.append(sum(len(delta.token_ids) for delta in deltas))
                limit.allow(1)  # what the unread stream has got, nobody has taken
            limit.allow(10)
            await end_of(async_llm)
        updates = [deltas async for deltas in unread]
        assert [[delta.text for delta in deltas] for deltas in updates] == [[answer.text for answer in unread.output.outputs]]
        return sizes, [[(delta.index, len(delta.token_ids)) for delta in deltas] for deltas in updates]

    assert serve(scenario, async_scheduling=False) == ([1] * 40, [[(0, 40), (1, 40)]])


async def calls_of_each_step(async_llm, num_streams, *, num_later=0):
    """Generate 5 tokens in several streams, and in others that begin after two steps.

    Returns: for each step, how often the engine's thread has called the event loop.
    """
    loop, calls = asyncio.get_running_loop(), []
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counted(*args, **options):
        if threading.current_thread().name == "nanoinfer engine":
            calls.append(limit.num_made)
        return call_soon_threadsafe(*args, **options)

    loop.call_soon_threadsafe = counted
    its_params = params(max_tokens=5, ignore_eos=True)
    with limited_steps(async_llm.engine, 0) as limit:
        streams = [await submit(async_llm, PROMPTS[0], its_params) for _ in range(num_streams)]
        while async_llm.num_unfinished_answers:
            if limit.num_allowed == 2:
                streams += [await submit(async_llm, PROMPTS[1], its_params) for _ in range(num_later)]
            limit.allow(1)
            await until_published(async_llm, limit)
    del loop.call_soon_threadsafe
    return [calls.count(step) for step in range(1, limit.num_made + 1)]


async def until_published(async_llm, limit):
    """Wait until all allowed steps are made, and what they published is delivered. The waiting calls no event loop."""
    async_llm._thread.call(lambda: None).result(120)  # what was submitted has reached the engine
    while limit.num_made < limit.num_allowed and async_llm.engine.num_unfinished:
        time.sleep(0.001)
    async_llm._thread.call(lambda: None).result(120)  # the engine's thread has published
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("num_streams", "num_later", "hold_seconds", "calls"),
    [
        (8, 0, 0, [1] * 5),
        (
            3,
            3,
            0,
            [1, 1, 2, 1, 2, 1, 1],
        ),  # three begin in step 1 and end in step 5, the others begin in step 3 and end in step 7
        (3, 0, 1e6, [1, 1, 0, 0, 1]),  # the second call plans the delivery
    ],
)
def test_a_step_calls_the_event_loop_once_for_first_tokens_and_once_for_later_ones_that_are_not_held(
    monkeypatch, num_streams, num_later, hold_seconds, calls
):
    for name in ("HOLD_SECONDS_PER_STREAM", "MAX_HOLD_SECONDS"):
        monkeypatch.setattr(async_llm_module, name, hold_seconds)
    scenario = partial(calls_of_each_step, num_streams=num_streams, num_later=num_later)
    assert serve(scenario, async_scheduling=False) == calls


@pytest.mark.parametrize(("num_streams", "hold_seconds"), [(7, 0.007), (64, 0.050)])
def test_a_token_is_held_1_ms_for_each_open_stream_and_at_most_50(num_streams, hold_seconds):
    """The event loop's clock stands still, except where the test moves it."""

    async def scenario(async_llm):
        loop, planned, its_params = asyncio.get_running_loop(), [], params(max_tokens=40, ignore_eos=True)
        start, call_at = loop.time(), loop.call_at
        now = [start]
        with limited_steps(async_llm.engine, 0) as limit, pytest.MonkeyPatch.context() as patch:
            streams = [await submit(async_llm, PROMPTS[0], its_params) for _ in range(num_streams)]
            patch.setattr(async_llm, "_last_delivery", start)
            patch.setattr(loop, "time", lambda: now[0])
            patch.setattr(loop, "call_at", lambda when, *args: planned.append(when) or call_at(when, *args))
            sizes = []
            for _ in range(2):
                limit.allow(1)
                await until_published(async_llm, limit)
            for moment in (0.0, hold_seconds - 1e-4, hold_seconds + 1e-4):
                now[0] = start + moment
                for _ in range(3):  # a timer that is due is called in the loop's next turn
                    await asyncio.sleep(0)
                sizes.append([sum(len(delta.token_ids) for delta in stream.take()) for stream in streams])
            limit.allow(1)
            await until_published(async_llm, limit)
            for stream in streams:
                stream.close()
        return [when - start for when in planned], sizes

    planned, sizes = serve(scenario, async_scheduling=False, max_num_seqs=64)
    assert planned == [pytest.approx(hold_seconds, abs=1e-6), pytest.approx(2 * hold_seconds + 1e-4, abs=1e-6)]
    # The first tokens, then nothing until it is due. take() empties a stream.
    assert sizes == [[1] * num_streams, [0] * num_streams, [1] * num_streams]


def test_a_token_that_is_published_during_a_delivery_needs_no_further_step(monkeypatch):
    """The next step is made after the delivery has taken the tokens of the one before it, and before it has ended."""
    monkeypatch.setattr(async_llm_module, "HOLD_SECONDS_PER_STREAM", 0)

    async def scenario(async_llm):
        sizes = []
        with limited_steps(async_llm.engine, 1) as limit:
            stream = await submit(async_llm, PROMPTS[0], params(max_tokens=40, ignore_eos=True))
            sizes.append(len((await anext(aiter(stream)))[0].token_ids))
            deliver = stream.deliver

            def deliver_and_step():
                deltas = deliver()
                if deltas and limit.num_allowed == 2:
                    limit.allow(1)
                    while limit.num_made < 3:
                        time.sleep(0.001)
                    async_llm._thread.call(lambda: None).result(120)  # the thread has published
                return deltas

            stream.deliver = deliver_and_step
            limit.allow(1)
            await until_published(async_llm, limit)
            sizes.append(sum(len(delta.token_ids) for delta in stream.take()))
            num_made = limit.num_made
            stream.close()
        return sizes, num_made

    assert serve(scenario, async_scheduling=False) == ([1, 2], 3)


# ---- priorities


async def generate_all(async_llm, *requests):
    """Begin requests, (request_id, priority, max_tokens), one after another, and return the tasks that read their answers."""
    tasks = []

    async def read(request_id, priority, max_tokens):
        its_params = params(max_tokens=max_tokens, ignore_eos=True)
        return [output async for output in async_llm.generate(PROMPTS[0], its_params, request_id, priority=priority)][-1]

    for request in requests:
        num_before = async_llm.engine.num_unfinished
        tasks.append(asyncio.create_task(read(*request)))
        while async_llm.engine.num_unfinished == num_before:
            assert not tasks[-1].done(), tasks[-1].exception()
            await asyncio.sleep(0.001)
    return tasks


def test_while_the_engine_is_full_requests_start_by_priority_then_arrival_and_preempt_none():
    async def scenario(async_llm):
        with recorded_starts(async_llm.engine) as starts, limited_steps(async_llm.engine, 0) as limit:
            tasks = await generate_all(async_llm, ("running 1", 9, 40), ("running 2", 9, 40))
            limit.allow(2)
            await until_published(async_llm, limit)
            early = [("c1", 3, 4), ("b1", 0, 4), ("a", -2, 4), ("b2", 0, 4), ("c2", 3, 4), ("d", 2**63 - 1, 4), ("b3", 0, 4)]
            tasks += await generate_all(async_llm, *early)
            limit.allow(10)
            await until_published(async_llm, limit)
            assert [seq.request_id for seq in starts] == ["running 1", "running 2"]
            await async_llm.abort("running 1")  # from here on one starts when one has ended
            limit.allow(6)
            await until_published(async_llm, limit)
            tasks += await generate_all(async_llm, ("late", -(2**63), 4))
            limit.allow(1000)
            outputs = await asyncio.gather(*tasks)
        return [seq.request_id for seq in starts[2:]], sum(output.metrics.num_preemptions for output in outputs)

    order, num_preemptions = serve(scenario, scheduling_policy="priority", max_num_seqs=2, async_scheduling=False)
    assert order == ["a", "b1", "late", "b2", "b3", "c1", "c2", "d"]
    assert num_preemptions == 0


@pytest.mark.parametrize(("timeout", "reason"), [(120, "length"), (0, "abort")])
def test_shutdown_waits_as_long_as_it_is_told_and_refuses_new_requests(timeout, reason):
    async def scenario(async_llm):
        running = asyncio.create_task(final(async_llm, PROMPTS[0], params(max_tokens=20, ignore_eos=True)))
        with limited_steps(async_llm.engine, 5):
            while not async_llm.engine.num_unfinished:
                await asyncio.sleep(0.001)
            closing = async_llm.shutdown(timeout=timeout)
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="shutting down"):
                await submit(async_llm, PROMPTS[0], params())
            if not timeout:
                await closing
        await closing
        return await running

    assert serve(scenario).outputs[0].finish_reason == reason


def test_the_end_of_a_block_and_a_shutdown_that_nobody_awaits_free_the_model():
    async def in_a_block():
        async with AsyncLLM("tiny-qwen3", kv_cache_memory=2**22) as async_llm:
            await final(async_llm, PROMPTS[0], params(max_tokens=1))
        return async_llm

    async def unawaited():
        async_llm = AsyncLLM.from_engine_args(AsyncEngineArgs("tiny-qwen3", seed=0, kv_cache_memory=2**22))
        await final(async_llm, PROMPTS[0], params(max_tokens=2))
        async_llm.shutdown()  # the event loop ends before it could begin
        return async_llm

    for scenario in (in_a_block, unawaited):
        async_llm = asyncio.run(scenario())
        assert repr(async_llm.llm) == "LLM('tiny-qwen3', closed)"
        assert not async_llm._thread.is_alive()


def test_two_deltas_of_an_answer_merge_into_one():
    first, second = Delta("a", [1], logprobs=[{}], index=2), Delta("b", [2], logprobs=[{}], index=2, finish_reason="stop")
    assert merged([first])[0] is first
    both = Delta("ab", [1, 2], logprobs=[{}, {}], index=2, finish_reason="stop")
    assert merged([first, second]) == [both]
    assert (
        merged([first, Delta("c", [3]), second])
        == merged([*merged([first, Delta("c", [3])]), second])
        == [Delta("c", [3]), both]
    )
