"""Each request has the tokens of the model that its adapter is merged into, whatever else is in the batch."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from nanoinfer import LLM, BeamSearchParams, SamplingParams
from nanoinfer.compat.vllm.engine import VLLMEngine as LLMEngine
from nanoinfer.config import SchedulerConfig
from nanoinfer.errors import InvalidTypeError, InvalidValueError, NanoinferError, UnsupportedError, WeightsError
from nanoinfer.execution import memory
from nanoinfer.features.adapters import adapters as adapters_module
from nanoinfer.features.adapters.adapters import Adapters, adapter_of
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers import tiny_models
from tests.helpers.lora_adapters import linear_shapes, write_adapter, write_requests

GREEDY = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
PROMPTS = [[1, 2, 3, 4 + i] for i in range(8)]
ADAPTED = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 6, "kv_cache_memory": 2**22}


def save(folder, family):
    """Write a checkpoint and adapters of its linear layers, each of another rank. Returns its path and the LoRARequests."""
    base = tiny_models.save(family, folder / "base")
    return base, write_requests(base, folder, (4, 5, 6))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save(tmp_path_factory.mktemp("lora"), "qwen3")


def tokens(llm, prompts=PROMPTS, lora_request=None, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def merged_tokens(base, requests, prompts=PROMPTS, **settings):
    """The tokens of each prompt by the model that its adapter is merged into."""
    paths = [None if request is None else request.lora_path for request in requests]
    llms = {path: LLM(base, lora=path, kv_cache_memory=2**22, **settings) for path in dict.fromkeys(paths)}
    return [tokens(llms[path], [prompt])[0] for path, prompt in zip(paths, prompts, strict=True)]


def known(llm):
    return next(feature for feature in llm.engine.inputs.features if isinstance(feature, Adapters))


@pytest.mark.slow
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("family", ["gpt2_n_inner", "qwen3", "qwen2_moe", "qwen3_5", "gemma3_window"])
def test_rows_of_several_adapters_have_the_tokens_of_the_merged_models(tmp_path, family, enforce_eager):
    base, adapters = save(tmp_path, family)
    requests = [None, *adapters, *adapters, None]
    expected = merged_tokens(base, requests, enforce_eager=enforce_eager)
    assert len({str(one) for one in expected}) > 2
    llm = LLM(base, enforce_eager=enforce_eager, **ADAPTED)
    assert tokens(llm, PROMPTS, requests) == expected
    tiny_models.assert_nothing_is_left(llm)


@pytest.mark.slow
def test_rounded_base_weights_take_adapters_too(tmp_path):
    """They have no merged model with the same numbers, so the log-probabilities are only near those of fp32."""
    base = tiny_models.save("qwen3", tmp_path / "base", hidden_size=64, intermediate_size=96)
    write_adapter(tmp_path / "a", linear_shapes(base), lora_alpha=16)
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False)

    def of_prompt(llm, lora_request=None):
        [output] = llm.generate([list(range(1, 30))], params, use_tqdm=False, lora_request=lora_request)
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([one[i].logprob for i, one in pairs])

    expected = of_prompt(LLM(base, lora=tmp_path / "a", kv_cache_memory=2**22))
    llm = LLM(base, quantization="int8", **ADAPTED)
    near, far = ((of_prompt(llm, one) - expected).abs().mean() for one in (LoRARequest("a", 1, str(tmp_path / "a")), None))
    assert near < 0.1 < 1 < far


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_a_request_has_the_same_bits_alone_and_among_others(qwen3):
    base, adapters = qwen3
    llm = LLM(base, **ADAPTED, enable_prefix_caching=False)
    assert llm.batch_independent
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, detokenize=False)
    requests = [adapters[0], None, adapters[1], adapters[1], None, adapters[2], adapters[0], None]

    def run(llm, prompts, lora_requests=None):
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora_requests)
        return [output.outputs[0].logprobs for output in outputs]

    together = run(llm, PROMPTS, requests)
    assert [run(llm, [prompt], [one])[0] for prompt, one in zip(PROMPTS, requests, strict=True)] == together
    plain = LLM(base, kv_cache_memory=2**22, enable_prefix_caching=False)
    rows = [i for i, one in enumerate(requests) if one is None]
    assert run(plain, [PROMPTS[i] for i in rows]) == [together[i] for i in rows]  # also among rows with adapters


def test_an_adapter_that_was_merged_and_one_of_the_request_add_up_for_all_its_answers(qwen3):
    base, adapters = qwen3
    params = SamplingParams(temperature=1, n=2, seed=5, max_tokens=8, detokenize=False)
    expected = tokens(LLM(base, lora=[one.lora_path for one in adapters[:2]], kv_cache_memory=2**22), params=params)
    llm = LLM(base, lora=adapters[0].lora_path, **ADAPTED)
    assert tokens(llm, lora_request=adapters[1], params=params) == expected


# ---- residency


@pytest.mark.slow
def test_no_step_has_more_adapters_than_max_loras_and_all_requests_end(qwen3):
    base, adapters = qwen3
    llm = LLM(base, **ADAPTED | {"max_loras": 1})
    launch, seen = llm.engine.executor.launch, []

    def watched(plan, previous):
        adapters = (item.sequence.extras.get("adapter") for item in plan.scheduled)
        seen.append({adapter.request.lora_name for adapter in adapters if adapter})
        return launch(plan, previous)

    llm.engine.executor.launch = watched
    requests = [adapters[i % 3] for i in range(7)] + [None]
    assert tokens(llm, PROMPTS, requests) == merged_tokens(base, requests)
    assert max(map(len, seen)) == 1
    assert [next(iter(names)) for i, names in enumerate(seen) if i == 0 or names != seen[i - 1]] == [
        "adapter1", "adapter2", "adapter3"
    ]  # fmt: skip


def test_running_adapters_are_counted_once_in_a_step_however_many_requests_wait():
    passes = []

    class Counting(list):
        def __iter__(self):
            passes[-1] += 1
            return super().__iter__()

    for num_waiting in (1, 30):
        scheduler = Scheduler(SchedulerConfig(), BlockManager(99, 4))
        scheduler.limits, scheduler.running = {"adapter": 2}, Counting()
        for i, name in enumerate(["a", None, "b", "a", *["c"] * num_waiting, None]):
            scheduler.add(Sequence(str(i), [1], SamplingParams(), seed=0, max_num_tokens=3, extras={"adapter": name}))
        passes.append(0)
        plan = scheduler.schedule()
        assert [item.sequence.extras["adapter"] for item in plan.scheduled] == ["a", None, "b", "a", None]
    assert passes[0] == passes[1]


def test_the_least_recently_used_adapter_is_replaced(qwen3):
    base, adapters = qwen3
    llm = LLM(base, **ADAPTED | {"max_loras": 2})
    activated, activate = [], known(llm)._activate
    known(llm)._activate = lambda adapter, used: (activated.append(adapter.request.lora_name), activate(adapter, used))
    for i in (0, 1, 0, 2, 0, 1):
        tokens(llm, PROMPTS[:1], adapters[i])
    assert activated == ["adapter1", "adapter2", "adapter3", "adapter2"]


def test_an_id_has_one_adapter_until_it_is_removed(qwen3):
    base, adapters = qwen3
    llm = LLMEngine(base, **ADAPTED)
    other = LoRARequest("other", 1, adapters[1].lora_path)
    first = tokens(llm, lora_request=adapters[0])
    with pytest.raises(InvalidValueError, match=r"lora_int_id 1 is LoRARequest.*give each adapter an id of its own"):
        tokens(llm, lora_request=other)
    assert (llm.remove_lora(1), llm.remove_lora(1)) == (True, False)
    assert tokens(llm, lora_request=other) == merged_tokens(base, [adapters[1]] * 8) != first


def test_the_kv_cache_leaves_room_for_max_loras_adapters_in_the_models_dtype(qwen3, monkeypatch):
    base, adapters = qwen3
    for module in (memory, adapters_module):
        monkeypatch.setattr(module, "available_cpu_memory", lambda: 2**22)
    monkeypatch.setattr(memory, "mapped_file_bytes", lambda: 0)
    load = partial(LLM, base, dtype="bfloat16", enable_lora=True)
    adapted, plain = load(block_size=4, max_loras=3, max_lora_rank=6), LLM(base, dtype="bfloat16", block_size=4)
    update = next(iter(adapter_of(adapted.engine.inputs, adapters[2]).updates.values()))
    assert (len(update.a), update.a.dtype, update.b.dtype) == (6, torch.bfloat16, torch.bfloat16)
    matrices = load_file(f"{adapters[2].lora_path}/adapter_model.safetensors").values()
    num_bytes = 3 * 2 * sum(matrix.bfloat16().nbytes for matrix in matrices)  # 3 adapters, each as it was read and the kernels'
    block_bytes = plain.info.num_cache_bytes / plain.info.num_blocks
    assert abs(plain.info.num_cache_bytes - num_bytes / 2 - adapted.info.num_cache_bytes) <= block_bytes
    with pytest.raises(InvalidValueError, match=f"but {2**22 - num_bytes} are free"):
        load(kv_cache_memory=2**22, max_loras=3, max_lora_rank=6)
    rank_bytes = num_bytes // 18
    highest = 2**22 // rank_bytes
    with pytest.raises(InvalidValueError, match=f"less than one block .*the adapters take {highest * rank_bytes} bytes"):
        load(max_lora_rank=highest, block_size=512)
    too_many = f"max_lora_rank={highest + 1} take {(highest + 1) * rank_bytes} bytes, but {2**22} are free on cpu; lower max_"
    for cache in ({}, {"kv_cache_memory": 2**20}):
        with pytest.raises(InvalidValueError, match=too_many):
            load(max_lora_rank=highest + 1, **cache)


# ---- the prefix cache


def test_blocks_are_shared_by_the_same_adapter_and_by_no_other(qwen3, tmp_path):
    base, adapters = qwen3
    llm = LLM(base, **ADAPTED, block_size=4)
    prompt = list(range(1, 30))

    def num_cached(lora_request, **salt):
        [output] = llm.generate({"prompt_token_ids": prompt, **salt}, GREEDY, use_tqdm=False, lora_request=lora_request)
        return output.num_cached_tokens

    same = LoRARequest("the same numbers", 9, adapters[0].lora_path)
    write_adapter(tmp_path / "scaled", linear_shapes(base), seed=1, lora_alpha=32)
    scaled = LoRARequest("the same matrices, twice as strong", 10, str(tmp_path / "scaled"))
    cached = [num_cached(one) for one in (None, adapters[0], adapters[1], None, adapters[0], same, scaled)]
    assert cached == [0, 0, 0, 28, 28, 28, 0]
    digest = adapter_of(llm.engine.inputs, adapters[0]).digest
    assert [num_cached(None, cache_salt=salt) for salt in (digest, f"{digest}/")] == [0, 0]  # no salt names an adapter
    assert [num_cached(adapters[0], cache_salt="a"), num_cached(adapters[0], cache_salt="a")] == [0, 28]


def test_preempted_requests_keep_their_adapters(qwen3):
    base, adapters = qwen3
    params = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
    requests = [adapters[i % 3] for i in range(8)]
    roomy = tokens(LLM(base, **ADAPTED), PROMPTS, requests, params)
    llm = LLM(base, **ADAPTED | {"kv_cache_memory": 2**17}, block_size=8, max_model_len=60)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=requests)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [[output.outputs[0].token_ids] for output in outputs] == roomy


@pytest.mark.slow
def test_new_base_weights_keep_the_adapters(qwen3, tmp_path):
    base, adapters = qwen3
    other = tiny_models.save("qwen3", tmp_path / "other", seed=7)
    llm = LLM(base, **ADAPTED)
    assert tokens(llm, lora_request=adapters[0]) == merged_tokens(base, [adapters[0]] * 8)
    llm.update_weights_from_path(str(other))
    assert tokens(llm, lora_request=adapters[0]) == merged_tokens(other, [adapters[0]] * 8)


# ---- what is refused


def test_a_bad_adapter_is_refused_and_the_others_are_answered(qwen3, tmp_path):
    base, adapters = qwen3
    llm = LLM(base, **ADAPTED)
    expected = tokens(llm, lora_request=adapters[0])
    q, expert = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.0.up_proj"
    named = f"base_model.model.{q}.lora"
    for shapes, changes, error, sentence in (
        ({q: (64, 48)}, {"rank": 7, "r": 7}, InvalidValueError, "has the rank 7, and max_lora_rank is 6; load the model with"),
        ({q: (64, 32)}, {}, WeightsError, r"of shape \[64, 32\], of shape \[64, 48\] in the model"),
        ({"model.layers.9.q": (64, 48)}, {}, WeightsError, "which the model does not have"),
        ({"lm_head": (96, 48)}, {}, UnsupportedError, r"the head and experts are the same for all; use LLM\(lora=path\)"),
        ({expert: (96, 48)}, {}, UnsupportedError, "the head and experts are the same for all"),
        ({q: (64, 48)}, {"use_dora": True}, UnsupportedError, "use_dora=True"),
        ({q: (64, 48)}, {"tensors": {f"{named}_magnitude_vector": torch.ones(64)}}, UnsupportedError, "neither A"),
        ({}, {"tensors": {f"{named}_A.weight": torch.ones(4, 48)}}, WeightsError, "has no A and B that fit"),
    ):
        write_adapter(tmp_path / "bad", shapes, **changes)
        with pytest.raises(error, match=sentence):
            tokens(llm, PROMPTS, [*[adapters[0]] * 7, LoRARequest("bad", 8, str(tmp_path / "bad"))])
        tiny_models.assert_nothing_is_left(llm)
        assert tokens(llm, lora_request=adapters[0]) == expected


def test_an_adapter_whose_numbers_are_not_finite_fails_its_own_requests_only(qwen3, tmp_path):
    base, adapters = qwen3
    named = "base_model.model.model.layers.0.mlp.down_proj.lora"
    nan = {f"{named}_{part}.weight": torch.full(size, torch.nan) for part, size in (("A", (4, 80)), ("B", (48, 4)))}
    write_adapter(tmp_path / "nan", {}, tensors=nan)
    llm = LLM(base, **ADAPTED)
    requests = [adapters[0], LoRARequest("nan", 8, str(tmp_path / "nan")), None]
    outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False, lora_request=requests)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    good = [[outputs[i].outputs[0].token_ids] for i in (0, 2)]
    assert good == merged_tokens(base, [adapters[0], None], [PROMPTS[0], PROMPTS[2]])


def test_wrong_arguments_are_refused_by_name(qwen3):
    base, adapters = qwen3
    llm = LLM(base, **ADAPTED)
    for lora_request, error, sentence in (
        ("adapter", InvalidTypeError, "must be a LoRARequest .nanoinfer.lora.request., got 'adapter'"),
        ([adapters[0]], InvalidValueError, "lora_request must be one, or one per prompt: got"),
    ):
        with pytest.raises(error, match=sentence):
            tokens(llm, lora_request=lora_request)
    with pytest.raises(UnsupportedError, match=r"beams and embeddings use the model as it was loaded; use LLM\(model, lora="):
        llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=2, max_tokens=2), lora_request=adapters[0])
    with pytest.raises(InvalidValueError, match="needs a model loaded with enable_lora=True"):
        tokens(LLM(base, kv_cache_memory=2**22), lora_request=adapters[0])
    for settings, sentence in (
        ({"max_loras": 4}, "max_loras and max_lora_rank need enable_lora=True"),
        ({"enable_lora": True, "max_lora_rank": 0}, "max_lora_rank must be >= 1"),
    ):
        with pytest.raises(NanoinferError, match=sentence):
            LLM(base, **settings)
    for arguments, sentence in (
        (("", 1, "a"), "lora_name is empty"),
        (("a\n", 1, "a"), "lora_name must have at most 256 printable characters"),
        (("a" * 257, 1, "a"), "lora_name must have at most 256 printable characters"),
        (("a", 0, "a"), "lora_int_id must be >= 1"),
        (("a", 1, 5), "lora_path must be"),
    ):
        with pytest.raises(NanoinferError, match=sentence):
            LoRARequest(*arguments)
