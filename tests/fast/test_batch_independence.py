"""LLM.batch_independent says what is so, at GPT-2's width as well. What cannot be kept is refused where it is required."""

import random

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.base import BACKENDS
from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.batch_independence import one_layer_of_each_kind
from nanoinfer.fast.cpu import threads
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.qwen_moe import MixtureOfExperts
from tests.helpers import tiny_models

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module", params=tiny_models.WIDE)
def wide(request, tmp_path_factory):
    return tiny_models.save(request.param, tmp_path_factory.mktemp(request.param), **tiny_models.WIDE[request.param])


def logprobs_of(llm, prompts, max_tokens=6):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, detokenize=False)
    return [
        [{token_id: entry.logprob for token_id, entry in position.items()} for position in output.outputs[0].logprobs]
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_at_the_width_of_real_models_a_prompt_gets_the_same_log_probabilities_alone_and_beside_others(wide, dtype):
    llm = LLM(wide, dtype=dtype, kv_cache_memory=2**26, enable_prefix_caching=False)
    rng = random.Random(0)
    prompts = [[rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(rng.randrange(1, 131))] for _ in range(8)]
    together = logprobs_of(llm, prompts)
    different = [i for i in range(3) if logprobs_of(llm, [prompts[i]]) != [together[i]]]
    assert llm.batch_independent
    assert different == []


def spoil(monkeypatch, owner, name, when):
    """Make a method's result larger by a thousandth when when(its first argument) is true."""
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, first, *others: plain(self, first, *others) * (1.001 if when(first) else 1.0))


class OwnBackend(CPUBackend):
    def decode(self, q, *others):
        return super().decode(q, *others)


@pytest.mark.parametrize(
    ("owner", "name", "settings"),
    [(QwenForCausalLM, "forward", {}), (KernelBackend, "prefill", {}), (OwnBackend, "decode", {"attention_backend": "own"})],
)
def test_a_model_or_an_attention_whose_rows_depend_on_the_batch_is_found_out(qwen3_path, monkeypatch, owner, name, settings):
    monkeypatch.setitem(BACKENDS, "own", OwnBackend)
    spoil(monkeypatch, owner, name, lambda rows: len(rows) > (1 if name == "decode" else 40))
    assert not LLM(qwen3_path, kv_cache_memory=2**24, **settings).batch_independent
    if name != "prefill":  # with batch_invariant all tokens attend as decodes do
        with pytest.raises(UnsupportedError, match="this machine's do, for this model in float32 on cpu; leave it out"):
            LLM(qwen3_path, kv_cache_memory=2**24, batch_invariant=True, **settings)


def test_so_is_a_kind_of_layer_that_is_not_the_first(tmp_path, monkeypatch):
    """The first layer has one MLP, the second has experts."""
    path = tiny_models.save("qwen2_moe", tmp_path)
    assert LLM(path, kv_cache_memory=2**24).batch_independent
    spoil(monkeypatch, MixtureOfExperts, "forward", lambda x: len(x) > 40)
    assert not LLM(path, kv_cache_memory=2**24).batch_independent


@pytest.mark.parametrize(("family", "layers", "num"), [("gpt2", "h", 1), ("qwen2_moe", "layers", 2)])
def test_one_layer_of_each_kind_is_tried(family, layers, num, tmp_path):
    model = load_model(Checkpoint.open(str(tiny_models.save(family, tmp_path))))
    few = one_layer_of_each_kind(model, model.config.num_hidden_layers)
    assert len(getattr(few, layers)) == num
    assert len(getattr(model, layers)) == model.config.num_hidden_layers


def test_without_kernels_nothing_is_promised(qwen3_path, monkeypatch):
    """torch's products depend on the number of rows on many machines, and few rows do not show it."""
    assert not LLM(qwen3_path, enforce_eager=True, kv_cache_memory=2**24).batch_independent
    with pytest.raises(UnsupportedError, match="enforce_eager=True uses torch's products, whose bits do"):
        LLM(qwen3_path, enforce_eager=True, kv_cache_memory=2**24, batch_invariant=True)


def test_a_sum_that_depends_on_the_number_of_threads_is_found(qwen3_path, monkeypatch):
    """It differs with 2 threads only, with which the model is tried if torch has 3."""
    before, promised = torch.get_num_threads(), []
    spoil(monkeypatch, KernelBackend, "prefill", lambda q: threads.num_threads() == 2)
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            promised.append(LLM(qwen3_path, kv_cache_memory=2**24).batch_independent)
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert promised == [True, False]
