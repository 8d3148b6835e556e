"""AsyncLLM: many coroutines, one engine. The tokens are those of LLM.generate, and nothing is left behind."""

import asyncio
import gc
import inspect
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from nanoinfer import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, StructuredOutputsParams, errors
from nanoinfer.features.structured import grammar
from nanoinfer.outputs import Delta
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.server import async_llm as async_llm_module
from nanoinfer.server import engine_thread
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


def with_async_llm(**arguments):
    """Make a test of a coroutine whose first parameter is an AsyncLLM with these arguments."""

    def decorate(test):
        def run(**fixtures):
            serve(partial(test, **fixtures), **arguments)

        parameters = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([one for one in parameters if one.name != "async_llm"])
        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


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


@with_async_llm(streaming=False)
async def test_without_streaming_only_finished_answers_are_delivered(async_llm, llm):
    [output] = [output async for output in async_llm.generate(PROMPTS[0], params(n=2, max_tokens=40))]
    [expected] = llm.generate(PROMPTS[0], params(n=2, max_tokens=40), use_tqdm=False)
    assert [answer.text for answer in output.outputs] == [answer.text for answer in expected.outputs]


@with_async_llm()
async def test_cumulative_outputs_grow_and_deltas_add_up(async_llm, llm):
    its_params = params(n=3, temperature=0.8, logprobs=1)
    expected = llm.generate(PROMPTS[0], its_params, use_tqdm=False)[0].outputs

    cumulative = [output async for output in async_llm.generate(PROMPTS[0], its_params)]
    deltas = [output async for output in async_llm.generate(PROMPTS[0], replace(its_params, output_kind="delta"))]
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


@with_async_llm()
async def test_a_stream_that_is_left_and_a_task_that_is_cancelled_at_any_time_leave_nothing(async_llm):
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


@with_async_llm()
async def test_a_bad_prompt_is_refused_and_a_long_one_ends_with_an_error(async_llm):
    with pytest.raises(errors.InvalidPromptError):
        await final(async_llm, [], params())
    output = await final(async_llm, [5] * 2000, params())
    assert output.outputs[0].finish_reason == "error"


@with_async_llm(max_num_queued_requests=2)
async def test_beyond_the_queue_a_request_is_refused_and_each_answer_counts(async_llm):
    long = params(max_tokens=300, ignore_eos=True)
    with limited_steps(async_llm.engine, 5):
        streams = [await submit(async_llm, PROMPTS[0], replace(long, n=8))]
        with pytest.raises(errors.QueueFullError, match="8 answers run or wait, and at most 10 may"):
            await submit(async_llm, PROMPTS[0], params(n=3))
        with pytest.raises(errors.InvalidValueError, match="11 answers are requested, and at most 10 may run or wait"):
            await submit(async_llm, PROMPTS[0], params(n=11))
        streams += [await submit(async_llm, PROMPTS[0], long) for _ in range(2)]
        streams[1].close()
        while async_llm.num_unfinished_answers == 10:  # until the end of this one is delivered
            await asyncio.sleep(0.01)
        streams.append(await submit(async_llm, PROMPTS[0], params(max_tokens=1)))
        for stream in streams:
            stream.close()
    await end_of(async_llm)
    output = await final(async_llm, PROMPTS[0], params(n=10, max_tokens=2))
    assert len(output.outputs) == 10


@with_async_llm()
async def test_a_new_grammar_delays_no_request_without_one_and_one_that_has_failed_waits(async_llm, monkeypatch):
    """Clients repeat what has failed."""
    pytest.importorskip("llguidance")
    may_end, waits, sleep = threading.Event(), [], asyncio.sleep
    form = StructuredOutputsParams(regex="a")
    monkeypatch.setattr(grammar._trial_process, "ask", lambda request: "too slow" if may_end.wait(120) else None)

    formats = [StructuredOutputsParams(regex=f"a{{{i}}}b") for i in range(40)]
    slow = [asyncio.create_task(final(async_llm, PROMPTS[0], params(structured_outputs=one))) for one in formats]
    await asyncio.sleep(0.1)
    free = await final(async_llm, PROMPTS[0], params())
    assert not any(task.done() for task in slow)
    may_end.set()
    refused = await asyncio.gather(*slow, return_exceptions=True)
    prepared = async_llm.engine.inputs.prepare_prompt("x", SamplingParams(structured_outputs=form))
    prepared.compile.func.__self__._refuse(form, "a limit")
    loop = asyncio.get_running_loop()

    def at_once(seconds):  # in this loop only: the servers of other tests have their own
        return sleep(0, waits.append(seconds)) if asyncio.get_running_loop() is loop else sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", at_once)
    with pytest.raises(errors.InvalidValueError, match="it has just reached a limit"):
        await submit(async_llm, "x", SamplingParams(structured_outputs=form))
    monkeypatch.undo()
    assert free.finished
    assert {str(error) for error in refused} == {"regex cannot be used: too slow"}
    assert waits == [async_llm_module.REFUSAL_SECONDS]


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
        outputs += [await final(async_llm, PROMPTS[0], params(temperature=0.123)) for _ in range(2)]  # three failed steps
        with pytest.raises(errors.EngineDeadError, match="3 steps in a row have failed: RuntimeError: the stage failed; it"):
            await submit(async_llm, PROMPTS[0], params())
        return [output.outputs[0] for output in outputs]

    again, failed, good, *dead = serve(scenario, stages=[*STAGES, stage])
    assert again.token_ids == llm.generate(PROMPTS[0], params(), use_tqdm=False)[0].outputs[0].token_ids
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: the stage failed")
    assert [answer.finish_reason for answer in (good, *dead)] == ["length", "error", "error"]


@with_async_llm()
async def test_a_panic_of_a_library_fails_the_request_and_not_the_thread(async_llm):
    class Panic(BaseException):
        pass

    def panic(output_ids, logits):
        raise Panic("a Rust library panicked")

    bad = await final(async_llm, PROMPTS[0], params(logits_processors=[panic]))
    good = await final(async_llm, PROMPTS[0], params())
    assert (bad.outputs[0].finish_reason, bad.outputs[0].error) == ("error", "Panic: a Rust library panicked")
    assert good.outputs[0].finish_reason == "length"


def test_a_second_event_loop_and_a_thread_that_has_ended_are_refused():
    async_llm = AsyncLLM("tiny-qwen3", seed=0, kv_cache_memory=2**22)
    asyncio.run(final(async_llm, PROMPTS[0], params(max_tokens=1)))
    with pytest.raises(errors.NanoinferError, match="belongs to the event loop of its first request"):
        asyncio.run(final(async_llm, PROMPTS[0], params()))
    async_llm._thread.close()
    async_llm._thread.join()
    with pytest.raises(errors.EngineDeadError, match="thread has ended"):
        async_llm.check_health()


def test_an_error_of_an_argument_or_of_loading_is_raised_by_the_constructor():
    for arguments, error, message in (
        ({"model": "./nowhere"}, errors.CheckpointNotFoundError, "there is no folder './nowhere'"),
        ({"max_num_seq": 3}, errors.InvalidTypeError, "has no argument 'max_num_seq'; did you mean max_num_seqs?"),
        ({"max_num_seqs": 0}, errors.InvalidValueError, "max_num_seqs must be >= 1, got 0"),
        ({"pipeline_parallel_size": 2}, errors.InvalidValueError, "pipeline_parallel_size=2 is not supported"),
        ({"max_num_queued_requests": -1}, errors.InvalidValueError, "max_num_queued_requests must be >= 0, got -1"),
        ({"streaming": 1}, errors.InvalidTypeError, "streaming must be True or False, got 1"),
    ):
        with pytest.raises(error, match=message):
            AsyncLLM(**arguments)


# ---- ids


@with_async_llm()
async def test_a_given_id_is_used_unless_an_unfinished_request_has_it_and_a_made_id_is_no_given_one(async_llm):
    long = params(max_tokens=400, ignore_eos=True)
    running = async_llm.generate(PROMPTS[0], long, "mine")
    with limited_steps(async_llm.engine, 5):
        assert (await anext(running)).request_id == "mine"
        for bad in ("mine", 5):
            with pytest.raises(errors.InvalidValueError, match="request_id must be a string that no unfinished request has"):
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
    assert len({stream.request_id for stream in streams}) == 8


@with_async_llm()
async def test_an_abort_while_the_prompt_is_prepared_is_not_lost(async_llm, monkeypatch):
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
    [*_, last] = [await first, *[output async for output in generator]]
    assert last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) < 400


# ---- deliveries


@with_async_llm(async_scheduling=False)
async def test_a_stream_that_is_not_read_keeps_one_delta_per_answer_and_holds_back_no_other(async_llm):
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
    assert [[(delta.index, len(delta.token_ids)) for delta in deltas] for deltas in updates] == [[(0, 40), (1, 40)]]
    assert sizes == [1] * 40


async def calls_of_each_step(async_llm, num_streams, *, num_later=0):
    """Generate 5 tokens in several streams, and in others that begin after two steps.

    Returns: for each step, how often the engine's thread has called the event loop.
    """
    loop, calls, thread = asyncio.get_running_loop(), [], async_llm._thread
    call_soon_threadsafe, publish_news, published = loop.call_soon_threadsafe, thread._publish_news, [0]

    def publish_once():
        """Not again while the thread waits for a step: on a busy machine the loop may not have taken the deltas yet."""
        if published[-1] != limit.num_made:
            published.append(limit.num_made)
            publish_news()

    def counted(*args, **options):
        if threading.current_thread().name == "nanoinfer engine":
            calls.append(limit.num_made)
        return call_soon_threadsafe(*args, **options)

    loop.call_soon_threadsafe, thread._publish_news = counted, publish_once
    its_params = params(max_tokens=5, ignore_eos=True)
    with limited_steps(async_llm.engine, 0) as limit:
        streams = [await submit(async_llm, PROMPTS[0], its_params) for _ in range(num_streams)]
        while async_llm.num_unfinished_answers:
            if limit.num_allowed == 2:
                streams += [await submit(async_llm, PROMPTS[1], its_params) for _ in range(num_later)]
            limit.allow(1)
            await until_published(async_llm, limit)
    del loop.call_soon_threadsafe, thread._publish_news
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
        (3, 3, 0, [1, 1, 2, 1, 2, 1, 1]),  # three begin in step 1 and end in step 5, three begin in step 3 and end in step 7
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


@pytest.mark.parametrize(("most_seconds", "num_in_first_step"), [(120, 2), (0, 1)])
@with_async_llm(async_scheduling=False)
async def test_an_idle_engine_waits_for_a_request_that_is_being_prepared(
    async_llm, monkeypatch, most_seconds, num_in_first_step
):
    """The second request is prepared after the engine has got the first one."""
    engine, has_first, sizes, is_stepping = async_llm.engine, threading.Event(), [], threading.Event()
    submit_to_engine, step = engine.submit, engine.step
    its_params = params(ignore_eos=True)

    def submit_and_tell(*args, **options):
        has_first.set()
        return submit_to_engine(*args, **options)

    def counted_step():
        sizes.append(engine.num_unfinished)
        is_stepping.set()
        return step()

    def prepare(*, is_late):
        assert not is_late or has_first.wait(120)
        assert not is_late or most_seconds or is_stepping.wait(120)
        return engine.inputs.prepare_prompt(PROMPTS[0], its_params)

    monkeypatch.setattr(engine_thread, "TOGETHER_SECONDS", most_seconds)
    monkeypatch.setattr(engine, "submit", submit_and_tell)
    monkeypatch.setattr(engine, "step", counted_step)
    prepares = [partial(prepare, is_late=is_late) for is_late in (False, True)]
    streams = await asyncio.gather(*(async_llm.submit(one, num_answers=1) for one in prepares))
    for stream in streams:
        async for _ in stream:
            pass
    assert sizes[0] == num_in_first_step


@pytest.mark.parametrize(("num_streams", "hold_seconds"), [(7, 0.014), (64, 0.050)])
@with_async_llm(async_scheduling=False, max_num_seqs=64)
async def test_a_token_is_held_2_ms_for_each_open_stream_and_at_most_50(async_llm, num_streams, hold_seconds):
    """The event loop's clock stands still, except where the test moves it."""

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
    due = [pytest.approx(hold_seconds, abs=1e-6), pytest.approx(2 * hold_seconds + 1e-4, abs=1e-6)]
    assert [when - start for when in planned] == due
    # The first tokens, then nothing until it is due. take() empties a stream.
    assert sizes == [[1] * num_streams, [0] * num_streams, [1] * num_streams]


@with_async_llm(async_scheduling=False)
async def test_a_token_that_is_published_during_a_delivery_needs_no_further_step(async_llm, monkeypatch):
    """The next step is made after the delivery has taken the tokens of the one before it, and before it has ended."""
    monkeypatch.setattr(async_llm_module, "HOLD_SECONDS_PER_STREAM", 0)

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
    assert (sizes, num_made) == ([1, 2], 3)


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


@with_async_llm(scheduling_policy="priority", max_num_seqs=2, async_scheduling=False)
async def test_while_the_engine_is_full_requests_start_by_priority_then_arrival_and_preempt_none(async_llm):
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
    assert [seq.request_id for seq in starts[2:]] == ["a", "b1", "late", "b2", "b3", "c1", "c2", "d"]
    assert sum(output.metrics.num_preemptions for output in outputs) == 0


@pytest.mark.parametrize(("timeout", "reason"), [(120, "length"), (0, "abort")])
@with_async_llm()
async def test_shutdown_waits_as_long_as_it_is_told_and_refuses_new_requests(async_llm, timeout, reason):
    running = asyncio.create_task(final(async_llm, PROMPTS[0], params(max_tokens=20, ignore_eos=True)))
    with limited_steps(async_llm.engine, 5):
        while not async_llm.engine.num_unfinished:
            await asyncio.sleep(0.001)
        closing = async_llm.shutdown(timeout=timeout)
        await asyncio.sleep(0)
        with pytest.raises(errors.EngineDeadError, match="shutting down"):
            await submit(async_llm, PROMPTS[0], params())
        if not timeout:
            await closing
    await closing
    output = await running
    assert output.outputs[0].finish_reason == reason


def test_the_end_of_a_block_and_a_shutdown_that_nobody_awaits_free_the_model(monkeypatch):
    for module, name in ((sys, "setswitchinterval"), (gc, "freeze")):  # only servers change the process (test_shutdown.py)
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("the process is changed"))

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
