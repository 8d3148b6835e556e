"""Tensors of all experts, and MXFP4, become the experts' own, as transformers means them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import WeightsError
from nanoinfer.features.formats import experts
from nanoinfer.features.formats.experts import ExpertWeights, unpack_fp4
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.loading import loader, weights
from nanoinfer.loading.checkpoint import Checkpoint
from tests.helpers import tiny_models

FAMILY = "gpt_oss_window"
PROMPT = torch.arange(1, 41) * 31 % tiny_models.VOCAB_SIZE
SIZES = {"hidden_size": 64}  # whole blocks of 32 inputs
LAYER = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint in MXFP4, and transformers' model with the weights that transformers makes of it."""
    path = tmp_path_factory.mktemp("mxfp4")
    model = tiny_models.build(FAMILY, **SIZES)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name.endswith(("gate_up_proj", "down_proj")):
                num_experts, num_inputs, num_outputs = tensors.pop(name).shape
                shape = (num_experts, num_outputs, num_inputs // 32, 16)
                blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
                scales = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    return path, model


def load(path, dtype="float32"):
    return loader.load_model(Checkpoint.open(str(path)), dtype)


def test_four_bits_and_a_power_of_two_by_hand():
    """0x21 is 1 and then 2, so 0.5 and 1.0. 0xF9 is 9 and then 15, so -0.5 and -6.0. The scale 129 is 4, and 126 is 0.5."""
    numbers = torch.tensor([[1, 2], [9, 15]], dtype=torch.uint8)
    scales = torch.tensor([129, 126], dtype=torch.uint8)
    assert unpack_fp4(numbers, scales).tolist() == [[2.0, 4.0], [-0.25, -3.0]]
    every = unpack_fp4(torch.arange(16, dtype=torch.uint8).expand(255, 16), torch.arange(255, dtype=torch.uint8))
    assert torch.equal(every.bfloat16().float(), every)  # bfloat16 loses nothing
    base = weights.Weights({"mlp.experts.down_proj_blocks": weights.TensorInfo((1, 1, 1, 16), "U8")})
    base |= {"mlp.experts.down_proj_scales": weights.TensorInfo((1, 1, 1), "U8")}
    base |= {"mlp.down_proj.weight": weights.TensorInfo((2, 2), "F32")}
    stored = {"mlp.experts.down_proj_blocks": [0x21, 0xF9, *[0] * 14], "mlp.experts.down_proj_scales": [129]}
    base.read = lambda name, rows: torch.tensor(stored[name], dtype=torch.uint8).view(base[name].shape)[rows]
    base.has_empty_biases, base.integers = True, lambda name, rows: f"the integers of {name}"
    divided = ExpertWeights(base, "interleaved")
    assert divided.read("mlp.experts.0.down_proj.weight").tolist() == [[2.0, 4.0, -2.0, -24.0, *[0.0] * 28]]
    assert divided.has_empty_biases  # what is not divided stays what its file says
    assert divided.integers("mlp.down_proj.weight") == "the integers of mlp.down_proj.weight"


def test_experts_in_halves_are_those_that_are_stored_one_by_one(tmp_path):
    """As transformers has them in memory, and as checkpoints of Qwen3.5 have them."""
    path, model = tmp_path, tiny_models.build("qwen3_5_moe")
    model.save_pretrained(path)
    one_by_one = {name: weight.clone() for name, weight in load(path).named_parameters()}
    fused = {name: weight.contiguous() for name, weight in model.named_parameters()}
    assert fused[LAYER + "gate_up_proj"].dim() == 3
    save_file(fused, path / "model.safetensors")
    found = dict(load(path).named_parameters())
    assert found.keys() == one_by_one.keys()
    assert all(torch.equal(found[name], weight) for name, weight in one_by_one.items())


def test_logits_of_mxfp4_equal_transformers(saved):
    path, model = saved
    ours = load(path)
    with torch.inference_mode():
        logits = ours.compute_logits(ours(PROMPT, torch.arange(len(PROMPT)), HybridDenseAttention()))
        torch.testing.assert_close(logits, model(PROMPT[None]).logits[0], atol=1e-4, rtol=0)


def test_every_weight_of_every_expert_is_exact_in_bfloat16_and_read_in_pieces(saved, monkeypatch):
    path, model = saved
    sizes = []
    monkeypatch.setattr(weights, "_PIECE", 2**8)
    monkeypatch.setattr(experts, "unpack_fp4", lambda *given: sizes.append(given[0].numel()) or unpack_fp4(*given))
    ours = load(path, "bfloat16")
    assert max(sizes) == 2**8  # no expert is unpacked as a whole, which has 2,048 weights
    for layer, theirs in zip(ours.layers, model.model.layers, strict=True):
        for number, expert in enumerate(layer.mlp.experts):
            fused = theirs.mlp.experts
            assert torch.equal(expert.gate_proj.weight.float(), fused.gate_up_proj[number, :, 0::2].T)
            assert torch.equal(expert.up_proj.weight.float(), fused.gate_up_proj[number, :, 1::2].T)
            assert torch.equal(expert.down_proj.weight.float(), fused.down_proj[number].T)
            assert torch.equal(expert.up_proj.bias, fused.gate_up_proj_bias[number, 1::2].bfloat16())


@pytest.mark.slow
def test_an_update_from_a_folder_in_mxfp4_gives_the_tokens_of_a_fresh_engine(saved, tmp_path):
    path, params = saved[0], SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    settings = {"dtype": "float32", "kv_cache_memory": 2**22, "enforce_eager": True}
    other = LLM(tiny_models.save(FAMILY, tmp_path, **SIZES), **settings)
    before = other.generate(PROMPT.tolist(), params, use_tqdm=False)[0].outputs[0].token_ids
    other.update_weights_from_path(str(path))
    [fresh, updated] = (
        llm.generate(PROMPT.tolist(), params, use_tqdm=False)[0].outputs[0].token_ids for llm in (LLM(path, **settings), other)
    )
    assert updated == fresh != before


SHAPES = [
    ("gate_up_proj_scales", None, "unexpected: .*0.mlp.experts.gate_up_proj_blocks"),
    ("down_proj_scales", torch.zeros(8, 64, 2, dtype=torch.uint8), "unexpected: .*down_proj_blocks"),
    ("down_proj_blocks", torch.zeros(8, 64, 1, 15, dtype=torch.uint8), "unexpected: .*down_proj_blocks"),
    ("down_proj_bias", torch.zeros(8, 64, 1), "unexpected: .*down_proj_bias"),
    ("down_proj_bias", torch.zeros(2**20, 0), "unexpected: .*down_proj_bias"),
    ("down_proj_bias", torch.zeros(7, 64), "missing: layers.0.mlp.experts.7.down_proj.bias"),
    ("down_proj_bias", torch.zeros(9, 64), "unexpected: .*experts.8.down_proj.bias"),
]


@pytest.mark.parametrize(("name", "tensor", "sentence"), SHAPES, ids=lambda value: str(getattr(value, "shape", value)))
def test_tensors_of_another_shape_are_reported_by_name(name, tensor, sentence, saved, tmp_path):
    tensors = load_file(saved[0] / "model.safetensors") | {LAYER + name: tensor}
    save_file({name: one for name, one in tensors.items() if one is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((saved[0] / "config.json").read_text())
    with pytest.raises(WeightsError, match=sentence):
        load(tmp_path)
