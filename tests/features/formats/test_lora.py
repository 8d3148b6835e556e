"""LoRA adapters give the logits of W + scale * B A, computed here by hand. What changes more than that is refused by name."""

import math

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.errors import CheckpointError, CheckpointNotFoundError, InvalidTypeError, UnsupportedError, WeightsError
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.load import load
from tests.helpers import tiny_models
from tests.helpers.lora_adapters import write_adapter

PROMPT = torch.arange(1, 41) * 31 % tiny_models.VOCAB_SIZE
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"
MODEL = "base_model.model"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_models.save("qwen3", tmp_path_factory.mktemp("base"))


def change(model, pairs, scales):
    """Add scale * B A to the weights of transformers' model."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for module, (a, b) in pairs.items():
            weight = parameters[f"{module}.weight"]
            update = scales[module] * (b @ a)
            weight += update.T if weight.shape != update.shape else update
    return model


def logits_here(path, lora):
    config = EngineConfig(model=str(path), dtype="float32", device="cpu", lora=tuple(lora), enforce_eager=True)
    model = load(config)[0].model
    with torch.inference_mode():
        return model.compute_logits(model(PROMPT, torch.arange(len(PROMPT)), HybridDenseAttention()))


def assert_equal(path, model, *adapters):
    with torch.inference_mode():
        logits = model(PROMPT[None]).logits[0]
    torch.testing.assert_close(
        logits_here(path, [(str(one), float(strength)) for one, strength in adapters]), logits, atol=1e-4, rtol=0
    )


SHAPES = {Q: (64, 48), UP: (80, 48)}


PATTERNS = {"rank_pattern": {"up_proj": 2, "proj": 9}, "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3, "layers": 9}}
# the adapter, its strength, and what A B is multiplied with in each layer: alpha over r, or over its root
MERGED = {
    "whole": ({}, 1.0, {Q: 8 / 4, UP: 8 / 4}),
    "half": ({}, 0.5, {Q: 0.5 * 8 / 4, UP: 0.5 * 8 / 4}),
    "negative": ({}, -1.0, {Q: -8 / 4, UP: -8 / 4}),
    "none": ({}, 0.0, {Q: 0.0, UP: 0.0}),
    "rslora": ({"use_rslora": True}, 1.0, {Q: 8 / math.sqrt(4), UP: 8 / math.sqrt(4)}),
    "patterns of the modules that they name": ({"ranks": {UP: 2}, **PATTERNS}, 1.0, {Q: 3 / 4, UP: 8 / 2}),
}


@pytest.mark.parametrize("case", MERGED)
def test_an_adapter_is_merged_with_alpha_over_r(base, tmp_path, case):
    settings, strength, scales = MERGED[case]
    pairs = write_adapter(tmp_path / "a", SHAPES, **settings)
    assert_equal(base, change(tiny_models.build("qwen3"), pairs, scales), (tmp_path / "a", strength))


def test_several_adapters_add_up(base, tmp_path):
    first = write_adapter(tmp_path / "a", SHAPES)
    second = write_adapter(tmp_path / "b", {Q: (64, 48)}, seed=1, lora_alpha=2)
    model = change(tiny_models.build("qwen3"), first, dict.fromkeys(SHAPES, 2.0))
    assert_equal(base, change(model, second, {Q: 0.25 * 2 / 4}), (tmp_path / "a", 1), (tmp_path / "b", 0.25))


def test_gpt2s_transposed_layers_are_merged_too(tmp_path):
    """attn.c_proj is square: no shape shows a transpose that is forgotten."""
    path = tiny_models.save("gpt2", tmp_path / "gpt2")
    shapes = {"transformer.h.0.attn.c_attn": (144, 48), "transformer.h.1.attn.c_proj": (48, 48)}
    pairs = write_adapter(tmp_path / "a", shapes, fan_in_fan_out=True)
    model = tiny_models.build("gpt2")
    with torch.no_grad():
        for module, (a, b) in pairs.items():
            model.get_submodule(module).weight += 2.0 * (b @ a).T
    assert_equal(path, model, (tmp_path / "a", 1))


def test_llm_takes_a_folder_a_list_and_a_dict_and_the_tokens_change(base, tmp_path):
    write_adapter(tmp_path / "a", SHAPES, lora_alpha=64)
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)

    def tokens(lora):
        llm = LLM(base, lora=lora, kv_cache_memory=2**22, enforce_eager=True)
        return llm.generate([1, 2, 3], params, use_tqdm=False)[0].outputs[0].token_ids

    adapter = tmp_path / "a"
    assert tokens(adapter) == tokens([str(adapter)]) == tokens({str(adapter): 1}) != tokens(None)
    assert tokens([]) == tokens({str(adapter): 0.0}) == tokens(None)
    for lora, sentence in ((5, "lora must be a folder, a list"), ([5], "must name folders, got 5"), ({"a": "b"}, "strength")):
        with pytest.raises(InvalidTypeError, match=sentence):
            LLM(base, lora=lora)


# ---- what is refused


REFUSED = [
    ({"peft_type": "LOHA"}, UnsupportedError, "peft_type='LOHA' in .* is not supported, only 'LORA'; merge the adapter"),
    ({"use_dora": True}, UnsupportedError, "use_dora=True"),
    ({"bias": "lora_only"}, UnsupportedError, "bias='lora_only'"),
    ({"modules_to_save": ["lm_head"]}, UnsupportedError, r"modules_to_save=\['lm_head'\]"),
    ({"init_lora_weights": "pissa"}, UnsupportedError, "init_lora_weights='pissa'"),
    ({"trainable_token_indices": [5]}, UnsupportedError, r"trainable_token_indices=\[5\]"),
    ({"rank_pattern": {"(a+)+$": 4}}, UnsupportedError, r"rank_pattern in .* has the pattern '\(a\+\)\+\$'; only names"),
    ({"rank_pattern": [5]}, CheckpointError, "rank_pattern in .* must map names to numbers"),
    ({"r": 8}, WeightsError, f"'{Q}' has the rank 4, but .* says 8"),
    ({"r": 0}, CheckpointError, "r of .* must be a number above 0, got 0"),
    ({"lora_alpha": "8"}, CheckpointError, "lora_alpha of .* must be a number above 0, got '8'"),
    ({"tensors": {f"{MODEL}.{Q}.lora_magnitude_vector": torch.ones(4)}}, UnsupportedError, "neither A nor B"),
    ({"tensors": {f"{MODEL}.model.embed_tokens.lora_embedding_A": torch.ones(4, 96)}}, UnsupportedError, "lora_embedding_A"),
    ({"tensors": {f"{MODEL}.{UP}.lora_A.weight": torch.ones(4, 48)}}, WeightsError, "has no A and B that fit, in floats"),
    ({"tensors": {f"{MODEL}.{UP}.lora_{part}.weight": torch.ones(4, 4).char() for part in "AB"}}, WeightsError, "in floats"),
]


def refused(base, path, error, sentence, shapes, **settings):
    write_adapter(path / "a", shapes, **settings)
    with pytest.raises(error, match=sentence):
        logits_here(base, [(str(path / "a"), 1.0)])


@pytest.mark.parametrize(("settings", "error", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_an_adapter_that_does_more_or_is_corrupted_is_refused_by_name(base, tmp_path, settings, error, sentence):
    refused(base, tmp_path, error, sentence, {Q: (64, 48)}, **settings)


def test_an_adapter_of_another_base_is_refused_with_what_does_not_fit(base, tmp_path):
    absent = r"changes 'model.layers.7.mlp.up_proj' of shape \[80, 48\], which the model does"
    refused(base, tmp_path, WeightsError, absent, {"model.layers.7.mlp.up_proj": (80, 48)})
    other = rf"changes '{UP}' of shape \[80, 64\], of shape \[80, 48\] in the model; use it with"
    refused(base, tmp_path, WeightsError, other, {UP: (80, 64)})


def test_a_folder_that_is_no_adapter_is_refused_with_what_is_missing(base, tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"has no adapter_config.json; a LoRA adapter is a folder as peft"):
        logits_here(base, [(str(tmp_path / "a"), 1.0)])
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    (tmp_path / "a" / "adapter_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointNotFoundError, match=r"no adapter_model.safetensors. A .bin file is a pickle"):
        logits_here(base, [(str(tmp_path / "a"), 1.0)])
