"""On a CUDA device: every backend against the definition, replayed steps against plain ones, the engine against transformers.

It uses torch, transformers, numpy, pytest, hypothesis and jaxtyping only. `make gpu` runs it, with the benchmarks.
"""

import pytest
import torch
import transformers

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.base import BACKENDS, find_backend
from nanoinfer.errors import InvalidValueError
from nanoinfer.fast.cuda.accelerate import compile_model
from nanoinfer.fast.cuda.graphs import CUDACapture
from nanoinfer.fast.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.loading import devices, loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.sampler import Sampler
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers import lora_adapters, tiny_models
from tests.helpers.paged_cases import compare
from tests.helpers.sampling_rows import sampling_by

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[(31 * i) % tiny_models.VOCAB_SIZE for i in range(1, length + 1)] for length in (1, 7, 40, 150)]
RAGGED = [(0, 1), (15, 1), (256, 1), (2000, 1), (0, 2), (0, 65), (40, 20), (256, 44), (1200, 300)]


def greedy(path, max_tokens=64, **options):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    llm = LLM(str(path), chunk_size=64, kv_cache_memory=2**26, **options)
    tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    tiny_models.assert_nothing_is_left(llm)
    return tokens, llm


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((2, 1), 64), ((2, 7), 64), ((1, 8), 128), ((4, 1), 80)])
@pytest.mark.parametrize("window", [None, 300])
def test_every_backend_equals_the_definition(backend, dtype, heads, head_dim, window):
    _, reason = find_backend(backend, torch.device("cuda"), dtype, head_dim, 256)
    if reason:
        pytest.skip(reason)
    num_kv_heads, group = heads
    error = compare(
        backend, RAGGED, block_size=256, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, dtype=dtype, device="cuda",
        packed=True, window=window,
    )  # fmt: skip
    assert error < {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.004}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((2, 7), 64), ((1, 8), 128), ((4, 1), 80), ((1, 2), 256)])
@pytest.mark.parametrize("window", [None, 300])
def test_attention_over_a_cache_in_8_bits_equals_the_definition(dtype, heads, head_dim, window):
    error = compare(
        "triton", RAGGED, block_size=16, num_kv_heads=heads[0], group=heads[1], head_dim=head_dim, dtype=dtype, device="cuda",
        packed=True, window=window, in_int8=True,
    )  # fmt: skip
    assert error < {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.004}[dtype]


def test_the_log_probabilities_of_a_cache_in_8_bits_are_those_of_the_cpu(tmp_path):
    """Rounded heads change them. What a GPU adds in another order changes them by less than a quarter of that."""
    path = str(tiny_models.save("qwen3", tmp_path))
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=0, ignore_eos=True, detokenize=False)
    llm = LLM(path, device="cuda", dtype="float32", kv_cache_dtype="int8", kv_cache_memory=2**26)
    answers = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert llm.engine.executor.runner.graphs.table.graphs
    found = [entries[token].logprob for one in answers for token, entries in zip(one.token_ids, one.logprobs, strict=True)]

    def on_the_cpu(kv_cache_dtype):
        llm = LLM(path, device="cpu", enforce_eager=True, kv_cache_dtype=kv_cache_dtype, kv_cache_memory=2**26)
        texts = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, answers, strict=True)]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate(texts, params, use_tqdm=False)
        scored = zip(outputs, PROMPTS, texts, strict=True)
        return [
            entries[token].logprob
            for output, prompt, text in scored
            for token, entries in zip(text[len(prompt) :], output.prompt_logprobs[len(prompt) :], strict=True)
        ]

    found, rounded, plain = map(torch.tensor, (found, on_the_cpu("int8"), on_the_cpu("auto")))
    assert (found - rounded).abs().mean() < (rounded - plain).abs().mean() / 4


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers_in_fp32(family, tmp_path):
    path = tiny_models.save(family, tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        mask = torch.ones_like(ids)
        out = oracle.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    assert greedy(path, device="cuda")[0] == expected


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_logits_in_16_bits_stand_as_near_the_truth_as_transformers(family, tmp_path):
    path = tiny_models.save(family, tmp_path)
    ids = torch.tensor(PROMPTS[-1], device="cuda")

    def there(dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda().eval()
        with torch.inference_mode():
            return model(ids[None]).logits[0].float()

    dtype = torch.bfloat16 if devices.gpu_has_bf16(torch.device("cuda")) else torch.float16
    model = loader.load_model(Checkpoint.open(str(path)), str(dtype).removeprefix("torch."), "cuda")
    model = compile_model(model).model
    with torch.inference_mode():
        here = model.compute_logits(model(ids, torch.arange(len(ids), device="cuda"), HybridDenseAttention())).float()
    truth = there(torch.float32)
    assert (here - truth).abs().mean() < 1.25 * (there(dtype) - truth).abs().mean()


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "qwen3_moe", "gemma3_window", "gpt_oss_window"])
def test_recorded_and_fused_steps_give_the_tokens_of_plain_ones(family, tmp_path):
    path = tiny_models.save(family, tmp_path)
    recorded, llm = greedy(path, device="cuda")
    assert llm.engine.executor.runner.graphs.table.graphs  # it did record
    plain, llm = greedy(path, device="cuda", enforce_eager=True)
    assert llm.engine.executor.runner.graphs is None
    assert recorded == plain == greedy(path, device="cpu")[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_in_recorded_steps_give_the_tokens_of_one(tmp_path):
    path = tiny_models.save("qwen3", tmp_path)
    tokens, llm = greedy(path, dtype="float32", tensor_parallel_size=2)
    assert llm.engine.executor.runner.graphs is not None
    assert tokens == greedy(path, dtype="float32")[0]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_in_recorded_steps_give_the_tokens_of_the_cpu(quantization, tmp_path, monkeypatch):
    """Where the largest logits are clear. Without moments, which the CPU's eager model does not have."""
    monkeypatch.setattr("nanoinfer.fast.cpu.calibration.find_moments", lambda *given: {})
    path = tiny_models.save("qwen3", tmp_path, hidden_size=256, intermediate_size=512)
    cpu = {"device": "cpu", "enforce_eager": True, "kv_cache_memory": 2**26, "logprobs_mode": "raw_logits"}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    clear = tiny_models.clear_tokens(LLM(str(path), quantization=quantization, **cpu), PROMPTS, params)
    tokens, llm = greedy(path, 16, device="cuda", quantization=quantization)
    assert None not in llm.engine.executor.runner.graphs.table.graphs.values()
    assert sum(map(len, clear)) > 16
    assert [own[: len(some)] for own, some in zip(tokens, clear, strict=True)] == clear


def test_adapters_of_requests_in_recorded_steps_give_the_tokens_of_the_cpu(tmp_path):
    """Three adapters take turns in two places."""
    path, answers = tiny_models.save("qwen3", tmp_path), []
    requests = [None, *lora_adapters.write_requests(path, tmp_path, (2, 4, 3)), None]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    for device in ("cpu", "cuda"):
        llm = LLM(str(path), device=device, kv_cache_memory=2**26, enable_lora=True, max_loras=2, max_lora_rank=4)
        outputs = llm.generate([*PROMPTS, PROMPTS[2]], params, use_tqdm=False, lora_request=requests)
        answers.append([output.outputs[0].token_ids for output in outputs])
    graphs = llm.engine.executor.runner.graphs.adapted.table.graphs
    assert graphs
    assert None not in graphs.values()
    assert answers[0] == answers[1]


def test_an_engine_that_has_slept_gives_the_same_tokens(tmp_path):
    path, free = tiny_models.save("qwen3", tmp_path), torch.cuda.mem_get_info
    tokens, llm = greedy(path, device="cuda")
    for level in (1, 2):
        before = free()[0]
        llm.sleep(level)
        assert free()[0] - before > 0.9 * llm.engine.executor.info.num_cache_bytes
        llm.wake_up()
        if level == 2:
            llm.update_weights_from_path(str(path))
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)] == tokens
        assert None not in llm.engine.executor.runner.graphs.table.graphs.values()


ASKING = [{"temperature": 0}, {}, {"top_k": 20, "temperature": 0.7}, {"top_p": 0.9}, {"min_p": 0.05, "top_k": 5, "top_p": 0.8}]


@pytest.mark.parametrize("vocab_size", [100, 50_257])
def test_recorded_draws_are_those_of_the_plain_list(vocab_size):
    """One kind of row for all, then all kinds together; rising and falling numbers of rows."""
    device, generator = torch.device("cuda"), torch.Generator("cuda").manual_seed(0)
    graphs = SamplerGraphs(40, CUDACapture(torch.device("cuda")))
    recorded, plain = sampling_by(graphs), sampling_by()
    for asking in ([ASKING[0]], [ASKING[1]], [ASKING[2]], [ASKING[3]], ASKING):
        for step, num_rows in enumerate((3, 1, 40, 17, 40)):
            params = [SamplingParams(**asking[row % len(asking)]) for row in range(num_rows)]
            rows = [Sequence("r", [1], its, 99 * step + row, 999) for row, its in enumerate(params)]
            logits = torch.randn(num_rows, vocab_size, device=device, generator=generator) * 3
            logits = logits.bfloat16().float() if step % 2 else logits  # which tie
            batch = SamplingBatch.build(rows, vocab_size, device)
            assert recorded(logits.clone(), batch).read() == plain(logits.clone(), batch).read()
    assert graphs.table.graphs
    assert None not in graphs.table.graphs.values()


def test_an_engine_with_recorded_draws_gives_the_tokens_of_one_without(tmp_path):
    """The forward is recorded in both, so that the logits are the same bits."""
    path, tokens = tiny_models.save("qwen3", tmp_path), []
    params = [SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False, seed=seed, **ASKING[seed]) for seed in range(4)]
    for is_recorded in (True, False):
        llm = LLM(str(path), device="cuda", kv_cache_memory=2**26)
        if not is_recorded:
            llm.engine.executor.sampler, llm.engine.executor.batch.sizes = Sampler(), [0]
        tokens.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)])
        assert not is_recorded or llm.engine.executor.sampler.routes[0].table.graphs
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_with_batch_invariant_a_prompt_has_the_same_log_probabilities_alone_and_beside_others(dtype, tmp_path):
    """Also after a prefix hit. 40 prompts are a step of more rows than a tile has, and 1 of the fewest."""
    path = tiny_models.save("qwen3", tmp_path, hidden_size=1024, intermediate_size=1536)
    llm = LLM(str(path), device="cuda", dtype=dtype, batch_invariant=True, chunk_size=64, kv_cache_memory=2**28)
    assert llm.batch_independent
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=2)

    def found(prompts):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(output.prompt_logprobs, output.outputs[0].logprobs) for output in outputs]

    assert found(PROMPTS * 10) == [found([prompt])[0] for prompt in PROMPTS] * 10
    later = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=2)
    hit, missed = (
        one.generate([PROMPTS[-1]], later, use_tqdm=False)[0]
        for one in (llm, LLM(str(path), device="cuda", dtype=dtype, batch_invariant=True, kv_cache_memory=2**28))
    )
    assert hit.metrics.num_cached_tokens
    assert hit.outputs[0].logprobs == missed.outputs[0].logprobs


def test_more_cache_than_there_is_memory_says_what_to_lower(tmp_path):
    path = tiny_models.save("qwen3", tmp_path)
    with pytest.raises(InvalidValueError, match="lower kv_cache_memory"):
        LLM(str(path), device="cuda", kv_cache_memory=2**50)
