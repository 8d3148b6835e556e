"""Weights replaced in place, pauses, memory given back, and log-probabilities of given tokens: compared bit by bit."""

import gc
import random
import shutil
import sys
from functools import cache
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, BeamSearchParams, SamplingParams
from nanoinfer.errors import InvalidTypeError, InvalidValueError, NanoinferError, UnsupportedError, WeightsError
from nanoinfer.features.training import update
from nanoinfer.features.training.loaded_weights import LoadedWeights
from tests.helpers import forked, tiny_models
from tests.helpers.tiny_models import assert_nothing_is_left

SETTINGS = {"kv_cache_memory": 2**21, "block_size": 4, "dtype": "float32", "seed": 0}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9] * 2, [5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
PARAMS = SamplingParams(max_tokens=5, logprobs=1, seed=0, detokenize=False)


def load(path, **settings):
    return LLM(path, **SETTINGS | settings)


def answers(llm):
    """Tokens, log-probabilities and prefix hits of two calls, the second of which hits what the first has cached."""
    outputs = [one for _ in range(2) for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.num_cached_tokens) for one in outputs]


@cache
def fresh_answers(path, **settings):
    with load(path, **settings) as llm:
        return answers(llm)


def tensors_of(path):
    return load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two folders of each family, with different weights."""
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = [tiny_models.save(family, folder / str(seed), seed=seed) for seed in (1, 2)]
        return made[family]

    return get


@pytest.fixture
def qwen3(checkpoints):
    with load(checkpoints("qwen3")[0]) as llm:
        yield llm


def addresses(llm):
    """Where the model's numbers are in memory."""
    weights = llm.engine.executor.runner.weights
    assert weights._kernel_weights, "the model is compiled"
    return [tensor.data_ptr() for tensor in weights.tensors()]


UPDATED = [("gpt2", "float32"), ("qwen3_tied", "bfloat16"), ("qwen3_5", "float32"), ("gpt_oss_window", "bfloat16")]
OTHERS = [pytest.param(*one, marks=pytest.mark.long) for one in (*UPDATED[2:], ("qwen3_moe", "float32"))]


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("family", "dtype"), [*UPDATED[:2], *OTHERS])
def test_updates_give_the_bits_of_a_fresh_engine_in_the_same_memory(checkpoints, family, dtype):
    first, second = checkpoints(family)
    wanted = [fresh_answers(path, dtype=dtype) for path in (first, second)]
    assert wanted[0] != wanted[1]
    with load(first, dtype=dtype) as llm:
        before, num_bytes = addresses(llm), []
        for i, path in enumerate([second, first] * 2):
            assert llm.update_weights(tensors_of(path).items()) == i + 1
            assert answers(llm) == wanted[1 - i % 2]
            assert addresses(llm) == before
            gc.collect()
            num_bytes.append(sum(one.nbytes for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)))
        assert num_bytes[1] == num_bytes[3], "no tensor is kept"


def test_write_renews_a_weight_for_every_kernel_that_has_it():
    layer, ones, kernels = torch.nn.Linear(3, 4), torch.ones(4, 3), [Mock(), Mock()]
    weights = LoadedWeights(torch.nn.ModuleList([layer]))
    for start, kernel in enumerate(kernels):
        weights.add_kernel_weight(layer, kernel, start)
    weights.write("0.weight", ones)
    assert torch.equal(layer.weight, ones)
    assert [kernel.write.call_args for kernel in kernels] == [call("weight", ones, start) for start in (0, 1)]


@pytest.mark.slow
def test_the_parameters_of_transformers_own_mixture_are_taken(checkpoints):
    """Which has all experts of a layer in one tensor."""
    first, second = checkpoints("qwen3_moe")
    with load(first) as llm:
        llm.update_weights(AutoModelForCausalLM.from_pretrained(second).named_parameters())
        assert answers(llm) == fresh_answers(second)


@pytest.mark.slow
def test_after_an_update_that_failed_halfway_no_request_is_answered_until_all_weights_are_given(
    checkpoints, qwen3, monkeypatch
):
    first, second = checkpoints("qwen3")
    fill, count = update.fill, iter(range(1000))

    def failing(runner, name, tensor):
        if next(count) == 3:
            raise OSError("the disk is gone")
        fill(runner, name, tensor)

    monkeypatch.setattr(update, "fill", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        qwen3.update_weights(tensors_of(second).items())
    with pytest.raises(NanoinferError, match="failed after some were replaced; give it all"):
        answers(qwen3)
    with pytest.raises(NanoinferError, match="all are needed here"):
        qwen3.update_weights([("model.norm.weight", tensors_of(first)["model.norm.weight"])])
    assert not qwen3.is_sleeping()
    qwen3.update_weights(tensors_of(second).items())
    assert answers(qwen3) == fresh_answers(second)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_some_weights_alone_or_all_of_a_folder_are_replaced_and_outputs_name_the_version(checkpoints, tmp_path, qwen3):
    first, second = checkpoints("qwen3")
    shutil.copytree(first, tmp_path / "mixed")
    assert qwen3.generate([1, 2], PARAMS, use_tqdm=False)[0].weights_version == 0
    names = ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    new = {name: tensors_of(second)[name] for name in names}
    save_file(tensors_of(first) | new, tmp_path / "mixed" / "model.safetensors", metadata={"format": "pt"})
    qwen3.update_weights([(name.removeprefix("model."), new[name]) for name in names[1:]])
    assert qwen3.update_weights([(names[0], new[names[0]])]) == 2
    assert answers(qwen3) == fresh_answers(tmp_path / "mixed") != fresh_answers(first)
    assert qwen3.generate([1, 2], PARAMS, use_tqdm=False)[0].weights_version == 2
    assert qwen3.update_weights_from_path(str(second)) == 3
    assert answers(qwen3) == fresh_answers(second)


def test_a_module_of_transformers_in_another_dtype_updates_the_textbook_model(checkpoints):
    second = checkpoints("gpt2")[1]
    with load(checkpoints("gpt2")[0], enforce_eager=True) as llm:
        llm.update_weights(tiny_models.build("gpt2", 2).double().state_dict().items())
        assert answers(llm) == fresh_answers(second, enforce_eager=True)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe", pytest.param("qwen3_tied", marks=pytest.mark.long)])
def test_both_ranks_get_their_parts(checkpoints, family):
    settings = {"tensor_parallel_size": 2, "dtype": "bfloat16"}
    first, second = checkpoints(family)
    with forked.ranks(), load(first, **settings) as llm:
        wanted, before = [answers(llm), fresh_answers(second, **settings)], addresses(llm)
        assert wanted[0] != wanted[1]
        llm.update_weights(tensors_of(second).items())
        assert answers(llm) == wanted[1]
        llm.update_weights_from_path(str(first))
        assert answers(llm) == wanted[0]
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights_from_path(str(second))
        assert answers(llm) == wanted[1]
        assert addresses(llm) == before


def test_what_does_not_fit_is_refused_before_anything_changes(checkpoints):
    with load(checkpoints("qwen3_tied")[0]) as llm:
        before = answers(llm)
        for pairs, error, words in (
            ([("model.layers.7.mlp.up_proj.weight", torch.zeros(80, 48))], WeightsError, "unexpected: model.layers.7"),
            ([("model.norm.weight", torch.zeros(47))], WeightsError, r"has shape \[47\], the config requires \[48\]"),
            ([("norm.weight", torch.zeros(48, dtype=torch.int32))], WeightsError, "norm.weight is torch.int32"),
            ([("norm.weight", torch.zeros(48, device="meta"))], WeightsError, "is on the meta device and has no numbers"),
            ([("norm.weight", torch.zeros(48))] * 2, WeightsError, "'norm.weight' is given twice"),
            ([("norm.weight", [0.0] * 48)], InvalidTypeError, "must be a torch.Tensor"),
            (["norm.weight"], InvalidTypeError, "pairs must be"),
            ([("lm_head.weight", torch.zeros(96, 48))], WeightsError, "must come with the embedding that it shares"),
        ):
            with pytest.raises(error, match=words):
                llm.update_weights([("layers.0.mlp.up_proj.weight", torch.zeros(80, 48)), *pairs])
        with pytest.raises(InvalidTypeError, match=r"pass model\.named_parameters"):
            llm.update_weights(torch.nn.Linear(1, 1))
        with pytest.raises(WeightsError, match="'someone/else' is neither a folder nor"):
            llm.update_weights_from_path("someone/else")
        with pytest.raises(WeightsError, match="is not the config of this LLM's model"):
            llm.update_weights_from_path(str(checkpoints("qwen3_moe")[1]))
        assert answers(llm)[len(PROMPTS) :] == before[len(PROMPTS) :]
        assert llm.generate([1], PARAMS, use_tqdm=False)[0].weights_version == 0


def test_weights_that_cannot_be_replaced_are_refused_with_a_hint(tmp_path):
    path = tiny_models.save("qwen3", tmp_path, hidden_size=64, intermediate_size=96)
    llm = load(path, quantization="int8", dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="load the model without"):
        llm.update_weights([])


def test_requests_that_run_keep_weights_and_memory_until_a_pause_ends_them(qwen3):
    stream = qwen3.stream([1, 2, 3], PARAMS)
    first = next(stream)
    with pytest.raises(NanoinferError, match=r"1 requests run.*pause\(mode='wait'\)"):
        qwen3.update_weights([])
    with pytest.raises(NanoinferError, match=r"1 requests run; wait for their end, or call pause\(\) first"):
        qwen3.sleep()
    qwen3.pause()
    assert qwen3.update_weights([]) == 1
    for start in (lambda: qwen3.generate([1], PARAMS), lambda: qwen3.beam_search([1], BeamSearchParams(beam_width=2))):
        with pytest.raises(NanoinferError, match=r"call resume\(\) first"):
            start()
    rest = list(stream)
    assert (len(first.token_ids), len(rest), rest[-1].finish_reason) == (1, 4, "length")
    qwen3.resume()
    stream = qwen3.stream([1, 2, 3], PARAMS)
    next(stream)
    qwen3.pause("abort")
    assert [delta.finish_reason for delta in stream] == ["abort"]
    with pytest.raises(InvalidValueError, match="mode must be 'wait' or 'abort', got 'keep'"):
        qwen3.pause("keep")
    with pytest.raises(InvalidValueError, match="level must be 1 or 2, got 3"):
        qwen3.sleep(3)
    with pytest.raises(InvalidValueError, match="'weights' and 'kv_cache'"):
        qwen3.wake_up(["cache"])
    qwen3.resume()
    assert len(qwen3.generate([1], PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 5
    assert_nothing_is_left(qwen3)


# ---- memory


def anonymous_bytes():
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux")
@pytest.mark.usefixtures("kernels")
@pytest.mark.slow
def test_sleep_gives_memory_back_and_the_answers_after_it_are_the_same(tmp_path):
    path = tiny_models.save("qwen3", tmp_path, hidden_size=512, intermediate_size=2048)
    wanted = fresh_answers(path, kv_cache_memory=2**25)
    with load(path, kv_cache_memory=2**25) as llm:
        answers(llm)
        for layer in range(2):
            for pages in llm.engine.executor.runner.cache.layer(layer):
                pages.fill_(float("nan"))
        awake = anonymous_bytes()
        llm.sleep()
        assert awake - anonymous_bytes() > 0.9 * 2**25
        assert llm.is_sleeping()
        with pytest.raises(NanoinferError, match=r"without its KV cache; call wake_up\(\) first"):
            llm.generate([1], PARAMS)
        llm.wake_up()
        assert not llm.is_sleeping()
        assert answers(llm) == wanted
        awake = anonymous_bytes()
        llm.sleep(level=2)
        packed = sum(tensor.nbytes for name, tensor in tensors_of(path).items() if "proj" in name)
        assert awake - anonymous_bytes() > 0.9 * packed
        with pytest.raises(NanoinferError, match=r"without its weights; call wake_up\(\) first"):
            llm.update_weights_from_path(str(path))
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        with pytest.raises(WeightsError, match="all are needed here"):
            llm.update_weights([("norm.weight", torch.ones(512))])
        llm.update_weights_from_path(str(path))
        llm.wake_up(["kv_cache"])
        assert answers(llm) == wanted


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux")
@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_sleep_gives_the_memory_of_a_drafter_back_too(method, tmp_path):
    path = tiny_models.add_mtp(tiny_models.save("qwen3_5", tmp_path / "model", hidden_size=256))
    draft = {} if method == "mtp" else {"model": str(tiny_models.save("qwen3", tmp_path / "draft", hidden_size=256))}
    with load(path, kv_cache_memory=2**25, speculative_config={"method": method, "adaptive": False} | draft) as llm:
        wanted = answers(llm)
        drafter = llm.engine.planner.proposer._executor.runner
        tensors = [*drafter.cache.tensors(), *([drafter._drafter.kept] if method == "mtp" else [])]
        for tensor in tensors:
            tensor.fill_(float("nan"))
        awake = anonymous_bytes()
        llm.sleep()
        assert awake - anonymous_bytes() > 0.9 * sum(tensor.nbytes for tensor in tensors) > 2**20
        llm.wake_up()
        assert answers(llm) == wanted


# ---- log-probabilities


def sampled(output):
    """Yield each answer's ids after its prompt, and the log-probabilities that it was sampled with."""
    for one in output.outputs:
        values = [entry[token_id].logprob for entry, token_id in zip(one.logprobs, one.token_ids, strict=True)]
        yield output.prompt_token_ids + one.token_ids, values


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("family", "mode", "temperature"),
    [("qwen3", "raw", 1.0), ("qwen3", "processed", 0.7), ("qwen3_5", "raw", 1.0), ("gemma3_window", "raw", 1.0)],
)
def test_log_probabilities_have_the_bits_of_the_sampled_ones(checkpoints, family, dtype, mode, temperature):
    rng = random.Random(0)
    prompts = [[rng.randrange(96) for _ in range(rng.randrange(1, 60))] for _ in range(8)]
    settings = {"chunk_size": 16, "max_num_batched_tokens": 48, "kv_cache_memory": 2**17, "max_model_len": 80}
    with load(checkpoints(family)[0], dtype=dtype, batch_invariant=True, logprobs_mode=mode, **settings) as llm:
        params = SamplingParams(temperature=temperature, n=2, max_tokens=20, logprobs=0, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.batch_independent
        assert family != "qwen3" or sum(one.metrics.num_preemptions for one in outputs) > 0
        texts, wanted = zip(*(pair for output in outputs for pair in sampled(output)), strict=True)
        assert max(map(len, texts)) > 70, "prompts are computed in chunks"
        found = llm.compute_logprobs(list(texts), temperature)
        assert [len(one) for one in found] == [len(text) - 1 for text in texts]
        assert [one[-len(its) :] for one, its in zip(found, wanted, strict=True)] == list(wanted)
        assert_nothing_is_left(llm)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3_window"])
def test_log_probabilities_are_those_of_transformers_and_use_no_prefix_cache(checkpoints, family):
    ids = [[index * index % 96 for index in range(num)] for num in (512, 2, 1)]  # up to the last position
    with load(checkpoints(family)[0], chunk_size=128) as llm:
        found = llm.compute_logprobs(ids)
        assert [len(one) for one in found] == [511, 1, 0]
        for num_cached in (0, 16):
            read = llm.compute_logprobs(PROMPTS)
            assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].num_cached_tokens == num_cached
            assert llm.compute_logprobs(PROMPTS) == read
        assert_nothing_is_left(llm)
    with torch.no_grad():
        logits = tiny_models.build(family, 1)(torch.tensor(ids[:1])).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(ids[0][1:]).unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(torch.tensor(found[0]), wanted, atol=2e-3)


@pytest.mark.slow
def test_too_many_tokens_are_refused_and_open_streams_advance_when_blocks_are_few(checkpoints, qwen3):
    with pytest.raises(InvalidValueError, match=r"prompt 1: .* maximum context length is 512 tokens.* has 513 tokens"):
        qwen3.compute_logprobs([[1], [1] * 513])
    with pytest.raises(InvalidValueError, match="temperature must be finite and > 0, got 0"):
        qwen3.compute_logprobs([1, 2], temperature=0)
    with load(checkpoints("qwen3")[0], kv_cache_memory=2**17) as small:
        wanted = small.generate([1] * 40, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        stream = small.stream([1] * 40, PARAMS)
        ids = list(next(stream).token_ids)
        assert len(small.compute_logprobs([1] * small.info.max_model_len)[0]) == small.info.max_model_len - 1
        assert ids + [token for delta in stream for token in delta.token_ids] == wanted
        assert_nothing_is_left(small)


def test_numbers_that_are_not_finite_are_an_error(qwen3):
    qwen3.update_weights([("model.norm.weight", torch.full((48,), torch.nan))])
    with pytest.raises(NanoinferError, match=r"not read to its end: .*not finite"):
        qwen3.compute_logprobs(PROMPTS)


# ---- which ids could be drawn

DRAWN_FROM = [
    {"top_k": 5},
    {"top_p": 0.7, "temperature": 1.3},
    {"min_p": 0.1},
    {"allowed_token_ids": list(range(30, 50)), "bad_words": [[31]], "no_repeat_ngram_size": 1},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "top_k": 9, "top_p": 0.9},
    {},
]


def test_the_mask_is_what_the_processed_log_probabilities_leave(qwen3_path):
    more = {"logprobs": -1, "return_sampling_mask": True}
    masked, plain = (
        [SamplingParams(max_tokens=6, seed=1, detokenize=False, **given, **one) for one in DRAWN_FROM] for given in (more, {})
    )
    with load(qwen3_path, logprobs_mode="processed") as llm:
        outputs = llm.generate(PROMPTS[:1] * 12, masked + plain, use_tqdm=False)
    answers, unmasked = ([output.outputs[0] for output in outputs[i : i + 6]] for i in (0, 6))
    assert [one.token_ids for one in answers] == [one.token_ids for one in unmasked]
    assert [one.sampling_mask for one in unmasked] == [None] * 6
    for answer in answers:
        wanted = [sorted(i for i, entry in at.items() if entry.logprob > float("-inf")) for at in answer.logprobs]
        assert answer.sampling_mask == wanted
    assert [len(answer.sampling_mask[0]) == 96 for answer in answers] == [False] * 5 + [True]


def test_streams_and_drafts_carry_the_masks(qwen3_path):
    params = SamplingParams(max_tokens=12, seed=1, top_k=3, detokenize=False, return_sampling_mask=True)
    with load(qwen3_path, speculative_config={"method": "ngram"}) as llm, load(qwen3_path) as plain:
        wanted = plain.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].sampling_mask
        deltas = list(llm.stream(PROMPTS[0], params))
        assert deltas[-1].output.outputs[0].sampling_mask == wanted
        assert [mask for delta in deltas for mask in delta.sampling_mask] == wanted
        assert [len(mask) for mask in wanted] == [3] * 12
