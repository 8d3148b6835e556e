"""Invariance and leaks: however a request is run, its tokens are those of a dense forward pass, and no block is lost."""

import copy
import random

import pytest
import torch

from nanoinfer import Recorder, SamplingParams
from nanoinfer.attention.cache_sizes import CacheSizes
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.build import make_engine
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoinfer.features.tracing import StepScheduled
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.sampling.routes import RoutedSampler
from nanoinfer.sampling.sampler import Sampler
from tests.helpers import tiny_models
from tests.helpers.growing import grow

BLOCK_SIZE = 4


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def model(request, tmp_path_factory):
    return loader.load_model(Checkpoint.open(str(tiny_models.save(request.param, tmp_path_factory.mktemp(request.param)))))


def engine_for(
    model, *, num_blocks=64, chunk_size=1024, backend="cpu", tracer=None, prefix_caching=True, max_num_seqs=256, is_async=False
):
    one_block = CacheSizes.of(model.config).bytes_per_block(BLOCK_SIZE, torch.float32)
    config = EngineConfig(
        attention_backend=backend,
        async_scheduling=is_async,
        tracer=tracer,
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_memory=num_blocks * one_block, enable_prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(chunk_size=chunk_size, max_num_batched_tokens=64, max_num_seqs=max_num_seqs),
    )
    return make_engine(copy.deepcopy(model), config)  # its modules are replaced by faster ones


of_one_model = pytest.mark.parametrize("model", ["qwen3"], indirect=True)


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False, **params)


def run(engine, requests):
    """Step until all have ended. Every step must end something or compute something: 10,000 steps are a hang."""
    for _ in range(10_000):
        if all(request.output for request in requests):
            break
        engine.step()
    assert engine.num_unfinished == 0
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    assert set(engine.block_manager.blocks.ref_counts) == {0}
    return [request.output.outputs[0] for request in requests]


def dense_greedy(model, prompt, num_tokens):
    """One token at a time, each from a whole forward pass without any cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), DenseAttention())
            ids.append(int(model.compute_logits(hidden[-1]).argmax()))
    return ids[len(prompt) :]


def random_prompt(rng, length):
    return [rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)]


WAYS = {
    "alone": {},
    "chunked": {"chunk_size": 8},
    "chunks that are no multiple of a block": {"chunk_size": 7},
    "without prefix caching": {"prefix_caching": False},
    "few blocks, so that sequences are preempted": {"num_blocks": 22, "chunk_size": 16},
    "the reference backend": {"backend": "reference", "chunk_size": 16},
    "one at a time": {"max_num_seqs": 1},
    "launched before the step before is read": {"is_async": True},
    "the same, chunked": {"is_async": True, "chunk_size": 7},
    "the same, preempted": {"is_async": True, "num_blocks": 22, "chunk_size": 16},
}


@pytest.fixture(scope="module")
def dense(model):
    """Prompts of which two share six blocks, and their 20 greedy tokens."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 5, 13, 40, 63)]
    prompts.append(prompts[3][:24] + random_prompt(rng, 9))
    return prompts, [dense_greedy(model, prompt, 20) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_how_the_requests_are_run(model, dense, way):
    prompts, expected = dense
    engine = engine_for(model, **WAYS[way])
    batches = [[prompt] for prompt in prompts] if way == "alone" else [prompts]
    answers = []
    for batch in batches:
        answers += run(engine, [engine.add_request(prompt, greedy(20)) for prompt in batch])
    assert [answer.token_ids for answer in answers] == expected


def test_few_blocks_really_preempt_and_a_second_run_really_hits_the_prefix_cache(model):
    rng = random.Random(1)
    prompts = [random_prompt(rng, 30) for _ in range(4)]
    recorder = Recorder()
    engine = engine_for(model, num_blocks=22, tracer=recorder)
    first = [engine.add_request(prompt, greedy(20)) for prompt in prompts]
    run(engine, first)
    assert sum(request.output.metrics.num_preemptions for request in first) > 0
    assert any(event.preempted for event in recorder.events if isinstance(event, StepScheduled))
    again = engine.add_request(prompts[-1], greedy(20))
    run(engine, [again])
    assert again.output.metrics.num_cached_tokens == 28
    assert again.output.outputs[0].token_ids == first[-1].output.outputs[0].token_ids


@of_one_model
def test_logits_of_a_chunked_batched_step_equal_a_dense_forward_pass(model):
    """Not only the greedy token: the rows themselves, where prompts, chunks and decodes share a step."""
    rng = random.Random(2)
    engine = engine_for(model, chunk_size=8)
    seen, ours = [], engine.executor.runner.model
    compute_logits = ours.compute_logits
    ours.compute_logits = lambda hidden: seen.append(compute_logits(hidden)) or seen[-1]
    compared = 0
    requests = [engine.add_request(random_prompt(rng, 9 + 8 * i), greedy(6)) for i in range(4)]
    plans = []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]
    while engine.num_unfinished:
        engine.step()
        for (seq, _), row in zip(plans[-1].rows, seen.pop() if plans[-1].rows else (), strict=True):
            ids = torch.tensor(seq.token_ids[:-1])  # the newest was drawn from this row
            with torch.inference_mode():
                hidden = model(ids, torch.arange(len(ids)), DenseAttention())
                torch.testing.assert_close(row, model.compute_logits(hidden[-1]), atol=1e-4, rtol=0)
            compared += 1
    assert compared == sum(len(request.output.outputs[0].token_ids) for request in requests) == 24
    assert any(plan.num_decode_tokens and plan.num_prefill_tokens for plan in plans)  # they did share a step


@of_one_model
@pytest.mark.parametrize("has_routes", [False, True])
def test_a_row_without_finite_logits_ends_with_an_error_and_the_others_finish(model, has_routes):
    engine = engine_for(model)
    assert isinstance(engine.executor.sampler, RoutedSampler)
    if not has_routes:
        engine.executor.sampler = Sampler()
    requests = [engine.add_request([i + 1], greedy(5)) for i in range(3)]
    ours = engine.executor.runner.model
    compute_logits = ours.compute_logits

    def broken(hidden):
        logits = compute_logits(hidden)
        if len(logits) == 3:
            logits[1] = float("nan")
        return logits

    ours.compute_logits = broken
    reasons = [answer.finish_reason for answer in run(engine, requests)]
    assert reasons == ["length", "error", "length"]
    assert "not finite" in requests[1].output.outputs[0].error


@of_one_model
def test_a_fork_writes_into_a_block_of_its_own(model):
    """What n > 1 and beams stand on: the owed copy is carried out before the forward pass, so both continue rightly."""
    engine = engine_for(model)
    parent = engine.add_request([1, 2, 3, 4, 5, 6], greedy(8))
    engine.step()
    child = engine.add_request([1, 2, 3, 4, 5, 6], greedy(8))
    seq = child.sequences[0]
    engine.scheduler.waiting.remove(seq)  # as the scheduler will do it for n > 1: born running, with its parent's blocks
    engine.block_manager.fork(parent.sequences[0], seq)
    seq.num_computed_tokens = parent.sequences[0].num_computed_tokens
    grow(seq, 90)  # another token than its parent drew
    seq.status = parent.sequences[0].status
    engine.scheduler.running.append(seq)
    copies = []
    copy_blocks = engine.executor.runner.cache.copy_blocks
    engine.executor.runner.cache.copy_blocks = lambda pairs: copies.extend(pairs) or copy_blocks(pairs)
    answers = run(engine, [parent, child])
    assert len(copies) == 1
    assert answers[0].token_ids == dense_greedy(model, [1, 2, 3, 4, 5, 6], 8)
    assert answers[1].token_ids == [90, *dense_greedy(model, [1, 2, 3, 4, 5, 6, 90], 7)]


@of_one_model
def test_an_eos_id_beyond_the_vocabulary_harms_nobody(model):
    engine = engine_for(model)
    assert make_engine(copy.deepcopy(model), EngineConfig(), eos_token_ids=frozenset([3, 10**6])).eos_token_ids == {3}
    assert run(engine, [engine.add_request([1], greedy(5, min_tokens=3))])[0].finish_reason == "length"


@of_one_model
def test_few_blocks_do_not_make_sequences_start_only_to_be_preempted_again(model):
    """A block is left for every running sequence, so each preemption is paid for by real progress of the others."""
    rng = random.Random(3)
    engine = engine_for(model, num_blocks=20)
    requests = [engine.add_request(random_prompt(rng, 20), greedy(40)) for _ in range(6)]
    run(engine, requests)
    assert sum(request.output.metrics.num_preemptions for request in requests) <= 6


# ---- async_scheduling: a step is launched before the tokens of the one before it are read

ASKED = {
    "drawn": {"temperature": 1.0, "top_k": 5, "seed": 3},
    "of several answers": {"temperature": 1.0, "n": 3, "seed": 4},
    "no id that stops at first": {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": list(range(48)), "seed": 5},
    "stopped by an id": {"temperature": 1.0, "stop_token_ids": list(range(12)), "seed": 6},
    "that look at the output": {"temperature": 0.0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "with log-probabilities": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "with bad words": {"temperature": 0.0, "bad_words": [[5, 7], [9]]},
    "of one token": {"temperature": 0.0, "max_tokens": 1},
}


@of_one_model
@pytest.mark.parametrize("num_blocks", [64, 12])
def test_async_scheduling_gives_the_same_outputs_whatever_is_asked_for(model, num_blocks):
    rng = random.Random(2)
    prompts = [random_prompt(rng, length) for length in (1, 5, 13, 17, 2, 8, 3, 11)]
    outputs = []
    for is_async in (False, True):
        engine = engine_for(model, num_blocks=num_blocks, chunk_size=8, is_async=is_async)
        requests = [
            engine.add_request(prompt, SamplingParams(**{"max_tokens": 12, "detokenize": False} | asked))
            for prompt, asked in zip(prompts, ASKED.values(), strict=True)
        ]
        run(engine, requests)
        outputs.append([(request.output.outputs, request.output.prompt_logprobs) for request in requests])
    assert outputs[0] == outputs[1]
