"""The executor of this process, without an engine: plans in, tokens and log-probabilities out."""

import pytest
import torch

from nanoinfer import SamplingParams
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.build import make_executor, make_runtime
from nanoinfer.config import CacheConfig, EngineConfig
from nanoinfer.features.logprobs.token_logprobs import ReportingSampler
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.sampling.sampler import Sampler
from nanoinfer.scheduling.sequence import Constraint, Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, rows_of

PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def model(qwen3_path):
    return load_model(Checkpoint.open(str(qwen3_path)))


@pytest.fixture
def executor(model):
    cache = CacheConfig(kv_cache_memory=2**20, block_size=4)
    config = EngineConfig(attention_backend="reference", enforce_eager=True, cache=cache)
    return make_executor(make_runtime(model, config), config)


@pytest.fixture(scope="module")
def expected(model):
    """The log-probabilities after each token of the prompt, by the definition of attention."""
    with torch.inference_mode():
        hidden = model(torch.tensor(PROMPT), torch.arange(len(PROMPT)), DenseAttention())
        return model.compute_logits(hidden).log_softmax(-1)


def sequence(computed=0, **params):
    seq = Sequence("r", list(PROMPT), SamplingParams(**{"temperature": 0} | params), 0, 99)
    seq.num_computed_tokens, seq.block_table = computed, [2, 0, 1]
    return seq


def run(executor, *scheduled, **plan):
    step = executor.launch(StepPlan(scheduled, rows_of(scheduled), **plan), None)
    return step, executor.collect(step)


def test_a_prompt_in_two_chunks_gets_the_likeliest_token(executor, expected):
    seq = sequence()
    _, first = run(executor, ScheduledSequence(seq, 4))
    assert first.sequences == []
    seq.num_computed_tokens = 4
    step, second = run(executor, ScheduledSequence(seq, 2))
    [output] = second.sequences
    assert (output.sequence, output.token_ids, output.error) == (seq, [expected[-1].argmax().item()], None)
    assert not step.must_sync
    assert set(second.seconds) == {"build", "forward", "sample"}


def test_a_draft_is_kept_if_it_is_the_token_that_was_sampled(executor, expected):
    right = expected[-1].argmax().item()
    for draft, num_tokens in ((right, 2), ((right + 1) % 90, 1)):
        seq = sequence()
        run(executor, ScheduledSequence(seq, 4))
        seq.num_computed_tokens = 5
        run(executor, ScheduledSequence(sequence(), 6))  # the same blocks: all of the prompt is in the cache
        [output] = run(executor, ScheduledSequence(seq, 1, (draft,)))[1].sequences
        assert len(output.token_ids) == num_tokens
        assert output.token_ids[0] == right


class Limit(Constraint):
    """Reads the tokens of a sequence that has not finished."""

    def entries(self, seq, index):
        assert (seq.status is not SequenceStatus.FINISHED, len(seq.output_token_ids)) == (True, index)
        return {}


@pytest.mark.parametrize("has_finished", [False, True])
def test_tokens_that_wait_for_those_before_are_chosen_before_another_forward_pass(executor, has_finished):
    """Also that of a plan of others, such as a beam search. A row that has finished meanwhile is not limited."""
    order, forward, sampler = [], executor.runner.forward, executor.sampler
    executor.runner.forward = lambda batch: order.append("forward") or forward(batch)
    executor.sampler = lambda *given: order.append("sample") or sampler(*given)
    executor.sampler.may_be_late = True
    seq, previous = sequence(), None
    seq.constraints = (Limit(),)
    for num_new in (6, 1):
        scheduled = (ScheduledSequence(seq, num_new),)
        step, before = executor.launch(StepPlan(scheduled, rows_of(scheduled)), previous), previous
        seq.num_computed_tokens += num_new
        seq.num_tokens += 1
        previous = step
    assert order == ["forward", "sample", "forward"]
    seq.token_ids += executor.collect(before).sequences[0].token_ids
    seq.status = SequenceStatus.FINISHED if has_finished else SequenceStatus.RUNNING
    run(executor, ScheduledSequence(sequence(), 6))
    assert order[3:] == ["sample", "forward", "sample"]
    assert len(executor.collect(step).sequences[0].token_ids) == 1
    assert len(order) == 6


def test_a_plan_may_bring_its_own_sampler(executor, expected):
    executor.sampler = ReportingSampler(executor.sampler, "raw_logits")  # which a beam search does not want
    seq = sequence(logprobs=3)
    for plan, returns_logprobs in (({}, False), ({"sampler": ReportingSampler(Sampler())}, True)):
        step, output = run(executor, ScheduledSequence(seq, 6), **plan)
        [found] = output.sequences
        assert not step.must_sync  # what the report reads was copied
        top = expected[-1].topk(3)
        [report] = found.reports
        assert report.logprobs.ids == top.indices.tolist()
        assert (report.logprobs.values == pytest.approx(top.values.tolist(), abs=1e-4)) is returns_logprobs
