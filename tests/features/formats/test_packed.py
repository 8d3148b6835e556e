"""GPTQ, AWQ, compressed-tensors and FP8 checkpoints give the logits of the weights that each format's definition means.

The packing here is done number by number, by the definitions, and shares nothing with the package.
"""

import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer.config import EngineConfig
from nanoinfer.errors import UnsupportedError, WeightsError
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.features.quantization.rounding import quantized
from nanoinfer.load import load as load_config
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from tests.helpers import tiny_models

PROMPT = torch.arange(1, 41) * 31 % tiny_models.VOCAB_SIZE
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs that the fields of a word hold, lowest field first
LAYER = "model.layers.0.mlp.up_proj"


def words(fields: torch.Tensor, bits: int, order=None) -> torch.Tensor:
    """Pack [.., n * 32 / bits] unsigned numbers into [.., n] int32 words."""
    per_word = 32 // bits
    groups = fields.long().unflatten(-1, (-1, per_word))
    word = torch.zeros(groups.shape[:-1], dtype=torch.long)
    for i, position in enumerate(order or range(per_word)):
        word += groups[..., position] << (bits * i)
    return (word & 0xFFFFFFFF).sub(((word >> 31) & 1) << 32).to(torch.int32)


def draw(num_inputs, num_outputs, bits, group_size, symmetric, generator):
    """Integers [in, out], zeros and scales [groups, out]."""
    num_groups = 1 if group_size == -1 else -(-num_inputs // group_size)
    integers = torch.randint(0, 2**bits, (num_inputs, num_outputs), generator=generator)
    zeros = torch.randint(1, 2**bits, (num_groups, num_outputs), generator=generator)
    zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    scales = (torch.rand(num_groups, num_outputs, generator=generator) + 0.1).div(2**bits * 2).half()
    return integers, zeros, scales


def dequantised(integers, zeros, scales, group_of_input):
    """[out, in], an input at a time."""
    rows = [(integers[i] - zeros[g]).float() * scales[g].float() for i, g in enumerate(group_of_input)]
    return torch.stack(rows, dim=1)


def gptq(weight, generator, *, bits=4, group_size=32, sym=True, desc_act=False, checkpoint_format="gptq"):
    num_outputs, num_inputs = weight.shape
    integers, zeros, scales = draw(num_inputs, num_outputs, bits, group_size, sym, generator)
    groups = torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    if desc_act:
        groups = groups[torch.randperm(num_inputs, generator=generator)]
    packed = {
        "qweight": words(integers.T, bits).T,
        "qzeros": words(zeros - int(checkpoint_format == "gptq"), bits),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }
    return packed, dequantised(integers, zeros, scales, groups)


def awq(weight, generator, *, group_size=32):
    num_outputs, num_inputs = weight.shape
    integers, zeros, scales = draw(num_inputs, num_outputs, 4, group_size, False, generator)
    packed = {"qweight": words(integers, 4, AWQ_ORDER), "qzeros": words(zeros, 4, AWQ_ORDER), "scales": scales}
    return packed, dequantised(integers, zeros, scales, [i // group_size for i in range(num_inputs)])


def compressed(weight, generator, *, bits=4, group_size=32, sym=True, actorder=False):
    num_outputs, num_inputs = weight.shape
    integers, zeros, scales = draw(num_inputs, num_outputs, bits, group_size, sym, generator)
    groups = torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    packed = {"weight_packed": words(integers.T, bits), "weight_scale": scales.T, "weight_shape": torch.tensor(weight.shape)}
    if actorder:
        groups = groups[torch.randperm(num_inputs, generator=generator)]
        packed["weight_g_idx"] = groups.to(torch.int32)
    if not sym:
        packed["weight_zero_point"] = words(zeros, bits).T
    return packed, dequantised(integers, zeros, scales, groups)


def fp8(weight, generator, *, block=(16, 48)):
    stored = weight.clamp(-2, 2).mul(100).to(torch.float8_e4m3fn)
    blocks = [-(-size // edge) for size, edge in zip(weight.shape, block, strict=True)]
    scales = torch.rand(blocks, generator=generator) / 100
    meant = stored.float()
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            meant[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] *= scales[i, j]
    return {"weight": stored, "weight_scale_inv": scales}, meant


def compressed_settings(bits, group_size, sym, **more):
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "channel" if group_size == -1 else "group"}
    weights |= {"group_size": None if group_size == -1 else group_size, "actorder": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


GPTQ = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
AWQ = {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
FP8 = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 48]}
# name -> (quant_method, its settings, how a layer is packed, and with what)
CASES = {
    "gptq": ("gptq", GPTQ, gptq, {}),
    "gptq 8 bits": ("gptq", GPTQ | {"bits": 8}, gptq, {"bits": 8}),
    "gptq asymmetric": ("gptq", GPTQ | {"sym": False}, gptq, {"sym": False}),
    "gptq desc_act": ("gptq", GPTQ | {"desc_act": True}, gptq, {"sym": False, "desc_act": True}),
    "gptq one group": ("gptq", GPTQ | {"group_size": -1}, gptq, {"group_size": -1}),
    "gptq_v2": ("gptq", GPTQ | {"checkpoint_format": "gptq_v2"}, gptq, {"checkpoint_format": "gptq_v2", "sym": False}),
    "awq": ("awq", AWQ, awq, {}),
    "awq GEMM": ("awq", AWQ | {"version": "GEMM", "group_size": 16}, awq, {"group_size": 16}),
    "int4": ("compressed-tensors", compressed_settings(4, 32, True), compressed, {}),
    "int8": ("compressed-tensors", compressed_settings(8, -1, True), compressed, {"bits": 8, "group_size": -1}),
    "int4 asymmetric": ("compressed-tensors", compressed_settings(4, 32, False), compressed, {"sym": False}),
    "int4 actorder": ("compressed-tensors", compressed_settings(4, 32, True), compressed, {"actorder": True}),
    "fp8": ("fp8", FP8, fp8, {}),
}


def save(path, method, settings, pack, options, family="qwen3"):
    """Write a quantised checkpoint to path, and return transformers' model with the weights that it means."""
    generator = torch.Generator().manual_seed(5)
    model = tiny_models.build(family, **SIZES)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if ".layers." in name and weight.ndim == 2 and "layers.1.self_attn.o_proj" not in name:  # one stays as it is
                del tensors[name]
                packed, meant = pack(weight, generator, **options)
                tensors |= {name.removesuffix("weight") + suffix: one.contiguous() for suffix, one in packed.items()}
                weight.copy_(meant)
    save_file(tensors, path / "model.safetensors")
    edit(path, quantization_config={"quant_method": method} | settings)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function: the name of a case -> its checkpoint, written once, and transformers' model."""

    @functools.cache
    def save_once(name):
        path = tmp_path_factory.mktemp("packed")
        return path, save(path, *CASES[name])

    return save_once


def edit(path, **changes):
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | changes))


def edit_tensors(path, changes):
    tensors = load_file(path / "model.safetensors") | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, path / "model.safetensors")


def load(path):
    return loader.load_model(Checkpoint.open(str(path)), "float32")


def logits_here(path):
    model = load(path)
    return model.compute_logits(model(PROMPT, torch.arange(len(PROMPT)), HybridDenseAttention()))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_with_the_weights_that_the_format_means(name, saved):
    path, model = saved(name)
    with torch.inference_mode():
        expected = model(PROMPT[None]).logits[0]
        torch.testing.assert_close(logits_here(path), expected, atol=1e-4, rtol=1e-4)
        plain = tiny_models.build("qwen3", **SIZES)(PROMPT[None]).logits[0]
    assert (expected - plain).abs().max() > 0.1, "packing changes the logits by far more than the tolerance"


def test_any_rows_of_a_layer_are_those_of_the_whole(saved):
    for name in ("gptq desc_act", "awq", "int4 asymmetric", "fp8"):
        weights = Checkpoint.open(str(saved(name)[0])).open_weights()
        whole = weights.read(f"{LAYER}.weight")
        assert whole.shape == weights[f"{LAYER}.weight"].shape == (96, 64)
        for start, stop in ((0, 5), (13, 14), (30, 96), (90, 200)):
            assert torch.equal(weights.read(f"{LAYER}.weight", slice(start, stop)), whole[start:stop])


@pytest.mark.parametrize("name", [name for name in CASES if name != "fp8"])
def test_a_layer_in_few_bits_keeps_the_integers_of_the_file(name, saved):
    checkpoint = Checkpoint.open(str(saved(name)[0]))
    weights, config = checkpoint.open_weights(), EngineConfig(model=str(checkpoint.path), dtype="bfloat16", device="cpu")
    model = load_config(config)[0].model
    attention = model.layers[0].self_attn
    names = [f"model.layers.0.self_attn.{suffix}_proj.weight" for suffix in "qkv"]
    exact = torch.cat([weights.read(name) for name in names])
    for bits in (4, 8):
        layers = attention.q_proj, attention.k_proj, attention.v_proj
        kept = torch.cat([piece.widened() for piece in quantized([layer.weight for layer in layers], bits)])
        if "act" in name or (bits == 4 and name in ("gptq 8 bits", "int8")):  # groups out of order, more bits: rounded again
            assert weights.integers(names[0]) is None or bits == 4
            assert 0 < (kept - exact).abs().max() < exact.abs().max() / (8 if bits == 4 else 100)
        else:
            assert torch.equal(kept, exact)


# ---- what is refused


INT4_GROUP = compressed_settings(4, 32, True)["config_groups"]["group_0"]
EIGHT_BITS = INT4_GROUP | {"weights": INT4_GROUP["weights"] | {"num_bits": 8}}
UNSUPPORTED = [
    ("gptq", {"bits": 3}, r"bits=3 in quantization_config of .*config.json is not supported, only 4 or 8"),
    ("gptq", {"bits": True}, "bits=True"),
    ("gptq", {"group_size": 48}, "group_size=48"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    ("gptq", {"dynamic": {"-:.*": {}}}, "dynamic={"),
    ("awq", {"bits": 8}, "bits=8 .* only 4"),
    ("awq", {"version": "gemv"}, "version='gemv' .* only 'gemm'"),
    ("awq", {"zero_point": False}, "zero_point=False"),
    ("int4", {"format": "int-quantized"}, "format='int-quantized' .* only 'pack-quantized'"),
    ("int4", {"config_groups": {}}, r"config_groups=\{\} .* names no group"),
    ("int4", {"config_groups": {"g": INT4_GROUP | {"input_activations": {"num_bits": 8}}}}, r"activations=\{.num_bits.: 8\}"),
    ("int4", {"config_groups": {"a": INT4_GROUP, "b": EIGHT_BITS}}, "quantises some layers differently from others"),
    ("fp8", {"weight_block_size": None}, "weight_block_size=None .* must be two sizes"),
    ("fp8", {"activation_scheme": "static"}, "activation_scheme='static'"),
    ("fp8", {"quant_method": "bitsandbytes"}, "with 'bitsandbytes' are not supported; gptq, .*, fp8 and mxfp4 are"),
]


@pytest.mark.parametrize(("name", "changes", "sentence"), UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_a_setting_that_is_not_supported_is_refused_by_name(name, changes, sentence, saved, tmp_path):
    path = shutil.copytree(saved(name)[0], tmp_path / "changed")
    method, settings, *_ = CASES[name]
    edit(path, quantization_config={"quant_method": method} | settings | changes)
    with pytest.raises(UnsupportedError, match=sentence):
        load(path)


CONTRADICTORY = [
    ("gptq", "scales", None, rf"{LAYER}.scales is missing"),
    ("gptq", "scales", torch.ones(9, 96).half(), rf"{LAYER}.scales is F16 of shape \[9, 96\], expected"),
    ("gptq", "qzeros", torch.ones(2, 12), rf"{LAYER}.qzeros is F32 of shape \[2, 12\], expected is I32"),
    ("gptq desc_act", "g_idx", torch.full((64,), 2).int(), rf"{LAYER}.g_idx names groups outside 0 .. 1"),
    ("gptq desc_act", "g_idx", torch.full((64,), -1).int(), rf"{LAYER}.g_idx names groups outside 0 .. 1"),
    ("int4", "weight_shape", torch.tensor([96, 63]), r"weight_shape is \[96, 63\], but weight_packed holds"),
    ("fp8", "weight_scale_inv", torch.ones(1, 1), rf"{LAYER}.weight_scale_inv is F32 of shape \[1, 1\]"),
    ("fp8", "weight_scale_inv", None, rf"not a float: {LAYER}.weight is F8_E4M3"),
    ("awq", "qweight", torch.zeros(64, 24).int(), rf"{LAYER}.qzeros is I32 of shape \[2, 12\]"),
    ("gptq", "bias", torch.ones(96).half(), rf"unexpected: {LAYER}.bias"),
    ("awq", "bias", torch.zeros(96).half(), rf"unexpected: {LAYER}.bias"),
]


@pytest.mark.parametrize(("name", "suffix", "tensor", "sentence"), CONTRADICTORY, ids=lambda value: str(value)[:20])
def test_tensors_that_contradict_each_other_are_refused_by_name(name, suffix, tensor, sentence, saved, tmp_path):
    path = shutil.copytree(saved(name)[0], tmp_path / "changed")
    edit_tensors(path, {f"{LAYER}.{suffix}": tensor})
    with pytest.raises(WeightsError, match=sentence):
        load(path)


def test_a_bias_of_zeros_of_a_layer_without_bias_is_skipped_in_gptq(saved, tmp_path):
    """AutoGPTQ writes one for every layer."""
    path = shutil.copytree(saved("gptq")[0], tmp_path / "changed")
    edit_tensors(path, {f"{LAYER}.bias": torch.zeros(96).half()})
    load(path)
