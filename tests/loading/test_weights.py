"""Every tensor is used once, every parameter is filled, what is not supported is refused by name, and loading needs little."""

import json
import logging
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoinfer import LLM, SamplingParams, register_model
from nanoinfer.cli.inspect import examine
from nanoinfer.config import EngineConfig
from nanoinfer.errors import CheckpointError, InvalidValueError, OutOfMemoryError, UnsupportedError, WeightsError
from nanoinfer.fast.cpu.accelerate import compile_model
from nanoinfer.features.training import stored
from nanoinfer.load import load as load_config
from nanoinfer.loading import devices, loader, weights
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.models import gpt2 as gpt2_module
from nanoinfer.models import registry
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.rope import RopeConfig, rope_frequencies
from tests.helpers import tiny_models

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def qwen3(qwen3_path, tmp_path):
    return shutil.copytree(qwen3_path, tmp_path / "qwen3")


@pytest.fixture
def gpt2(gpt2_path, tmp_path):
    return shutil.copytree(gpt2_path, tmp_path / "gpt2")


def edit_config(path, remove=(), **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in remove}))


def edit_tensors(path, remove=(), **changes):
    tensors = load_file(path / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if name not in remove}, path / "model.safetensors")


def load(path, dtype="auto"):
    return loader.load_model(Checkpoint.open(str(path)), dtype)


# ---- every tensor, every parameter


def test_one_error_lists_every_tensor_that_is_missing_unexpected_or_misshaped(qwen3):
    norms = [f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]
    edit_tensors(
        qwen3,
        remove=norms,
        **{
            "model.layers.7.mlp.up_proj.weight": torch.zeros(2),
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
            "model.layers.0.self_attn.q_proj.weight": torch.zeros(48, 64),
            "model.norm.weight": torch.zeros(47),
        },
    )
    with pytest.raises(WeightsError) as caught:
        load(qwen3)
    assert sorted(str(caught.value).rpartition("config.json: ")[2].split("; ")) == [
        "misshaped: model.layers.0.self_attn.q_proj.weight has shape [48, 64], the config requires [64, 48]",
        "misshaped: model.norm.weight has shape [47], the config requires [48]",
        "missing: layers.0.input_layernorm.weight",
        "missing: layers.1.input_layernorm.weight",
        "unexpected: model.layers.0.self_attn.q_proj.bias",
        "unexpected: model.layers.7.mlp.up_proj.weight",
    ]


def test_a_misshaped_transposed_tensor_is_reported_in_the_files_own_order(gpt2):
    edit_tensors(gpt2, **{"transformer.h.0.mlp.c_fc.weight": torch.zeros(192, 48)})
    with pytest.raises(WeightsError, match=r"c_fc.weight has shape \[192, 48\], the config requires \[48, 192\]"):
        load(gpt2)


def test_a_tensor_with_and_without_the_prefix_is_refused(gpt2):
    edit_tensors(gpt2, **{"ln_f.weight": torch.zeros(48)})
    with pytest.raises(WeightsError, match=r"twice: (transformer.ln_f.weight and ln_f|ln_f.weight and transformer.ln_f)"):
        load(gpt2)


def test_tensors_that_are_no_weights_are_skipped_by_name(qwen3, gpt2):
    edit_tensors(qwen3, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    edit_tensors(gpt2, **{"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)})
    load(qwen3)
    load(gpt2)
    edit_tensors(gpt2, **{"transformer.h.0.attn.other_bias": torch.zeros(1)})
    with pytest.raises(WeightsError, match=r"unexpected: transformer\.h\.0\.attn\.other_bias$"):
        load(gpt2)


def test_a_file_cut_short_anywhere_is_refused(qwen3):
    whole = (qwen3 / "model.safetensors").read_bytes()
    for length in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        (qwen3 / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"model.safetensors is truncated or corrupted .*; download it again"):
            load(qwen3)


@pytest.mark.parametrize("garbage", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b"\x80\x02}q\x00." * 99])
def test_a_file_that_is_no_safetensors_is_refused(qwen3, garbage):
    (qwen3 / "model.safetensors").write_bytes(garbage)
    with pytest.raises(WeightsError, match=r"model.safetensors is truncated or corrupted"):
        load(qwen3)


def test_a_tensor_in_two_shards_is_refused(qwen3):
    tensors = load_file(qwen3 / "model.safetensors")
    (qwen3 / "model.safetensors").unlink()
    save_file(tensors, qwen3 / "a.safetensors")
    save_file({HEAD: tensors[HEAD]}, qwen3 / "b.safetensors")
    with pytest.raises(
        WeightsError, match=r"lm_head\.weight is in b\.safetensors and in a\.safetensors of .*; remove the file"
    ):
        load(qwen3)


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_two_copies_of_a_tensor_that_of_the_shard_in_the_index_counts(qwen3, first):
    """The other copy may even have another shape, as after a resize of the vocabulary."""
    tensors = load_file(qwen3 / "model.safetensors")
    (qwen3 / "model.safetensors").unlink()
    stale = {HEAD: torch.zeros(3, 5), "model.norm.weight": torch.zeros_like(tensors["model.norm.weight"])}
    second = "ab".replace(first, "")
    save_file({name: tensor for name, tensor in tensors.items() if name != EMBEDDING} | stale, qwen3 / f"{first}.safetensors")
    save_file({name: tensors[name] for name in (EMBEDDING, *stale)}, qwen3 / f"{second}.safetensors")
    index = dict.fromkeys(tensors, f"{first}.safetensors") | dict.fromkeys((EMBEDDING, *stale), f"{second}.safetensors")
    (qwen3 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    model = load(qwen3, "float32")
    assert torch.equal(model.lm_head.weight, tensors[HEAD])
    assert torch.equal(dict(model.named_parameters())["norm.weight"], tensors["model.norm.weight"])


def test_a_tensor_in_two_shards_that_the_index_does_not_know_is_refused(qwen3):
    tensors = load_file(qwen3 / "model.safetensors")
    (qwen3 / "model.safetensors").unlink()
    save_file(tensors, qwen3 / "a.safetensors")
    save_file({HEAD: tensors[HEAD]}, qwen3 / "b.safetensors")
    index = dict.fromkeys(tensors, "a.safetensors") | {HEAD: "c.safetensors", "other": "b.safetensors"}
    save_file({"other": tensors[HEAD]}, qwen3 / "c.safetensors")
    (qwen3 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(WeightsError, match=r"lm_head\.weight is in .* and no index gives it to either"):
        load(qwen3)


def test_integer_weights_are_refused_as_quantised(qwen3):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(qwen3, **{name: torch.zeros(80, 48, dtype=torch.int8)})
    with pytest.raises(WeightsError, match=f"not a float: {name} is I8, and config.json names no quantisation"):
        load(qwen3)


def test_weights_beyond_the_machines_memory_are_refused_before_they_are_read(qwen3, monkeypatch):
    model = load(qwen3)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(devices, "available_cpu_memory", lambda: num_bytes - 1)
    monkeypatch.setattr(weights.WeightFiles, "read", None)
    sentence = r"the weights take 0\.0 GB in float32, and 0\.0 GB of memory are available; use quantization='int4' or a smaller"
    with pytest.raises(OutOfMemoryError, match=sentence):
        load(qwen3)


def test_the_memory_that_is_compared_counts_rounded_weights_and_a_tied_head_once(tmp_path, monkeypatch):
    path = tiny_models.save("qwen3_tied", tmp_path, hidden_size=64, intermediate_size=96)
    model = load(path)
    linears = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    rest = 2 * (sum(weight.numel() for weight in model.parameters()) - sum(linears)) + 2 * model.embed_tokens.weight.numel()
    for quantization, bytes_per_weight in (("int8", 1 + 5 / 64), ("int4", 1 / 2 + 5 / 64)):
        in_bits = sum(linears) * bytes_per_weight + rest
        config = EngineConfig(model=str(path), quantization=quantization, device="cpu")
        for available, fits in ((1.2 * in_bits, True), (0.9 * in_bits, False)):
            monkeypatch.setattr(devices, "available_cpu_memory", lambda available=available: available)
            with nullcontext() if fits else pytest.raises(OutOfMemoryError):
                load_config(config)


@pytest.mark.slow
@pytest.mark.parametrize("eos", [96, -1, 10**30])
def test_an_eos_id_outside_the_vocabulary_ends_no_text_and_is_logged(qwen3, caplog, eos):
    """transformers writes GPT-2's 50256 into the config of a smaller GPT-2, so this is no error."""
    (qwen3 / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, eos]}))
    llm = LLM(qwen3, kv_cache_memory=2**24)
    assert f"eos_token_id [{eos}] is outside the vocabulary" in caplog.text
    [output] = llm.generate([1, 2, 3], SamplingParams(min_tokens=3, max_tokens=4, detokenize=False), use_tqdm=False)
    assert len(output.outputs[0].token_ids) >= 3


# ---- the LM head


def test_a_tied_head_needs_no_tensor_and_shares_the_embeddings_memory(tmp_path):
    path = tiny_models.save("qwen3_tied", tmp_path)
    assert HEAD not in load_file(path / "model.safetensors")
    model = load(path)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_a_tied_head_that_is_stored_too_is_used_once(tmp_path, caplog):
    path = tiny_models.save("qwen3_tied", tmp_path)
    edit_tensors(path, **{HEAD: load_file(path / "model.safetensors")[EMBEDDING].clone()})
    model = load(path)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "not tied" not in caplog.text


def test_a_head_that_differs_from_the_embedding_is_used_whatever_the_config_says(tmp_path, caplog):
    path = tiny_models.save("qwen3_tied", tmp_path)
    head = load_file(path / "model.safetensors")[EMBEDDING] * 2
    edit_tensors(path, **{HEAD: head})
    model = load(path)
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.embed_tokens.weight, head / 2)
    [record] = [record for record in caplog.records if record.name == "nanoinfer.loading.weights"]
    assert record.levelno == logging.WARNING
    assert "a different head: not tied" in record.message


def test_an_untied_head_that_is_missing_is_an_error(qwen3):
    edit_tensors(qwen3, remove=[HEAD])
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
        load(qwen3)


# ---- dtype


@pytest.mark.parametrize(
    ("config", "tensors", "loaded"),
    [
        ({"dtype": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"torch_dtype": "bfloat16"}, torch.float32, torch.bfloat16),
        ({"dtype": "float32"}, torch.bfloat16, torch.float32),
        ({}, torch.bfloat16, torch.bfloat16),
        ({}, torch.float32, torch.float32),
    ],
)
def test_dtype_auto_is_the_configs_or_else_the_tensors(qwen3, monkeypatch, config, tensors, loaded):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)  # else a CPU slow at it takes float32
    edit_config(qwen3, remove=["dtype"])
    edit_config(qwen3, **config)
    edit_tensors(qwen3, **{name: t.to(tensors) for name, t in load_file(qwen3 / "model.safetensors").items()})
    assert {parameter.dtype for parameter in load(qwen3).parameters()} == {loaded}


def test_dtype_auto_is_float32_on_a_cpu_that_is_slow_at_the_checkpoints_own_and_says_so(qwen3, monkeypatch, caplog):
    for has in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, has, lambda: False)
    edit_config(qwen3, dtype="bfloat16")
    with caplog.at_level(logging.INFO, "nanoinfer.loading"):
        assert load(qwen3).lm_head.weight.dtype == torch.float32
    assert "the checkpoint is torch.bfloat16, which this CPU is slow at: using float32" in caplog.text
    assert load(qwen3, "bfloat16").lm_head.weight.dtype == torch.bfloat16  # requested: obeyed


# ---- what is not supported is refused by name, with what is


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "FalconForCausalLM'. are not supported; GPT2LMHeadModel, Gemma3.*, Llama.*, Qwen2.*, Qwen3.* are",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}},
            "also read images .*; use the text model alone",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            r"checkpoints quantised with 'bitsandbytes' are not supported",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types must name full_attention or sliding_attention"),
        ({"layer_types": ["sliding_attention"], "use_sliding_window": True}, "for each of 2 layers"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type must be one of .*yarn, llama3, got 'longrope'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope_type must be one of .*, got 'su'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
    ],
)
def test_a_qwen_that_is_not_supported_is_refused_by_name(qwen3, changes, sentence):
    edit_config(qwen3, **changes)
    with pytest.raises(UnsupportedError, match=sentence):
        load(qwen3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"activation_function": "gelu"}, "activation_function must be gelu_new, got 'gelu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False, got True"),
        ({"scale_attn_weights": False}, "scale_attn_weights must be True, got False"),
    ],
)
def test_a_gpt2_that_is_not_supported_is_refused_by_name(gpt2, changes, sentence):
    edit_config(gpt2, **changes)
    with pytest.raises(UnsupportedError, match=sentence):
        load(gpt2)


@pytest.mark.parametrize("architectures", [None, []])
def test_a_config_without_architectures_is_refused_with_what_to_add(qwen3, architectures):
    edit_config(qwen3, architectures=architectures)
    with pytest.raises(CheckpointError, match=r'names no architecture; add "architectures": .*Qwen3ForCausalLM'):
        load(qwen3)


def test_a_config_that_lacks_a_key_is_refused_with_the_key(gpt2):
    edit_config(gpt2, remove=["n_head"])
    with pytest.raises(CheckpointError, match=r"config.json has no 'n_head'"):
        load(gpt2)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 64, "use_sliding_window": False, "layer_types": ["full_attention"] * 2},
        {"sliding_window": 64, "use_sliding_window": False, "layer_types": None},
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2, "layer_types": None},  # no layer above it
    ],
)
def test_a_sliding_window_that_is_off_is_accepted(qwen3, changes):
    edit_config(qwen3, **changes)
    load(qwen3)


class LouderQwen(QwenForCausalLM):
    def compute_logits(self, hidden):
        return -super().compute_logits(hidden)


def test_a_registered_model_runs_and_takes_precedence_over_a_bundled_one(qwen3, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)

    def token_ids():
        [output] = LLM(qwen3, kv_cache_memory=2**24).generate([1, 2, 3], params, use_tqdm=False)
        return output.outputs[0].token_ids

    ours = token_ids()
    register_model("Qwen3ForCausalLM", LouderQwen)
    theirs = token_ids()
    assert theirs != ours
    register_model("LouderForCausalLM", LouderQwen)
    edit_config(qwen3, architectures=["LouderForCausalLM"])
    assert token_ids() == theirs
    edit_config(qwen3, architectures=["OtherForCausalLM"])
    with pytest.raises(UnsupportedError, match="LouderForCausalLM are"):
        load(qwen3)


# ---- YaRN


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"attention_factor": 1.5},
        {"mscale": 0.8, "mscale_all_dim": 0.4},
        {"mscale": 0.8},  # without its pair it says nothing
        {"truncate": False},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"factor": 40.0},
    ],
    ids=str,
)
def test_yarn_equals_transformers_in_every_variant(variant):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096} | variant
    config = transformers.Qwen3Config(rope_parameters=rope, head_dim=128, max_position_embeddings=16384)
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    ours = RopeConfig.from_hf({"max_position_embeddings": 16384, "rope_parameters": rope})
    torch.testing.assert_close(rope_frequencies(128, ours), frequencies, atol=0, rtol=1e-6)
    assert ours.attention_factor == pytest.approx(attention_factor)


def test_yarn_variants_differ_from_each_other():
    """The negative control of the test above: were a key not read, its variant would equal the plain one."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096}

    def settings(**variant):
        rope = RopeConfig.from_hf({"max_position_embeddings": 16384, "rope_parameters": yarn | variant})
        return rope.attention_factor, *rope_frequencies(128, rope).tolist()

    variants = [{}, {"attention_factor": 1.5}, {"mscale": 0.8, "mscale_all_dim": 0.4}, {"truncate": False}, {"beta_slow": 2.0}]
    variants += [{"rope_type": "default"}, {"beta_fast": 16.0}, {"factor": 40.0}]
    assert len({settings(**variant) for variant in variants}) == len(variants)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=str,
)
def test_other_scalings_equal_transformers(rope):
    rope = {"rope_theta": 500_000.0} | rope
    config = transformers.LlamaConfig(rope_parameters=dict(rope), head_dim=128, max_position_embeddings=131072)
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device="cpu")
    ours = RopeConfig.from_hf({"max_position_embeddings": 131072, "rope_parameters": rope})
    torch.testing.assert_close(rope_frequencies(128, ours), frequencies, atol=0, rtol=1e-6)
    assert ours.max_position_embeddings == 0  # config.json's stays
    if rope["rope_type"] != "dynamic":
        assert (rope_frequencies(128, RopeConfig(theta=500_000.0)) / frequencies).max() > 1.9  # the comparison means something


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"low_freq_factor": None}, "holds a value of the wrong type"),
        ({"high_freq_factor": 1.0}, "high_freq_factor must be in 1.001 .. 1e.06, got 1.0"),
        ({"factor": 0.0}, "factor must be in 1 .."),
        (None, "has no 'factor', which this architecture needs"),
    ],
    ids=str,
)
def test_a_llama3_scaling_with_a_nonsense_value_is_refused(tmp_path, changes, sentence):
    path = tiny_models.save("llama", tmp_path)
    rope = {"rope_type": "llama3"} if changes is None else {"rope_type": "llama3", **LLAMA3, **changes}
    edit_config(path, rope_parameters=rope)
    with pytest.raises(CheckpointError, match=sentence):
        load(path)


@pytest.mark.parametrize("window", [0, -4, "40", 2.5, None])
def test_a_window_that_is_no_number_of_tokens_is_refused(qwen3, window):
    kinds = ["full_attention", "sliding_attention"]
    edit_config(qwen3, layer_types=kinds, use_sliding_window=True, sliding_window=window)
    with pytest.raises(CheckpointError, match="sliding_window must be a number >= 1, because some layers slide, got"):
        load(qwen3)


def test_layers_that_slide_without_use_sliding_window_are_refused(qwen3):
    """transformers fails at such a file's first step."""
    edit_config(qwen3, layer_types=["full_attention", "sliding_attention"], sliding_window=64)
    with pytest.raises(CheckpointError, match="use_sliding_window must be true, because some layers slide, got False"):
        load(qwen3)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (None, 64)),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, (64, None)),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}, ()),  # of 512 positions
    ],
)
def test_windows_are_read_for_each_layer(qwen3, changes, windows):
    edit_config(qwen3, **{"use_sliding_window": True} | changes)
    assert getattr(load(qwen3).config, "layer_windows", ()) == windows


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_experts": 10**6}, "num_experts in .* makes 1000000 experts in all layers, but the weights are .. tensors"),
        ({"num_experts": 7}, "unexpected: model.layers.1.mlp.experts.7"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok must be <= 8 \(num_experts\), got 9"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step in .* must be a number >= 1"),
        ({"moe_intermediate_size": 2**31 - 1}, "moe_intermediate_size in .* is 2147483647, but the weights have only"),
        ({"shared_expert_intermediate_size": -5}, "shared_expert_intermediate_size in .* must be a number >= 1"),
        ({"mlp_only_layers": 5}, "wrong type"),
        ({"layer_types": None, "use_sliding_window": True, "sliding_window": 64}, "sliding-window attention"),
    ],
    ids=str,
)
def test_experts_that_the_weights_contradict_are_refused(tmp_path, changes, sentence):
    path = tiny_models.save("qwen2_moe", tmp_path)
    edit_config(path, **changes)
    with pytest.raises(InvalidValueError, match=sentence):
        load(path)


def test_yarn_stretches_the_length_of_a_checkpoint_that_left_its_old_one_in_place(tmp_path):
    """As Qwen's model cards tell their users to configure it: rope_scaling is added, max_position_embeddings is unchanged."""
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    path = tiny_models.save("qwen3", tmp_path, max_position_embeddings=128, rope_parameters=yarn)
    assert loader.load_model(Checkpoint.open(str(path))).config.max_position_embeddings == 512


def test_a_dtype_that_is_none_is_refused_and_a_float64_checkpoint_becomes_float32(tmp_path):
    path = tiny_models.save("gpt2", tmp_path)
    with pytest.raises(InvalidValueError, match=r"dtype must be one of .*, got 'bf17'"):
        loader.load_model(Checkpoint.open(str(path)), "bf17")
    config = json.loads((path / "config.json").read_text()) | {"dtype": "float64"}
    (path / "config.json").write_text(json.dumps(config))
    assert next(loader.load_model(Checkpoint.open(str(path))).parameters()).dtype == torch.float32


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_matrices_of_the_models_dtype_stay_in_the_file_until_they_are_packed(qwen3, gpt2):
    def is_in_file(path, weight):
        maps = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
        ranges = [[int(end, 16) for end in addresses.split("-")] for addresses in maps]
        return any(low <= weight.data_ptr() < high for low, high in ranges)

    model = load(qwen3)
    assert is_in_file(qwen3, model.layers[0].mlp.up_proj.weight)
    assert is_in_file(qwen3, model.embed_tokens.weight)
    assert not is_in_file(qwen3, model.norm.weight)
    assert not is_in_file(qwen3, load(qwen3, "bfloat16").lm_head.weight)  # converted
    assert not is_in_file(gpt2, load(gpt2).h[0].mlp.c_fc.weight)  # transposed
    model = compile_model(model).model
    assert is_in_file(qwen3, model.embed_tokens.weight)


@pytest.mark.parametrize("family", ["qwen3", "gpt2_untied"])
def test_matrices_stay_in_the_checkpoint_until_kernels_lay_them_out_or_they_are_filled(family, tmp_path):
    checkpoint = Checkpoint.open(str(tiny_models.save(family, tmp_path)))
    loaded, held = load_config(EngineConfig(model=str(checkpoint.path), device="cpu"))
    model = loaded.model
    plain = dict(loader.load_model(checkpoint).named_parameters())
    unread = {name: weight for name, weight in model.named_parameters() if isinstance(weight, stored.StoredParameter)}
    assert unread.keys() == {f"{path}.weight" for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert all(weight.isnan().all() and weight.untyped_storage().nbytes() <= 4 for weight in unread.values())
    for name, weight in unread.items():
        assert torch.equal(torch.cat(list(stored.pieces_of(weight))), plain[name])
    stored.load(model, torch.device("cpu"))
    assert {name: weight.shape for name, weight in model.named_parameters()} == {name: x.shape for name, x in plain.items()}
    assert all(torch.equal(weight, plain[name]) for name, weight in model.named_parameters())
    assert all(getattr(*place) is not None for places in held.places.values() for place in places)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_head_is_kept_once_and_both_change_with_it(dtype, tmp_path):
    path = tiny_models.save("qwen3_tied", tmp_path, vocab_size=1000)  # the largest matrix
    llm, params = LLM(path, dtype=dtype), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    model, held = llm.engine.executor.runner.model, llm.engine.executor.runner.weights
    if isinstance(model.embed_tokens, torch.nn.Embedding):
        pytest.skip("no C++ compiler")
    plain = loader.load_model(Checkpoint.open(str(path)), dtype)
    table, ids = plain.embed_tokens.weight, torch.arange(0, plain.config.vocab_size, 3)
    assert torch.equal(model.embed_tokens(ids), table[ids])
    assert sum(tensor.numel() >= table.numel() for tensor in held.tensors()) == 1
    before = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    llm.update_weights([("model.embed_tokens.weight", table.flip(0))])
    assert torch.equal(model.embed_tokens(ids), table.flip(0)[ids])
    assert llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids != before


# ---- the memory bar

_WATCH = """
import sys, threading
import IMPORTS

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) * 1024

before = anonymous_bytes()
peak, ended = before, threading.Event()

def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
"""

_MEASURE = (
    _WATCH.replace("IMPORTS", "torch")
    + """
from nanoinfer.loading import loader
from nanoinfer.models import registry
from nanoinfer.loading.checkpoint import Checkpoint
model = loader.load_model(Checkpoint.open(sys.argv[1]))
ended.set()
watcher.join()
size = sum(parameter.nbytes for parameter in model.parameters())
print(max(peak, anonymous_bytes()) - before, size)
"""
)


# What an LLM holds once it has answered, above a process that imported it, and the peak up to then.
_MEASURE_RUN = (
    _WATCH.replace("IMPORTS", "nanoinfer.llm, nanoinfer.attention.cpu, nanoinfer.fast.cpu.accelerate, nanoinfer.models.gpt2")
    + """
from nanoinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_cache_memory=2**25)
params = SamplingParams(temperature=0, max_tokens=10, detokenize=False)
llm.generate([[1, 2, 3]] * 4, params, use_tqdm=False)
held = anonymous_bytes()
ended.set()
watcher.join()
print(held - before, peak - before, 2**25)
"""
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_bar_of_a_320_mb_model_loading_takes_1_25_times_the_file_and_running_1_35_times_and_the_cache(
    gpt2_path, tmp_path
):
    """The bars of the design, in anonymous memory. Loading: above a process that only imported torch, at its peak, sampled
    every 2 ms. Running: what is held afterwards.
    """
    shutil.copy(gpt2_path / "config.json", tmp_path)
    edit_config(tmp_path, n_embd=1024, n_layer=5, n_head=16, vocab_size=16000)
    config = gpt2_module.GPT2Config.from_hf(json.loads((tmp_path / "config.json").read_text()))
    with torch.device("meta"):
        model = gpt2_module.GPT2LMHeadModel(config)
    file = tmp_path / "model.safetensors"
    transposed = model.weight_rules.transpose
    tensors = {
        name: torch.rand(parameter.shape[::-1] if name.endswith(transposed) else parameter.shape)
        for name, parameter in model.named_parameters()
    }
    save_file(tensors, file)
    del tensors
    try:
        file_size = file.stat().st_size
        assert file_size > 300e6
        stated = examine(str(tmp_path)).num_peak_bytes
        child, ran = (
            subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
            for code in (_MEASURE, _MEASURE_RUN)
        )
    finally:
        file.unlink()
    assert child.returncode == 0, child.stderr
    assert ran.returncode == 0, ran.stderr
    taken, size = map(int, child.stdout.split())
    assert size > 0.99 * file_size  # all of it was loaded
    assert taken > 0.75 * file_size  # and the measure sees it, less the embedding, a fifth, which stays in the file
    assert taken <= 1.25 * file_size
    taken, peak, cache = map(int, ran.stdout.split())
    assert 0.9 * stated <= peak <= 1.1 * stated + cache  # as `nanoinfer inspect` says
    assert taken > 0.9 * file_size  # packed, the head has its own copy
    assert taken <= 1.35 * file_size + cache


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"architectures": "Qwen3ForCausalLM"}, CheckpointError, "names no architecture"),
        ({"dtype": 5}, UnsupportedError, "the checkpoint's dtype is 5; .* Pass dtype="),
        ({"dtype": "float8_e4m3fn"}, UnsupportedError, "the checkpoint's dtype is 'float8_e4m3fn'"),
        ({"num_hidden_layers": None}, CheckpointError, "number >= 1 .*, got None|holds a value of the wrong type"),
        ({"num_attention_heads": 0}, CheckpointError, "num_attention_heads in .* must be a number >= 1 and below 2..31, got 0"),
        ({"hidden_size": "48"}, CheckpointError, "number >= 1 .*, got '48'|holds a value of the wrong type"),
        ({"num_key_value_heads": 3}, CheckpointError, "must be a multiple of num_key_value_heads, got 4 and 3"),
        ({"rope_parameters": {"rope_theta": None}}, CheckpointError, "holds a value of the wrong type"),
        ({"rope_parameters": {"rope_theta": -5}}, CheckpointError, "rope_parameters: theta must be in 1 .. 1e.30, got -5.0"),
        ({"rope_parameters": "x"}, CheckpointError, "holds a value of the wrong type"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 0.5}},
            CheckpointError,
            "rope_parameters: factor must be in 1 .. 1e.06, got 0.5",
        ),
        ({"architectures": [None]}, UnsupportedError, "architectures .None. are not supported"),
        ({"quantization_config": "awq"}, UnsupportedError, "checkpoints quantised with 'awq' are not supported"),
    ],
)
def test_a_config_with_a_nonsense_value_is_refused_by_name(tmp_path, changes, error, sentence):
    path = tiny_models.save("qwen3", tmp_path)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=sentence):
        loader.load_model(Checkpoint.open(str(path)))


def test_gpt2_heads_that_do_not_divide_the_width_are_refused(tmp_path):
    path = tiny_models.save("gpt2", tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"n_head": 5}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="n_embd must be a multiple of n_head, got 48 and 5"):
        loader.load_model(Checkpoint.open(str(path)))


def test_a_quantization_config_of_null_is_none(tmp_path):
    path = tiny_models.save("gpt2", tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": None, "dtype": "torch.float32"}
    (path / "config.json").write_text(json.dumps(config))
    assert loader.load_model(Checkpoint.open(str(path))).config.num_hidden_layers == 2
