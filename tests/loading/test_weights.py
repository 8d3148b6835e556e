"""Every tensor is used once, every parameter is filled, what is not supported is refused by name, and loading needs little."""

import json
import logging
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, SamplingParams, register_model
from nanoinfer.config import EngineConfig
from nanoinfer.errors import CheckpointError, InvalidValueError, OutOfMemoryError, UnsupportedError, WeightsError
from nanoinfer.fast.cpu.accelerate import compile_model
from nanoinfer.features.training import stored
from nanoinfer.load import load as load_config
from nanoinfer.loading import devices, loader, weights
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.models import registry
from nanoinfer.models.qwen import QwenForCausalLM
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


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        # in the file's own order, though the layer has it transposed
        ({"transformer.h.0.mlp.c_fc.weight": (192, 48)}, r"c_fc.weight has shape \[192, 48\], the config requires \[48, 192\]"),
        # with and without the prefix
        ({"ln_f.weight": (48,)}, r"twice: (transformer.ln_f.weight and ln_f|ln_f.weight and transformer.ln_f)"),
        ({"transformer.h.0.attn.other_bias": (1,)}, r"unexpected: transformer\.h\.0\.attn\.other_bias$"),
    ],
    ids=["misshaped", "twice", "unexpected"],
)
def test_a_tensor_of_gpt2_that_does_not_fit_is_refused_by_name(gpt2, tensors, message):
    edit_tensors(gpt2, **{name: torch.zeros(shape) for name, shape in tensors.items()})
    with pytest.raises(WeightsError, match=message):
        load(gpt2)


def test_tensors_that_are_no_weights_are_skipped_by_name(qwen3, gpt2):
    edit_tensors(qwen3, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    edit_tensors(gpt2, **{"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)})
    edit_config(gpt2, quantization_config=None, dtype="torch.float32")  # as some files have them
    load(qwen3)
    load(gpt2)


def test_a_tensor_in_two_shards_is_refused_unless_the_index_gives_it_to_one(qwen3):
    tensors = load_file(qwen3 / "model.safetensors")
    (qwen3 / "model.safetensors").unlink()
    save_file(tensors, qwen3 / "a.safetensors")
    save_file({HEAD: tensors[HEAD]}, qwen3 / "b.safetensors")
    sentence = r"lm_head\.weight is in b\.safetensors and in a\.safetensors of .*; remove the file"
    with pytest.raises(WeightsError, match=sentence):
        load(qwen3)
    index = dict.fromkeys(tensors, "a.safetensors") | {HEAD: "c.safetensors", "other": "b.safetensors"}
    save_file({"other": tensors[HEAD]}, qwen3 / "c.safetensors")
    (qwen3 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(WeightsError, match=r"lm_head\.weight is in .* and no index gives it to either"):
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
def test_an_eos_id_outside_the_vocabulary_ends_no_text_and_is_logged(qwen3, caplog):
    """transformers writes GPT-2's 50256 into the config of a smaller GPT-2, so this is no error."""
    (qwen3 / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 96, -1, 10**30]}))
    llm = LLM(qwen3, kv_cache_memory=2**24)
    assert f"eos_token_id [-1, 96, {10**30}] is outside the vocabulary" in caplog.text
    [output] = llm.generate([1, 2, 3], SamplingParams(min_tokens=3, max_tokens=4, detokenize=False), use_tqdm=False)
    assert len(output.outputs[0].token_ids) >= 3


# ---- the LM head


def test_a_tied_head_needs_no_tensor_and_one_that_is_stored_too_is_used_once(tmp_path, caplog):
    path = tiny_models.save("qwen3_tied", tmp_path)
    embedding = load_file(path / "model.safetensors")[EMBEDDING]
    assert HEAD not in load_file(path / "model.safetensors")
    for _ in range(2):
        model = load(path)
        assert model.lm_head.weight is model.embed_tokens.weight
        edit_tensors(path, **{HEAD: embedding.clone()})
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


# ---- what is not supported is refused by name. test_broken_checkpoints.py has more, of Qwen3


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"activation_function": "gelu"}, UnsupportedError, "activation_function must be gelu_new, got 'gelu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, UnsupportedError, "inverse_layer_idx must be False, got True"),
        ({"scale_attn_weights": False}, UnsupportedError, "scale_attn_weights must be True, got False"),
        ({"n_head": 5}, CheckpointError, "n_embd must be a multiple of n_head, got 48 and 5"),
    ],
    ids=str,
)
def test_a_gpt2_that_is_not_supported_is_refused_by_name(gpt2, changes, error, sentence):
    edit_config(gpt2, **changes)
    with pytest.raises(error, match=sentence):
        load(gpt2)


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


# ---- where the weights are


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
