"""On CUDA, the host waits for a step once, for its tokens, and no tensor is on another device (tests/helpers/fake_cuda.py).

A copy of memory that is not pinned waits for all work in the GPU's queue, so that the next step is not prepared meanwhile.
"""

import pickle
from collections import Counter
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

pytest.importorskip("triton")

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.fast.cuda.steady import SteadyExecutor, SteadyStep
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.features.distributed.communicator import Communicator
from nanoinfer.features.distributed.runner import CALL, FORWARD, LOGITS, LeadingShards, Workers, pack
from nanoinfer.sampling.sampler import STAGES
from tests.helpers import tiny_models
from tests.helpers.fake_cuda import fake_cuda
from tests.helpers.lora_adapters import linear_shapes, write_adapter

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3], list(range(7))]  # the second has two chunks
FIRST_USE = {"cudagraph_capture": "first_use"}  # for most tests, all graphs would take too long
READ = "sampler.read"  # the sampled tokens
EXPERTS = "qwen_moe.weighted_sum"  # how many tokens each expert has
# family -> its number of layers with experts, of two in all. Those after the third are slow, and the last three repeat others.
FAMILIES = {
    "qwen3": 0, "qwen3_moe": 2, "gpt_oss_window": 2, "qwen3_5": 0, "gpt2": 0, "gemma3_window": 0, "llama": 0, "qwen2": 0,
    "mistral_window": 0,
}  # fmt: skip
SMALLER = {
    "gpt_oss_window": {"num_hidden_layers": 2},
    "gemma3_window": {"num_hidden_layers": 2, "sliding_window_pattern": 2},
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


def params(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 3, "ignore_eos": True, "detokenize": False} | more)


def waits_of(path, runs, **settings):
    """Call each run(llm) with fake CUDA tensors.

    Returns: for each run the places where the host waited, and the number of steps that sampled.
    """
    num_steps, found = 0, {}

    def counted(executor, step):
        nonlocal num_steps
        num_steps += bool(step.plan.rows)
        return collect(executor, step)

    def counted_if_steady(executor, step):  # LocalExecutor.collect has the others
        nonlocal num_steps
        num_steps += isinstance(step, SteadyStep)
        return collect_steady(executor, step)

    collect, collect_steady = LocalExecutor.collect, SteadyExecutor.collect
    with (
        fake_cuda() as gpu,
        mock.patch.object(LocalExecutor, "collect", counted),
        mock.patch.object(SteadyExecutor, "collect", counted_if_steady),
    ):
        llm = LLM(path, device="cuda:0", **{"kv_cache_memory": 2**24, "chunk_size": 4} | FIRST_USE | settings)
        for name, run in runs.items():
            gpu.waits.clear()
            num_steps, gpu.token_id = 0, 64 if name == "a grammar" else 1
            run(llm)
            found[name] = Counter(gpu.waits), num_steps
    return found


def assert_only_tokens_are_read(found, **more):
    """more: How often the host waits elsewhere."""
    assert found == {name: (Counter({READ: num_steps} | more), num_steps) for name, (_, num_steps) in found.items()}


def test_all_graphs_are_captured_while_the_model_is_loaded(qwen3_path):
    def run(llm):
        tables = llm.engine.executor.runner.graphs.table, llm.engine.executor.sampler.routes[0].table
        before = [dict(table.graphs) for table in tables]
        generating(params())(llm)
        assert [table.graphs for table in tables] == before
        assert set(before[0]) == set(llm.engine.executor.runner.graphs.shapes)
        assert {num_rows for num_rows, _ in before[1]} == {1, 2}

    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "cudagraph_capture": "load"}
    assert_only_tokens_are_read(waits_of(qwen3_path, {"load": run}, **settings))


def generating(sampling, **options):
    def run(llm):
        outputs = llm.generate(PROMPTS, sampling, use_tqdm=False, **options)
        assert all(answer.finish_reason == "length" for output in outputs for answer in output.outputs)

    return run


@pytest.mark.parametrize("enforce_eager", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] * (i > 1) + [pytest.mark.long] * (i > 3))
        for i, family in enumerate(FAMILIES)
    ],
)
def test_a_step_reads_its_tokens_and_without_kernels_which_experts_compute(family, enforce_eager, tmp_path):
    path, run = tiny_models.save(family, tmp_path, **SMALLER.get(family, {})), {family: generating(params(max_tokens=2))}
    waits, num_steps = waits_of(path, run, enforce_eager=enforce_eager)[family]
    assert waits == Counter({READ: num_steps, EXPERTS: FAMILIES[family] * num_steps * enforce_eager})


FEATURES = {
    "drawn": params(temperature=0.8),
    "n": params(temperature=0.8, n=3),
    "filters": params(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1),
    "a large top_k": params(temperature=0.8, top_k=90),
    "all kinds of rows": [params(), params(temperature=1, top_k=4, min_p=0.1)],
    "penalties": params(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2),
    "lists": params(min_tokens=2, stop_token_ids=[3], logit_bias={5: 1.0}, allowed_token_ids=[1, 2, 5]),
}


def test_a_step_reads_its_tokens_alone_whatever_is_asked_for(qwen3_path):
    assert_only_tokens_are_read(waits_of(qwen3_path, {name: generating(sampling) for name, sampling in FEATURES.items()}))


SETTINGS = {
    "stages": (params(temperature=0.8, top_p=0.9), {"enforce_eager": True}),
    "drafts": (params(max_tokens=9), {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}}),
    "draft model": (params(max_tokens=9), {"speculative_config": {"method": "draft_model"}}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_reads_its_tokens_alone_with_other_settings(qwen3_path, name):
    sampling, settings = SETTINGS[name]
    if name == "draft model":
        settings = {"speculative_config": settings["speculative_config"] | {"model": str(qwen3_path)}}
    assert_only_tokens_are_read(waits_of(qwen3_path, {name: generating(sampling)}, **settings))


def test_a_step_with_a_grammar_reads_its_tokens_alone():
    sampling = params(ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="(.|\\n)*"))
    assert_only_tokens_are_read(waits_of(None, {"a grammar": generating(sampling)}))


@pytest.mark.slow
def test_a_step_with_adapters_reads_its_tokens_alone_and_an_adapter_is_copied_once(qwen3_path, tmp_path):
    shapes = linear_shapes(qwen3_path)
    write_adapter(tmp_path / "adapter", shapes)
    requests = [LoRARequest("adapter", 1, str(tmp_path / "adapter")), None]
    found = waits_of(qwen3_path, {"adapters": generating(params(), lora_request=requests)}, enable_lora=True)
    assert_only_tokens_are_read(found, **{"adapters._activate": 2 * len(shapes)})


@pytest.mark.slow
def test_rows_that_return_more_are_read_together(qwen3_path):
    """The ids, values and ranks of all rows are a tensor each. They are there when the first has been read."""
    runs = {"logprobs": generating(params(logprobs=2)), "prompt_logprobs": generating(params(prompt_logprobs=2))}
    found = waits_of(qwen3_path, runs | {"embed": lambda llm: llm.embed(PROMPTS)}, chunk_size=32)
    (answers, num_steps), (prompts, num_others), (embedded, num_embedded) = found.values()
    assert answers == {READ: num_steps, "token_logprobs.<genexpr>": 3 * num_steps}
    assert prompts == {READ: num_others, "token_logprobs.<genexpr>": 3 * len(PROMPTS)}
    assert embedded == {READ: num_embedded, "methods.<listcomp>": len(PROMPTS)}


class FirstOfTwo(Communicator):
    """Rank 0, whose other rank has the same numbers."""

    def __init__(self):
        self.rank, self.size = 0, 2

    def all_gather(self, x):
        return torch.stack([x, x])

    def all_reduce(self, x):
        return x + x

    def minimum(self, number):
        return number


def test_rank_0_of_two_gpus_reads_its_tokens_alone_and_sends_no_tensor(qwen3_path):
    workers = Workers([], [])
    with (
        mock.patch.object(workers, "send", side_effect=pack) as sent,
        mock.patch(
            "nanoinfer.features.distributed.launch.start", lambda config: (config, LeadingShards(FirstOfTwo(), workers))
        ),
    ):
        runs = {name: generating(FEATURES[name]) for name in ("drawn", "filters")}
        assert_only_tokens_are_read(waits_of(qwen3_path, runs, tensor_parallel_size=2))
    commands = [pickle.loads(pack(call.args[0])) for call in sent.call_args_list]  # raises for a tensor
    assert {name for name, _ in commands} == {FORWARD, LOGITS, CALL}  # the last is that of captures


# ---- what the tests above would notice


INJECTED = {
    "an item": lambda logits: logits * logits.max().item(),
    "a condition": lambda logits: logits if logits.isnan().any() else logits + 1,
    "a list": lambda logits: logits if sum(logits[0].tolist()) else logits + 1,
    "a copy": lambda logits: logits + torch.zeros(logits.shape[-1]).to(logits.device),
    "a new tensor": lambda logits: logits + torch.tensor([1.0], device=logits.device),
    "a list of rows": lambda logits: logits[list(range(len(logits)))],
}


def test_an_injected_wait_is_noted(qwen3_path):
    """By a stage of the user's own."""
    injected = None

    def stage(logits, batch):
        return injected(logits)

    def injecting(fault):
        def run(llm):
            nonlocal injected
            injected = INJECTED[fault]
            generating(params())(llm)

        return run

    runs = {fault: injecting(fault) for fault in INJECTED}
    for waits, num_steps in waits_of(qwen3_path, runs, stages=(*STAGES, stage), enforce_eager=True).values():
        assert waits.pop("logits_processors.run") >= num_steps
        assert waits == {READ: num_steps}


WRONG = {
    "another device": (lambda logits: logits + torch.zeros(logits.shape[-1]), RuntimeError, "device"),
    "a mask": (lambda logits: logits - logits[logits > 0].sum(), DynamicOutputShapeException, "nonzero"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_tensor_on_another_device_and_a_shape_that_depends_on_values_are_refused(qwen3_path, fault):
    stage, error, message = WRONG[fault]
    stages = (*STAGES, lambda logits, batch: stage(logits))
    with pytest.raises(error, match=message):
        waits_of(qwen3_path, {fault: generating(params())}, stages=stages, enforce_eager=True)
