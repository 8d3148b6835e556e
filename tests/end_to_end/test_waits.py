"""On CUDA, the host waits for a step once, for its tokens, and no tensor is on another device (tests/helpers/fake_cuda.py).

A copy of memory that is not pinned waits for all work in the GPU's queue, so that the next step is not prepared meanwhile.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

pytest.importorskip("triton")

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.sampling.sampler import STAGES
from tests.helpers import tiny_models
from tests.helpers.fake_cuda import fake_cuda
from tests.helpers.lora_adapters import linear_shapes, write_adapter

PROMPTS = [[1, 2, 3], list(range(7))]  # the second has two chunks
FIRST_USE = {"cudagraph_capture": "first_use"}  # for most tests, all graphs would take too long
READ = "sampler.read"  # the sampled tokens
EXPERTS = "qwen_moe.sum_of_experts"  # how many tokens each expert has
FAMILIES = {  # and the number of layers with experts. Those after the third are slow, and the last three have layers of others
    "gpt2": 0, "qwen3": 0, "qwen3_moe": 2, "gpt_oss_window": 3, "gemma3_window": 0, "qwen3_5": 0, "llama": 0, "qwen2": 0,
    "mistral_window": 0,
}  # fmt: skip


def params(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 3, "ignore_eos": True, "detokenize": False} | more)


def waits_of(path, run, *, token_id=1, **settings):
    """Call run(llm) with fake CUDA tensors. Returns the places where the host waited, and the number of steps that sampled."""
    num_steps = 0

    def counted(executor, step):
        nonlocal num_steps
        num_steps += bool(step.plan.rows)
        return collect(executor, step)

    collect = LocalExecutor.collect
    with fake_cuda() as gpu, mock.patch.object(LocalExecutor, "collect", counted):
        llm = LLM(path, device="cuda:0", **{"kv_cache_memory": 2**24, "chunk_size": 4} | FIRST_USE | settings)
        gpu.waits.clear()
        gpu.token_id = token_id
        run(llm)
    return Counter(gpu.waits), num_steps


def test_all_graphs_are_captured_while_the_model_is_loaded(qwen3_path):
    def run(llm):
        tables = llm.engine.executor.runner.graphs.table, llm.engine.executor.sampler.routes[0].table
        before = [dict(table.graphs) for table in tables]
        generating(params())(llm)
        assert [table.graphs for table in tables] == before
        assert set(before[0]) == set(llm.engine.executor.runner.graphs.shapes)
        assert {num_rows for num_rows, _ in before[1]} == {1, 2, 3}

    assert set(waits_of(qwen3_path, run, max_num_seqs=3, max_num_batched_tokens=16, cudagraph_capture="load")[0]) == {READ}


def generating(sampling, **options):
    def run(llm):
        outputs = llm.generate(PROMPTS, sampling, use_tqdm=False, **options)
        assert all(answer.finish_reason == "length" for output in outputs for answer in output.outputs)

    return run


@pytest.mark.parametrize("enforce_eager", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] * (i > 2) + [pytest.mark.long] * (i > 5))
        for i, family in enumerate(FAMILIES)
    ],
)
def test_a_step_reads_its_tokens_and_which_experts_compute(family, enforce_eager, tmp_path):
    waits, num_steps = waits_of(tiny_models.save(family, tmp_path), generating(params()), enforce_eager=enforce_eager)
    assert waits == Counter({READ: num_steps, EXPERTS: FAMILIES[family] * num_steps})


FEATURES = {
    "drawn": (params(temperature=0.8), {}),
    "n": (params(temperature=0.8, n=3), {}),
    "filters": (params(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1), {}),
    "a large top_k": (params(temperature=0.8, top_k=90), {}),
    "all kinds of rows": ([params(), params(temperature=1, top_k=4, min_p=0.1)], {}),
    "penalties": (params(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2), {}),
    "lists": (params(min_tokens=2, stop_token_ids=[3], logit_bias={5: 1.0}, allowed_token_ids=[1, 2, 5]), {}),
    "stages": (params(temperature=0.8, top_p=0.9), {"enforce_eager": True}),
    "drafts": (params(max_tokens=9), {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_reads_its_tokens_alone(feature, tmp_path):
    sampling, settings = FEATURES[feature]
    waits, num_steps = waits_of(tiny_models.save("qwen3", tmp_path), generating(sampling), **settings)
    assert waits == {READ: num_steps}


def test_a_step_with_a_grammar_reads_its_tokens_alone():
    sampling = params(ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="(.|\\n)*"))
    waits, num_steps = waits_of(None, generating(sampling), token_id=64)
    assert waits == {READ: num_steps}


@pytest.mark.slow
def test_a_step_of_a_draft_model_reads_its_tokens_alone(tmp_path):
    path = tiny_models.save("qwen3", tmp_path)
    drafts = {"method": "draft_model", "model": str(path)}
    waits, num_steps = waits_of(path, generating(params(max_tokens=9)), speculative_config=drafts)
    assert waits == {READ: num_steps}


@pytest.mark.slow
def test_a_step_with_adapters_reads_its_tokens_alone_and_an_adapter_is_copied_once(tmp_path):
    path = tiny_models.save("qwen3", tmp_path)
    shapes = linear_shapes(path)
    write_adapter(tmp_path / "adapter", shapes)
    requests = [LoRARequest("adapter", 1, str(tmp_path / "adapter")), None]
    waits, num_steps = waits_of(path, generating(params(), lora_request=requests), enable_lora=True)
    assert waits == {READ: num_steps, "adapters._activate": 2 * len(shapes)}


@pytest.mark.slow
def test_rows_that_return_more_are_read_together(tmp_path):
    """The ids, values and ranks of all rows are a tensor each. They are there when the first has been read."""
    path = tiny_models.save("qwen3", tmp_path)
    waits, num_steps = waits_of(path, generating(params(logprobs=2)))
    assert waits == {READ: num_steps, "token_logprobs.<genexpr>": 3 * num_steps}
    waits, num_steps = waits_of(path, generating(params(prompt_logprobs=2)), chunk_size=32)
    assert waits == {READ: num_steps, "token_logprobs.<genexpr>": 3 * len(PROMPTS)}
    waits, num_steps = waits_of(path, lambda llm: llm.embed(PROMPTS))
    assert waits == {READ: num_steps, "methods.<listcomp>": len(PROMPTS)}


# ---- what the tests above would notice


INJECTED = {
    "an item": lambda logits: logits * logits.max().item(),
    "a condition": lambda logits: logits if logits.isnan().any() else logits + 1,
    "a list": lambda logits: logits if sum(logits[0].tolist()) else logits + 1,
    "a copy": lambda logits: logits + torch.zeros(logits.shape[-1]).to(logits.device),
    "a new tensor": lambda logits: logits + torch.tensor([1.0], device=logits.device),
    "a list of rows": lambda logits: logits[list(range(len(logits)))],
}


@pytest.mark.parametrize("fault", INJECTED)
def test_an_injected_wait_is_noted(fault, tmp_path):
    """By a stage of the user's own."""
    stages = (*STAGES, lambda logits, batch: INJECTED[fault](logits))
    waits, num_steps = waits_of(tiny_models.save("qwen3", tmp_path), generating(params()), stages=stages, enforce_eager=True)
    assert waits.pop("logits_processors.run") >= num_steps
    assert waits == {READ: num_steps}


WRONG = {
    "another device": (lambda logits: logits + torch.zeros(logits.shape[-1]), RuntimeError, "device"),
    "a mask": (lambda logits: logits - logits[logits > 0].sum(), DynamicOutputShapeException, "nonzero"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_tensor_on_another_device_and_a_shape_that_depends_on_values_are_refused(fault, tmp_path):
    stage, error, message = WRONG[fault]
    stages = (*STAGES, lambda logits, batch: stage(logits))
    with pytest.raises(error, match=message):
        waits_of(tiny_models.save("qwen3", tmp_path), generating(params()), stages=stages, enforce_eager=True)
