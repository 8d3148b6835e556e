"""The engine of a GPU runs on a device that is not the CPU (helpers/simulated_device.py), with the CPU's tokens.

Each function that uses the device is called in a process of its own, because the device is known to its process for good.
"""

import gc
import os
import random
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from nanoinfer import LLM, BeamSearchParams, SamplingParams
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.cli import inspect
from nanoinfer.config import BITS, EngineConfig
from nanoinfer.errors import InvalidValueError, NanoinferError, OutOfMemoryError, UnsupportedError
from nanoinfer.fast import batch_independence
from nanoinfer.fast.cuda import accelerate
from nanoinfer.fast.cuda.accelerate import compile_model
from nanoinfer.features.distributed.runner import CALL
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.features.int8_cache.sizes import stored_in
from nanoinfer.features.quantization.rounding import num_linear_bytes
from nanoinfer.load import load
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.config_json import read_config
from nanoinfer.loading.loader import load_model
from tests.helpers import forked, lora_adapters, tiny_models

pytestmark = [
    pytest.mark.slow,  # Triton's interpreter is slow
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/end_to_end/test_gpu.py runs on the GPU"),
]

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_window", "gpt_oss_window", "qwen3_5")
INT8_REQUESTS = ("qwen3", 100), ("gpt2", 7), ("gemma3_window", 20), ("gpt_oss_window", 20), ("qwen3_5", 20)
SMALL = {family: tiny_models.FEW_HEADS | {"num_hidden_layers": 1} for family in FAMILIES} | {
    "gpt2": {"n_head": 2, "n_layer": 1},
    "gemma3_window": tiny_models.FEW_HEADS | {"num_hidden_layers": 3, "sliding_window": 10},
    "gpt_oss_window": tiny_models.FEW_HEADS | {"num_hidden_layers": 2, "sliding_window": 10},
    "qwen3_5": tiny_models.FEW_HEADS,
}
MAX_MODEL_LEN, BLOCK_SIZE, MAX_NUM_SEQS = 28, 4, 3
SETTINGS = {
    "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 16, "chunk_size": 16, "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE, "cudagraph_capture": "first_use",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
DRAWN = SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=4, ignore_eos=True, detokenize=False)
PROMPTS, PARAMS = [[5, 6, 7] * 4, [9, 8]], [GREEDY, DRAWN]


def in_own_process(function, *arguments):
    done = forked.run_function(function, *arguments)
    assert done.returncode == 0, done.stderr


@contextmanager
def simulated(*patches):
    """The device, which the engine may use."""
    from tests.helpers import simulated_device

    gc.freeze()  # a collection would examine torch for 0.2 s
    simulated_device.install()
    with simulated_device.engine_may_use_it(), ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield simulated_device.device


def save(family, folder, **config):
    """A checkpoint of a family, written by the test's process, which has imported transformers."""
    return tiny_models.save(family, folder, **(SMALL[family] | config))


def memory_for(path, num_blocks, dtype):
    """The bytes of so many blocks of each KV group. With states, which may take half of it, there are more blocks."""
    sizes = stored_in(HybridSizes.of(read_config(Checkpoint.open(str(path)))[1]), dtype)
    blocks = num_blocks * len(sizes.groups) * sizes.bytes_per_block(BLOCK_SIZE, dtype)
    return max(blocks, 4 * MAX_NUM_SEQS * sizes.bytes_per_state)


def random_request(rng, earlier):
    """A prompt, which often begins as an earlier one, and parameters of every route of the sampler."""
    shared = rng.choice(earlier[-3:])[: rng.choice([0, 8, 16])]
    prompt = [*shared, *(rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(rng.randint(1, 6)))]
    earlier.append(prompt)
    further = [{"repetition_penalty": 1.3, "frequency_penalty": 0.5}, {"logit_bias": {7: 2.0}, "min_tokens": 2}]
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.8, 1.5]), top_k=rng.choice([0, 0, 5]), top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.0, 0.05]), seed=rng.randrange(2**32), max_tokens=rng.randint(3, 6), ignore_eos=True,
        detokenize=False, **rng.choice([{}, {}, *further]),
    )  # fmt: skip
    return prompt, params


def tokens_of(llm, prompts=PROMPTS, params=PARAMS, **options):
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    tiny_models.assert_nothing_is_left(llm)
    return [output.outputs[0].token_ids for output in outputs]


def expected_tokens(path, prompts=PROMPTS, params=PARAMS, **options):
    """The tokens of the definition on a CPU."""
    return tokens_of(LLM(path, device="cpu", enforce_eager=True, kv_cache_memory=2**22, **options), prompts, params)


def run_random_requests(family, path, num_requests, **options):
    """Requests arrive in the middle of others' answers, share prefixes, and are preempted: the cache holds two of them."""
    rng, earlier = random.Random(0), [range(16)]
    requests = [random_request(rng, earlier) for _ in range(num_requests)]
    prompts, params = zip(*requests, strict=True)
    expected = expected_tokens(path, list(prompts), list(params), **options)
    memory = memory_for(path, 7, torch.int8 if options else torch.float32)
    with simulated() as device:
        llm = LLM(path, device="sim", kv_cache_memory=memory, async_scheduling=True, **SETTINGS, **options)
        executor, waiting, begun = llm.engine.executor, requests[::-1], []
        device.reset_counts()
        with mock.patch.object(executor, "launch", wraps=executor.launch) as launch:
            while waiting or llm.engine.num_unfinished:
                for _ in range(min(rng.randrange(4), len(waiting))):
                    begun.append(llm.engine.add_request(*waiting.pop()))
                llm.engine.step()
        num_read = sum(bool(call.args[0].rows) for call in launch.call_args_list)
        assert [request.output.outputs[0].token_ids for request in begun] == expected
        assert device.num_synchronized == num_read  # a step reads back once
        assert device.waits == []
        metrics = [request.output.metrics for request in begun]
        assert any(one.num_cached_tokens for one in metrics)
        assert any(one.num_preemptions for one in metrics) or family == "qwen3_5"
        graphs, sampler_graphs = executor.runner.graphs, executor.sampler.routes[0].table.graphs.values()
        assert (graphs is None) == (family == "qwen3_5")
        captured = [*sampler_graphs, *([] if graphs is None else graphs.table.graphs.values())]
        assert captured
        assert None not in captured
        assert sum(graph.replay.__self__.num_replays for graph in captured) > len(captured)
        tiny_models.assert_nothing_is_left(llm)


@pytest.mark.parametrize(
    ("family", "num_requests"),
    [
        pytest.param(family, num, marks=[pytest.mark.long] * (num > 10 or family != "gpt_oss_window"))
        for family in FAMILIES
        for num in (5, 100)
    ],
)
def test_random_requests_get_the_tokens_of_the_cpu(family, num_requests, tmp_path):
    in_own_process(run_random_requests, family, save(family, tmp_path), num_requests)


def run_int8_cache(family, path, num_requests):
    """The definition on a CPU stores the same integers, unless a number's roundings in fp32 cross the middle of two."""
    run_random_requests(family, path, num_requests, kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("family", "num_requests"), [("qwen3", 7), *(pytest.param(*one, marks=pytest.mark.long) for one in INT8_REQUESTS)]
)
def test_random_requests_get_the_tokens_of_the_cpu_from_a_cache_in_8_bits(family, num_requests, tmp_path):
    in_own_process(run_int8_cache, family, save(family, tmp_path), num_requests)


# What a step launches beside the two graphs: copies into their inputs and of their results, the padding of these inputs, the
# newest tokens, which only the device has, and without a graph for it nothing of the model, the head or the draw.
COPIES = {
    "_to_copy.default", "copy_.default", "fill_.Scalar", "clone.default", "cat.default", "index.Tensor", "index_put_.default",
    "clamp.default", "clamp.out", "index_copy_.default", "_foreach_copy_.default",
}  # fmt: skip


def run_launches(path, num_prompt_tokens, num_decodes, settings):
    """A prompt alone, and the same prompt in a step with decodes. Each is counted the second time."""
    rng, launched = random.Random(0), {}
    with simulated() as device:
        llm = LLM(path, device="sim", kv_cache_memory=2**22, enable_prefix_caching=False, **SETTINGS | settings)

        def submit(num_tokens, max_tokens):
            params = SamplingParams(temperature=0.8, seed=1, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            return llm.engine.add_request([rng.randrange(96) for _ in range(num_tokens)], params)

        for turn in range(2):
            submit(num_prompt_tokens, 2)
            for name in ("prompt", "decode"):
                device.reset_counts()
                llm.engine.step()
                launched[turn, name] = dict(device.launched)
            while llm.engine.num_unfinished:
                llm.engine.step()
        decodes = [submit(2, 6) for _ in range(num_decodes)]
        for turn in range(2):
            llm.engine.step()
            later = submit(num_prompt_tokens, 1)
            device.reset_counts()
            llm.engine.step()
            launched[turn, "both"] = dict(device.launched)
            assert later.sequences[0].num_computed_tokens == num_prompt_tokens
            assert all(request.output is None for request in decodes)
            llm.engine.abort(later.request_id)
        graphs = llm.engine.executor.runner.graphs.table.graphs
        assert {shape.num_decodes > 0 for shape in graphs if shape.num_chunk_tokens} == {False, True}
    assert "_prefill_kernel" in launched[0, "prompt"]  # the first is captured
    for name in ("prompt", "decode", "both"):
        assert set(launched[1, name]) <= COPIES, launched
        assert "copy_.default" in launched[1, name]


LONG_PROMPT = {"max_num_seqs": 17, "max_num_batched_tokens": 1024, "chunk_size": 1024, "max_model_len": 1040}


@pytest.mark.parametrize(
    ("family", "num_prompt_tokens", "num_decodes", "settings"),
    [("gpt2", 11, 2, {}), pytest.param("qwen3", 1023, 16, LONG_PROMPT, marks=pytest.mark.long)],
)
def test_a_prompt_and_a_step_of_decodes_with_a_prompt_launch_copies_alone(
    family, num_prompt_tokens, num_decodes, settings, tmp_path
):
    longer = {"max_position_embeddings": 1100} if settings else {}
    in_own_process(run_launches, save(family, tmp_path, **longer), num_prompt_tokens, num_decodes, settings)


def tokens_of_load(llm, seed, before_step=lambda: None):
    """The tokens of a few requests, which arrive while others run, and share prefixes with those of earlier loads."""
    rng, begun, engine = random.Random(seed), [], llm.engine
    earlier = [[*range(seed % 3, seed % 3 + 9)]]
    waiting = [random_request(rng, earlier) for _ in range(rng.randint(2, 4))]
    while waiting or engine.num_unfinished:
        for _ in range(min(rng.randrange(3), len(waiting))):
            begun.append(engine.add_request(*waiting.pop()))
        before_step()
        engine.step()
    return [request.output.outputs[0].token_ids for request in begun]


def caches_of(llm):
    """The keys and values of every block but the one of padding."""
    cache, num_blocks = llm.engine.executor.runner.cache, llm.engine.executor.info.num_blocks
    return [pages[:num_blocks].cpu() for layer in range(cache.num_layers) for pages in cache.layer(layer)]


def run_loads(path, num_loads):
    """Engines with and without graphs. Before each step, whatever padding may hold becomes NaN."""
    with simulated():
        replaying, eager = (LLM(path, device="sim", kv_cache_memory=2**15, **SETTINGS, seed=0) for _ in range(2))
        runner = replaying.engine.executor.runner
        executor = eager.engine.executor
        executor.runner.graphs, executor.sampler.routes, executor.batch.sizes = None, executor.sampler.routes[1:], [0]

        def spoil():
            for layer in range(runner.cache.num_layers):
                for pages in runner.cache.layer(layer):
                    pages[-1].fill_(torch.nan)
            if "hidden" in runner.graphs._rows:
                runner.graphs._rows["hidden"].fill_(torch.nan)

        for seed in range(num_loads):
            assert tokens_of_load(replaying, seed, spoil) == tokens_of_load(eager, seed), seed
            for ours, theirs in zip(caches_of(replaying), caches_of(eager), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
        graphs = runner.graphs.table.graphs
        assert None not in graphs.values()
        replayed = [shape for shape, graph in graphs.items() if graph.replay.__self__.num_replays]
        kinds = {(shape.num_chunk_tokens > 0, shape.num_decodes > 0) for shape in replayed}
        assert kinds == {(False, True), (True, False), (True, True)} or num_loads < 10


LONG_LOADS = ("gpt2", 120), ("qwen2", 40), ("qwen3", 20), ("gemma3_window", 20)


@pytest.mark.parametrize(
    ("family", "num_loads"), [("gpt2", 1), *(pytest.param(*loads, marks=pytest.mark.long) for loads in LONG_LOADS)]
)
def test_tokens_and_caches_of_replayed_steps_are_those_of_eager_steps(family, num_loads, tmp_path):
    in_own_process(run_loads, save(family, tmp_path), num_loads)


def run_counted(path, num_layers, expected, per_layer):
    """What the graph of a steady step of one row launches. Its function is run once more, and counted."""
    params = SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=3, ignore_eos=True, detokenize=False)
    with simulated() as device:
        llm = LLM(path, device="sim", kv_cache_memory=2**20, **SETTINGS)
        tokens_of(llm, [[5, 6, 7]], [params])
        [step] = [graph for key, graph in llm.engine.executor.batch.table.graphs.items() if key[0] == 1]
        device.reset_counts()
        step.replay.__self__.run()
        assert {name: device.launched[name] for name in expected} == {name: n * num_layers for name, n in expected.items()}
        # the embedding, the angles, the last norm, the head, four kernels of the draw, two of the advance
        assert sum(device.launched.values()) == per_layer * num_layers + 10, device.launched


# A norm that two products read, and the product of the router are kernels of their own.
WITH_EXPERTS = dict.fromkeys(("_route_kernel", "_few_gated_kernel", "_few_down_kernel"), 1)


@pytest.mark.parametrize(
    ("family", "expected", "per_layer"),
    [
        ("qwen3", {"_decode_linear_kernel": 4, "_decode_attention_kernel": 1}, 5),
        pytest.param("qwen3_moe", WITH_EXPERTS, 8, marks=pytest.mark.long),
    ],
)
def test_a_step_of_one_row_has_five_kernels_a_layer_or_eight_with_experts_and_ten_more(family, expected, per_layer, tmp_path):
    """Qwen3-0.6B has 28 layers, so its step has 150 kernels."""
    in_own_process(run_counted, save(family, tmp_path, num_hidden_layers=3), 3, expected, per_layer)


def run_drafts(path, config):
    """Drafts of what the prompt or the model itself says. One answer repeats a token of the prompt."""
    params = [SamplingParams(temperature=0, max_tokens=4, logit_bias={5: 100.0}, detokenize=False), DRAWN]
    expected, num_shared = expected_tokens(path, params=params), []
    with simulated() as device:
        from tests.helpers import simulated_device

        def observed(kernel, args, kwargs):
            firsts = dict(zip(kernel.arg_names, args, strict=False)).get("first_decodes")
            if firsts is not None:
                num_shared.append(len(firsts) - len(firsts.unique()))
            interpreted(kernel, args, kwargs)

        interpreted = simulated_device.run_kernel
        llm = LLM(path, device="sim", kv_cache_memory=2**20, speculative_config=config | {"adaptive": False}, **SETTINGS)
        device.reset_counts()
        with mock.patch.object(simulated_device, "run_kernel", observed):
            assert tokens_of(llm, params=params) == expected
        assert set(num_shared) >= {0, 2}, "decodes that share a program, in replays and in steps without drafts"
        assert llm.engine.planner.counts.num_accepted_tokens
        assert device.waits == []


@pytest.mark.parametrize(
    "method", ["ngram", *(pytest.param(method, marks=pytest.mark.long) for method in ("draft_model", "quantized"))]
)
def test_drafts_leave_the_tokens_of_the_cpu(method, tmp_path):
    path = save("qwen2", tmp_path, **({"hidden_size": 64, "intermediate_size": 64} if method == "quantized" else {}))
    own = {"ngram": {"prompt_lookup_min": 1}, "draft_model": {"model": str(path)}}.get(method, {})
    in_own_process(run_drafts, path, {"method": method, "num_speculative_tokens": 2, **own})


def use_the_device():
    """Let this rank use the device, whose collectives are an operation: gloo's, on the numbers in the host's memory."""
    from nanoinfer.features.distributed import launch
    from nanoinfer.features.distributed.communicator import Communicator
    from tests.helpers import simulated_device

    def all_gather(x: torch.Tensor, size: int) -> torch.Tensor:
        out = x.new_empty(size * x.numel())
        groups[0]._allgather_base(out, x.flatten()).wait()
        return out.view(size, *x.shape)

    def gather(communicator, x):
        groups[:] = [communicator._group]
        return torch.ops.nanoinfer_tests.all_gather(x, communicator.size)

    groups, library = [], torch.library.Library("nanoinfer_tests", "DEF")
    library.define("all_gather(Tensor x, int size) -> Tensor")
    library.impl("all_gather", all_gather, "CPU")
    simulated_device.install()
    kept = ExitStack()
    kept.enter_context(simulated_device.engine_may_use_it())
    kept.enter_context(mock.patch.object(Communicator, "_gather_briefly", gather))
    kept.enter_context(mock.patch.object(launch, "_devices", lambda config, first, num: ["sim"] * num))
    use_the_device.kept = library, kept
    return simulated_device.device


def assert_graphs_were_replayed(runner):
    graphs = [graph.replay.__self__ for graph in runner.graphs.table.graphs.values()]
    assert any(graph.num_replays for graph in graphs), "this rank has replayed no step"


def run_ranks(path):
    """All ranks capture what the first requests lacked when these have ended, and replay it for the next."""
    expected = expected_tokens(path)
    settings = SETTINGS | {"cudagraph_capture": "idle", "enable_prefix_caching": False, "tensor_parallel_size": 2}
    with forked.ranks(use_the_device):
        device = use_the_device()
        with LLM(path, device="sim", kv_cache_memory=2**19, **settings) as llm:
            leading = llm.engine.executor.runner
            assert tokens_of(llm) == expected
            device.reset_counts()
            assert tokens_of(llm) == expected
            assert device.waits == []
            assert_graphs_were_replayed(leading.inner)
            with leading.workers.together(CALL, (assert_graphs_were_replayed, ())):
                pass
            assert tokens_of(llm) == expected  # raises if the other rank has failed


@pytest.mark.long
def test_two_ranks_replay_the_same_steps_and_read_their_tokens_alone(tmp_path):
    path = save("qwen3", tmp_path, num_key_value_heads=2, num_attention_heads=4)
    program = (
        "import sys\nfrom tests.helpers import triton_interpreter\nfrom tests.end_to_end import test_simulated_device\n"
        "test_simulated_device.run_ranks(sys.argv[1])"
    )
    command = [sys.executable, "-c", program, str(path)]  # a new Python, which forks the other rank itself
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=1200
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def adapters_give_the_tokens_of_the_cpu(path):
    """Three adapters take turns in two places, among rows without one. The host waits when an adapter becomes active."""
    requests = [None, *lora_adapters.write_requests(path, path, (2, 4, 3)), None]
    options = {"enable_lora": True, "max_lora_rank": 4, "max_loras": 2}
    prompts, params = [[5, 6, 7] * 4, [9, 8], [1], [5, 6, 7] * 4, [2, 3]], [GREEDY, DRAWN, GREEDY, GREEDY, DRAWN]
    orders = requests, requests[::-1]
    llm = LLM(path, device="cpu", enforce_eager=True, kv_cache_memory=2**22, **options)
    expected = [tokens_of(llm, prompts, params, lora_request=order) for order in orders]
    assert expected[0] != expected[1]
    with simulated() as device:
        llm = LLM(path, device="sim", kv_cache_memory=2**20, **SETTINGS, **options)
        for order, answers in zip(orders, expected, strict=True):
            device.reset_counts()
            assert tokens_of(llm, prompts, params, lora_request=order) == answers
            assert {wait.partition(": ")[2].partition(":")[0] for wait in device.waits} <= {"adapters/adapters.py"}
        graphs = llm.engine.executor.runner.graphs
        for request, own in ((requests[1], graphs.adapted.table.graphs), (None, graphs.plain.table.graphs)):
            for _ in range(2):
                device.reset_counts()
                tokens_of(llm, prompts[:2], params[:2], lora_request=[request] * 2)
            assert device.waits == []
            assert set(device.launched) <= COPIES, device.launched  # of steps without a graph
            assert None not in own.values()
            replayed = [shape for shape, graph in own.items() if graph.replay.__self__.num_replays]
            assert {shape.num_chunk_tokens > 0 for shape in replayed} == {True, False}
        tables, num_launched = (graphs.adapted.table.graphs, graphs.plain.table.graphs), []
        shape = next(shape for shape in tables[0] if shape in tables[1])
        for table in tables:
            device.reset_counts()
            table[shape].replay.__self__.run()
            num_launched.append(sum(device.launched[name] for name in device.launched if name.startswith("_")))
        num_layers = llm.engine.executor.runner.cache.num_layers
        assert num_launched[0] - num_launched[1] >= 8 * num_layers  # two kernels for each product


def weights_of_a_compiled_model_are_replaced_and_a_sleeping_engine_gives_its_memory_back(path):
    """Views of merged weights stay views, and graphs are captured again. Without its weights it needs those of an update."""
    other = tiny_models.save("qwen3", path / "other", seed=1, **SMALL["qwen3"])
    expected, others = expected_tokens(path), expected_tokens(other)
    with simulated() as device:
        before = device.allocated
        llm = LLM(path, device="sim", kv_cache_memory=2**20, **SETTINGS)
        executor = llm.engine.executor
        freed = sum(weight.nbytes for weight in executor.runner.model.parameters()) + executor.info.num_cache_bytes
        assert tokens_of(llm) == expected
        awake = device.allocated - before
        for level in (1, 1, 2):
            num_graphs = len(executor.runner.graphs.table.graphs), len(executor.batch.table.graphs)
            assert min(num_graphs) > 0
            for _ in range(2):  # a second call changes nothing
                llm.sleep(level)
                assert 0 <= device.allocated - before < awake - freed
            with pytest.raises(NanoinferError, match="call wake_up"):
                tokens_of(llm)
            llm.wake_up(["kv_cache"])
            llm.wake_up()
            if level == 2:
                with pytest.raises(NanoinferError, match="give it all of them"):
                    tokens_of(llm)
            else:
                assert tokens_of(llm) == expected
                assert (len(executor.runner.graphs.table.graphs), len(executor.batch.table.graphs)) == num_graphs
                assert device.allocated - before == awake
        llm.update_weights_from_path(str(other))
        assert tokens_of(llm) == others
        llm.sleep(1)
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights_from_path(str(path))
        assert tokens_of(llm) == expected
        assert device.allocated - before == awake


def run_weights(paths):
    with simulated() as device:
        for path in paths:
            before = device.allocated
            model = load_model(Checkpoint.open(str(path)), "float16", "sim")
            gc.collect()
            plain = device.allocated
            compiled = compile_model(model)
            gc.collect()
            assert device.allocated == plain > before, path
            num_bytes = inspect.examine(str(path), dtype="float16").num_weight_bytes
            assert num_bytes == sum(weight.nbytes for weight in model.parameters())
            del model, compiled
            gc.collect()


def test_a_compiled_model_takes_the_bytes_of_the_plain_one_whatever_its_family(tmp_path):
    in_own_process(run_weights, [save(family, tmp_path / family) for family in FAMILIES])


def rounded_weights_give_the_tokens_of_the_cpu(path, names=("int8",)):
    """Of a model without moments, as an eager one. The device never has the matrices of linear layers in 16 bits."""
    prompts, params = [[5, 6, 7] * 4, [3, 4, 1, 2, 8], [1, 2, 3] * 7, [11]], [GREEDY] * 4
    cpu = {"device": "cpu", "enforce_eager": True, "kv_cache_memory": 2**22, "logprobs_mode": "raw_logits"}
    expected = {name: tiny_models.clear_tokens(LLM(path, quantization=name, **cpu), prompts, GREEDY) for name in names}
    with simulated(mock.patch("nanoinfer.fast.cpu.calibration.find_moments", return_value={})) as device:
        for name, clear in expected.items():
            options = {"device": "sim", "quantization": name, "dtype": "float16"}
            llm = LLM(path, kv_cache_memory=2**20, **options, **SETTINGS)
            device.reset_counts()
            tokens = tokens_of(llm, prompts, params)
            assert device.waits == []
            assert sum(map(len, clear)) > 8
            assert [own[: len(some)] for own, some in zip(tokens, clear, strict=True)] == clear
            tables = [owner.table.graphs for owner in (llm.engine.executor.runner.graphs, llm.engine.executor.batch)]
            captured = [graph.replay.__self__ for graphs in tables for graph in graphs.values()]
            launched = {launch.function.__name__ for graph in captured for launch in graph.launched}
            assert launched >= {"_integer_linear_kernel", "_widen_kernel", "_decode_attention_kernel"}
            llm.close()
            del llm, tables, captured
            check_bytes_of_rounded_weights(path, name, options, device)


def weights_in_4_bits_give_the_tokens_of_the_cpu(path):
    rounded_weights_give_the_tokens_of_the_cpu(path, ["int4"])


def check_bytes_of_rounded_weights(path, quantization, options, device):
    gc.collect()
    before = device.allocated
    model = load(EngineConfig(model=str(path), **options))[0].model
    placed = device.allocated
    linears = [module.weight for module in model.modules() if type(module) is torch.nn.Linear]
    kept = sum(weight.nbytes for weight in model.parameters() if all(weight is not one for one in linears))
    assert placed - before == kept + model.rotary_emb.inv_freq.nbytes
    device.peak = placed
    compiled = compile_model(model, quantization)
    rounded = num_linear_bytes(model, BITS[quantization])
    scratch = max(weight.numel() for weight in linears) * 2
    assert device.allocated - placed == rounded + scratch
    assert device.peak - placed < sum(weight.numel() for weight in linears) * 2
    assert compiled.compiled


def every_route_of_the_sampler_and_beams_give_the_tokens_of_the_cpu(path):
    """Of a backend without graphs, few_logits draws. With enforce_eager, the stages do."""
    with simulated() as device:
        for options in ({}, {"enforce_eager": True}):
            llm = LLM(path, device="sim", kv_cache_memory=2**20, attention_backend="reference", **SETTINGS, **options)
            routes = getattr(llm.engine.executor.sampler, "routes", ())
            assert [type(route).__name__ for route in routes] == ["FewLogits"][: not options]
            device.reset_counts()
            assert tokens_of(llm) == expected_tokens(path)
            assert device.waits == []
        params = BeamSearchParams(beam_width=3, max_tokens=4)
        beams, expected = (
            [[beam.token_ids for beam in output.sequences] for output in one.beam_search(PROMPTS, params)]
            for one in (llm, LLM(path, device="cpu", enforce_eager=True, kv_cache_memory=2**22))
        )
        assert beams == expected


def the_blocks_of_forks_are_copied_in_all_layers_by_one_kernel(path):
    with simulated() as device:
        cache = KVCache(num_layers=3, num_blocks=6, block_size=4, num_kv_heads=1, head_dim=6, device="sim")
        for number, pages in enumerate(cache.pages):
            pages.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand(pages.shape) + 10 * number)
        device.reset_counts()
        with (
            mock.patch.object(device, "launch", wraps=device.launch) as launch,
            mock.patch.object(device, "execute", wraps=device.execute) as execute,
        ):
            cache.copy_blocks([(0, 1), (1, 2), (5, 4), (4, 5)])
        assert launch.call_count == 1
        assert not [call.args[0] for call in execute.call_args_list if "index" in str(call.args[0])]
        assert device.waits == []
        for number, pages in enumerate(cache.pages):
            assert (pages.cpu()[:, 3, 0, 5] - 10 * number).tolist() == [0, 0, 1, 3, 5, 4]


def a_prefix_cache_on_disk_is_written_and_read(path):
    with simulated():
        options = {"kv_cache_memory": 2**20, "prefix_cache_dir": path / "blocks"}
        for has_files in (False, True):
            llm = LLM(path, device="sim", **options, **SETTINGS)
            assert tokens_of(llm) == expected_tokens(path)
            assert bool(llm.engine.block_manager.store.counts["prefix_cache_read_bytes"]) == has_files
            llm.close()


def the_cache_is_as_large_as_the_devices_memory_allows(path):
    """The cache takes what a step leaves of the device's memory, and a closed engine gives it back."""
    with simulated() as device:
        before = device.allocated
        llm = LLM(path, device="sim", gpu_memory_utilization=0.01, **SETTINGS | {"max_num_seqs": 16, "max_model_len": 256})
        assert 0.0075 < device.allocated / device.total_bytes < 0.01
        assert tokens_of(llm, PROMPTS[1:], PARAMS[1:]) == expected_tokens(path)[1:]
        llm.close()
        del llm
        assert device.allocated == before
        with pytest.raises(InvalidValueError, match="lower kv_cache_memory"):
            LLM(path, device="sim", kv_cache_memory=2**50, **SETTINGS)
        device.total_bytes = device.allocated + 1000
        with pytest.raises(OutOfMemoryError, match=r"the weights take .* GB in float32, and 0\.0 GB are free on sim; use q"):
            LLM(path, device="sim", **SETTINGS)


def a_step_that_goes_on_is_a_replay_and_one_copy_each_way(path):
    """Of blocks that have begun, if any, and of the tokens, with an event. The first step of each kind is captured."""
    with simulated() as device:
        llm, launched = LLM(path, device="sim", kv_cache_memory=2**20, **SETTINGS), []
        for prompt in ([1, 2], [3, 4]):  # which begin their blocks in the same steps
            llm.engine.add_request(prompt, SamplingParams(max_tokens=14, temperature=0.5, ignore_eos=True, detokenize=False))
        while llm.engine.num_unfinished:
            device.reset_counts()
            llm.engine.step()
            launched.append((dict(device.launched), device.num_synchronized))
        copy = {"copy_.default": 1}
        with_blocks = {"copy_.default": 2, "index_copy_.default": 2}
        assert launched[3:11] == [(with_blocks if step % BLOCK_SIZE == 3 else copy, 1) for step in range(3, 11)]
        assert device.waits == []


def a_row_has_the_same_bits_in_any_batch_with_batch_invariant(path):
    """Alone, beside others in other chunks, and after a prefix hit, in replayed steps. Products that cannot are refused."""
    compile_plainly = lambda *given, is_invariant, **options: compile_model(*given, **options)  # noqa: E731
    with simulated(mock.patch.object(batch_independence, "PROMPT_LENGTHS", (3, 6, 1))) as device:
        settings = SETTINGS | {"kv_cache_memory": 2**20, "batch_invariant": True}
        llm = LLM(path, device="sim", **settings)
        assert llm.batch_independent
        params = [replace(one, logprobs=2) for one in PARAMS]
        device.reset_counts()
        runs = [
            llm.generate(prompts, asked, use_tqdm=False) for prompts, asked in ((PROMPTS, params), (PROMPTS[:1], params[:1]))
        ]
        assert [output.outputs[0].token_ids for output in runs[0]] == expected_tokens(path)
        assert runs[0][0].outputs[0].logprobs == runs[1][0].outputs[0].logprobs
        assert runs[1][0].metrics.num_cached_tokens
        assert device.waits == []
        assert any(graph.replay.__self__.num_replays for graph in llm.engine.executor.runner.graphs.table.graphs.values())
        with (
            mock.patch.object(accelerate, "compile_model", compile_plainly),
            pytest.raises(UnsupportedError, match="batch_invariant=True requires rows whose bits do not depend"),
        ):
            LLM(path, device="sim", **settings)


def a_step_is_launched_before_the_tokens_of_the_one_before_are_read(path):
    """With penalties, constraints, log-probabilities and masks, which read nothing of the device but what was copied."""
    asked = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "logprobs": 2, "return_sampling_mask": True, "min_tokens": 2}
    params = [replace(one, **asked) for one in PARAMS]
    with simulated() as device:
        llm, order = LLM(path, device="sim", kv_cache_memory=2**20, **SETTINGS), []
        executor = llm.engine.executor
        launch, collect = executor.launch, executor.collect
        device.reset_counts()
        with mock.patch.multiple(
            executor,
            launch=lambda plan, previous: order.append(("launch", id(plan))) or launch(plan, previous),
            collect=lambda step: order.append(("collect", id(step.plan))) or collect(step),
        ):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected_tokens(path, params=params)
        assert device.waits == []
        assert [plan for kind, plan in order if kind == "collect"] == [plan for kind, plan in order if kind == "launch"]
        assert not any(order[i][1] == order[i + 1][1] for i in range(len(order) - 2))


def the_device_is_refused_unless_a_test_allows_it(path):
    with simulated():
        pass
    with pytest.raises(InvalidValueError, match="device must be auto, cpu, cuda or cuda:N, got 'sim'"):
        LLM(path, device="sim")


@pytest.mark.parametrize(
    ("run", "family"),
    [
        (adapters_give_the_tokens_of_the_cpu, "qwen3"),
        *(
            pytest.param(adapters_give_the_tokens_of_the_cpu, family, marks=pytest.mark.long)
            for family in ("gpt2", "gemma3_window")
        ),
        (weights_of_a_compiled_model_are_replaced_and_a_sleeping_engine_gives_its_memory_back, "qwen3"),
        (rounded_weights_give_the_tokens_of_the_cpu, "qwen3"),
        pytest.param(weights_in_4_bits_give_the_tokens_of_the_cpu, "qwen3", marks=pytest.mark.long),
        (every_route_of_the_sampler_and_beams_give_the_tokens_of_the_cpu, "qwen2"),
        (the_blocks_of_forks_are_copied_in_all_layers_by_one_kernel, "gpt2"),
        (a_prefix_cache_on_disk_is_written_and_read, "gpt2"),
        (the_cache_is_as_large_as_the_devices_memory_allows, "gpt2"),
        (a_step_that_goes_on_is_a_replay_and_one_copy_each_way, "gpt2"),
        (a_row_has_the_same_bits_in_any_batch_with_batch_invariant, "qwen3"),
        (a_step_is_launched_before_the_tokens_of_the_one_before_are_read, "gpt2"),
        (the_device_is_refused_unless_a_test_allows_it, "gpt2"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_on_a_device_that_is_not_the_cpu(run, family, tmp_path):
    is_rounded = run in (rounded_weights_give_the_tokens_of_the_cpu, weights_in_4_bits_give_the_tokens_of_the_cpu)
    wide = {"hidden_size": 64, "intermediate_size": 128} if is_rounded else {}
    in_own_process(run, save(family, tmp_path, **wide))


# ---- faults of an engine, which the device must find


def run_fault(path, fault):
    where, what, found = FAULTS[fault]
    with simulated(mock.patch(f"nanoinfer.{where}", what)) as device:
        from tests.helpers.simulated_device import DeviceError

        device.reset_counts()
        llm = LLM(path, device="sim", kv_cache_memory=2**20, **SETTINGS)
        device.reset_counts()
        if found.startswith("waits: "):
            tokens_of(llm)
            assert any(found.removeprefix("waits: ") in wait for wait in device.waits), device.waits
        else:
            with pytest.raises(DeviceError, match=found):
                tokens_of(llm)


def reads_a_value(logits, columns, u):
    from nanoinfer.sampling.draw import argmax

    ids = argmax(logits)
    assert int(ids[0]) >= -1
    return ids


def moved_pages(self, layer):
    """As KVCache.layer, in other memory each time: a graph keeps the address of the first."""
    self._layers[layer] = tuple(pages.clone() for pages in self._layers[layer])
    return self._layers[layer]


def another_number_of_splits(num_seqs, num_kv_heads, max_seq_len, calls=[]):  # noqa: B006
    """As num_splits_for, with another number each time."""
    calls.append(max_seq_len)
    return 1 + len(calls) % 2


# what is wrong -> (the function, what is in its place, DeviceError's message or after "waits: " a place where the host waits)
FAULTS = {
    "a tensor of the CPU in the sampler": (
        "sampling.batch.on_device", lambda tensor, device: tensor, "waits: sampling/cuda_graphs.py",
    ),
    "a tensor of the CPU for a kernel": (
        "execution.forward_batch.integers_on_device", lambda lists, device: [*map(torch.tensor, lists)], "of the CPU",
    ),
    "a copy that waits": (
        "system.transfer.on_device", lambda tensor, device: tensor.to(device), "waits: a copy from or to memory",
    ),
    "a value read by a graph's function": ("fast.sampling.cuda_graphs.sample_on_gpu", reads_a_value, "while a graph"),
    "a pointer that changes": ("attention.kv_cache.KVCache.layer", moved_pages, "would now launch"),
    "a number that changes": ("fast.cuda.decode_kernels.num_splits_for", another_number_of_splits, "would now launch"),
}  # fmt: skip
QUICK = "a tensor of the CPU for a kernel", "a copy that waits", "a pointer that changes"


@pytest.mark.parametrize("fault", [*QUICK, *(pytest.param(one, marks=pytest.mark.long) for one in FAULTS if one not in QUICK)])
def test_a_fault_of_an_engine_is_found(fault, tmp_path):
    in_own_process(run_fault, save("qwen2", tmp_path), fault)


def run_device_alone():
    """What a graph and a copy to pinned memory may not do."""
    with simulated() as device:
        from nanoinfer.fast.cuda.graphs import CUDACapture
        from tests.helpers.simulated_device import DeviceError, Event, Graph, capturing

        held = [torch.arange(3, device="sim")]
        replay, out = CUDACapture(held[0].device)(lambda: held[0] * 2 + 1)
        assert out.tolist() != [1, 3, 5]  # a capture computes nothing
        replay()
        assert out.tolist() == [1, 3, 5]
        held[0] += 1
        replay()
        assert out.tolist() == [3, 5, 7]

        graph = Graph()
        with capturing(graph):
            doubled = held[0] * 2
        graph.replay()
        assert doubled.tolist() == [2, 4, 6]
        held.clear()
        with pytest.raises(DeviceError, match="memory that was freed after the capture"):
            graph.replay()

        host, copied = torch.empty(3, dtype=torch.int64, pin_memory=True), Event()
        host.copy_(doubled, non_blocking=True)
        copied.record()
        assert host.tolist() != [2, 4, 6]  # it is on its way
        copied.synchronize()
        assert host.tolist() == [2, 4, 6]
        assert torch.empty(2, device="sim").isnan().all()
        device.reset_counts()
        doubled.nonzero()
        doubled[doubled > 2]
        assert [wait.partition(":")[0] for wait in device.waits] == ["nonzero", "index.Tensor"]
        with pytest.raises(DeviceError, match="of the device and of the CPU"):
            doubled + torch.ones(3)


def test_the_device_is_as_strict_as_a_gpu():
    in_own_process(run_device_alone)
