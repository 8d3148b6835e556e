"""LLM.batch_independent says what is so, at GPT-2's width as well. What cannot be kept is refused where it is required."""

import random

import pytest
import tiny_models
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.base import BACKENDS
from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.devices.machine_checks import verdicts
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution import batch_independence
from nanoinfer.models.cpu_dense import DenseLinear
from nanoinfer.models.cpu_linear import PackedLinear, PlainLinear
from nanoinfer.models.optimize import optimize_for_cpu
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.qwen_moe import MixtureOfExperts


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "cache"))


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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_the_width_of_real_models_a_prompt_gets_the_same_log_probabilities_alone_and_beside_others(wide, dtype):
    llm = LLM(wide, dtype=dtype, kv_cache_memory=2**26, enable_prefix_caching=False)
    rng = random.Random(0)
    prompts = [[rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(rng.randrange(1, 131))] for _ in range(20)]
    together = logprobs_of(llm, prompts)
    different = [i for i in range(8) if logprobs_of(llm, [prompts[i]]) != [together[i]]]
    assert different == [] or not llm.batch_independent


def test_a_model_whose_rows_depend_on_the_batch_is_found_out(qwen3_path, monkeypatch):
    forward = QwenForCausalLM.forward

    def forward_of_many(self, input_ids, positions, attend):
        return forward(self, input_ids, positions, attend) + (len(input_ids) > 40) * 1e-3

    monkeypatch.setattr(QwenForCausalLM, "forward", forward_of_many)
    assert not LLM(qwen3_path, kv_cache_memory=2**24).batch_independent
    with pytest.raises(UnsupportedError, match="this machine's do, for this model in float32 on cpu; leave it out"):
        LLM(qwen3_path, kv_cache_memory=2**24, batch_invariant=True)


def test_so_is_a_kind_of_layer_that_is_not_the_first(tmp_path, monkeypatch):
    """The first layer has one MLP, the second has experts."""
    path = tiny_models.save("qwen2_moe", tmp_path)
    assert LLM(path, kv_cache_memory=2**24).batch_independent
    forward = MixtureOfExperts.forward
    monkeypatch.setattr(MixtureOfExperts, "forward", lambda self, x: forward(self, x) + (len(x) > 40) * 1e-3)
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "another"))  # where no verdict is kept yet
    assert not LLM(path, kv_cache_memory=2**24).batch_independent


def test_so_is_an_attention_backend(qwen3_path, monkeypatch):
    prefill = CPUBackend.prefill

    def prefill_of_many(self, q, *args):
        return prefill(self, q, *args) * (1.001 if len(q) > 40 else 1.0)

    monkeypatch.setattr(CPUBackend, "prefill", prefill_of_many)
    assert not LLM(qwen3_path, kv_cache_memory=2**24).batch_independent


class DependentDecode(CPUBackend):
    def decode(self, q, *args):
        return super().decode(q, *args) * (1.001 if len(q) > 1 else 1.0)


def test_so_is_a_decode_of_ones_own(qwen3_path, monkeypatch):
    monkeypatch.setitem(BACKENDS, "mine", DependentDecode)
    assert not LLM(qwen3_path, attention_backend="mine", kv_cache_memory=2**24).batch_independent


@pytest.mark.parametrize("family", ["gpt2", "qwen2_moe"])
def test_one_layer_of_each_kind_is_checked(family, tmp_path):
    path = tiny_models.save(family, tmp_path)
    model = LLM(path, kv_cache_memory=2**24).engine.executor.runner.model
    layers = model.h if family == "gpt2" else model.layers
    with batch_independence._one_layer_of_each_kind(model):
        kept = model.h if family == "gpt2" else model.layers
        blocks = [block for part in kept for block in getattr(part, "blocks", [part])]
        assert len(blocks) == (1 if family == "gpt2" else 2)
    assert (model.h if family == "gpt2" else model.layers) is layers


def without(monkeypatch, *classes):
    """Make classes of linear layers fail as on a machine that does not have them."""

    def missing(self, linear, activation=None, *, adds_residual=False):
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    for layer_class in classes:
        monkeypatch.setattr(layer_class, "__init__", missing)


def test_linear_layers_that_no_form_serves_run_packed_as_they_are_and_the_log_names_them(qwen3_path, monkeypatch, caplog):
    without(monkeypatch, DenseLinear)
    monkeypatch.setattr("nanoinfer.devices.row_forms.find_row_form", lambda *args: None)
    caplog.set_level("INFO", logger="nanoinfer")
    llm = LLM(qwen3_path, kv_cache_memory=2**24)
    assert not llm.batch_independent
    assert "the bits of a row depend on the batch on this machine, in linear layers 48 -> 96 float32" in caplog.text
    assert isinstance(llm.engine.executor.runner.model.lm_head, PackedLinear)
    assert llm.engine.executor.runner.model.lm_head.form.calls(10**6)
    with pytest.raises(UnsupportedError, match="batch_invariant=True"):
        LLM(qwen3_path, kv_cache_memory=2**24, batch_invariant=True)


@pytest.mark.parametrize("layer_class", [PackedLinear, PlainLinear])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_compiler_and_onednn_other_layers_give_the_same_answers_in_calls_that_agree(
    qwen3_path, dtype, layer_class, monkeypatch
):
    """As in builds without oneDNN (macOS on Arm), or for bfloat16 on a CPU that is too old."""
    rng = random.Random(0)
    prompts = [[rng.randrange(tiny_models.VOCAB_SIZE) for _ in range(length)] for length in (1, 9, 30, 31, 50)]
    expected = logprobs_of(LLM(qwen3_path, dtype=dtype, kv_cache_memory=2**24), prompts)
    without(monkeypatch, *{DenseLinear, PackedLinear} - {layer_class})
    llm = LLM(qwen3_path, dtype=dtype, kv_cache_memory=2**24)
    assert isinstance(llm.engine.executor.runner.model.lm_head, layer_class)
    together = logprobs_of(llm, prompts)
    if dtype == "float32":
        likeliest = [[max(position, key=position.get) for answer in one for position in answer] for one in (together, expected)]
        assert likeliest[0] == likeliest[1]
    different = [i for i in range(len(prompts)) if logprobs_of(llm, [prompts[i]]) != [together[i]]]
    assert different == [] or not llm.batch_independent


def test_it_holds_for_the_number_of_threads_at_loading(qwen3_path):
    llm = LLM(qwen3_path, kv_cache_memory=2**24)
    assert llm.batch_independent
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert not llm.batch_independent
    finally:
        torch.set_num_threads(before)
    assert llm.batch_independent


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_damaged_weight_leaves_no_verdict_for_others_of_its_sizes(value):
    layer = torch.nn.Linear(48, 100)
    torch.nn.init.constant_(layer.weight, value)
    assert not optimize_for_cpu(torch.nn.Sequential(layer)).are_rows_independent
    assert verdicts() == {}
    optimize_for_cpu(torch.nn.Sequential(torch.nn.Linear(48, 100)))
    assert len(verdicts()) == 1
