"""All layers as one program: the numbers of the blocks, the same bits as step by step, and what is left alone."""

import pytest
import tiny_models
import torch
from torch import nn

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.cpu import CPUStep
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.devices.program import Program
from nanoinfer.errors import UnsupportedError
from nanoinfer.models import loader, optimize
from nanoinfer.models.checkpoint import Checkpoint
from nanoinfer.models.cpu_blocks import CPU_BLOCKS, CPUGPT2Block, CPUQwenDecoderLayer
from nanoinfer.models.cpu_linear import CLASSES
from nanoinfer.models.cpu_program import Array, CompiledLayers, CompiledNorm, LayerSteps
from nanoinfer.models.gpt2 import GPT2Block, GPT2LMHeadModel
from nanoinfer.models.layers import RMSNorm, apply_rotary
from nanoinfer.models.optimize import optimize_for_cpu

BFLOAT16 = pytest.param(torch.bfloat16, 0.04, id="bfloat16")
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [pytest.param(torch.float32, 2e-6, id="float32"), BFLOAT16])


@pytest.fixture(autouse=True)
def kernels():
    try:
        LayerSteps(torch.float32)
    except UnsupportedError as error:
        pytest.skip(str(error))


def compiled(path, dtype="float32"):
    model = loader.load_model(Checkpoint.open(str(path)), dtype, "cpu")
    optimize_for_cpu(model)
    return model


# ---- the small operators


def norms(size, dtype):
    torch.manual_seed(0)
    rms_norm, layer_norm = RMSNorm(size, 1e-6), nn.LayerNorm(size, 1e-5)
    for parameter in (rms_norm.weight, layer_norm.weight, layer_norm.bias):
        nn.init.uniform_(parameter, -2, 2)
    return rms_norm.to(dtype), layer_norm.to(dtype)


@torch.inference_mode()
@dtypes
@pytest.mark.parametrize("size", [1, 2, 15, 64, 83])
def test_norms_give_the_numbers_of_torch_and_a_row_the_same_bits_in_any_batch(size, dtype, tolerance):
    for norm in norms(size, dtype):
        x = (torch.randn(9, size) * 3 + 1).to(dtype)
        ours = CompiledNorm(norm)(x)
        assert torch.equal(CompiledNorm(norm)(x[4:5]), ours[4:5])
        largest = norm(x).float().abs().max().clamp(min=1)
        assert (ours.float() - norm(x).float()).abs().max() <= 4 * tolerance * largest
        folded = x.reshape(3, 3, size).transpose(0, 1)
        assert torch.equal(CompiledNorm(norm)(folded), ours.reshape(3, 3, size).transpose(0, 1))
        assert torch.equal(CompiledNorm(norm)(x[4]), ours[4])


@pytest.mark.parametrize("norm", [nn.LayerNorm(8, bias=False), nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm((2, 8))])
def test_other_norms_are_left_alone(norm):
    with pytest.raises(UnsupportedError, match="a norm without a weight or a bias, or over several axes"):
        CompiledNorm(norm)


@torch.inference_mode()
@dtypes
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 64), (4, 1, 10), (3, 1, 2)])
def test_queries_and_keys_are_rotated_as_in_python_and_values_are_not(
    num_heads, num_kv_heads, head_dim, with_norm, dtype, tolerance
):
    torch.manual_seed(0)
    num_rotated, num_tokens = num_heads + num_kv_heads, 5
    qkv = torch.randn(num_tokens, num_rotated + num_kv_heads, head_dim).to(dtype)
    angles = torch.rand(num_tokens, 1, head_dim // 2).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norm = None
    if with_norm:
        norm = RMSNorm(head_dim, 1e-6)
        weights = torch.rand(2, head_dim).repeat_interleave(torch.tensor([num_heads, num_kv_heads]), dim=0)
        norm.weight = nn.Parameter(weights.to(dtype))
    rotated = qkv[:, :num_rotated] if norm is None else norm(qkv[:, :num_rotated])
    expected = torch.cat((apply_rotary(rotated, cos, sin), qkv[:, num_rotated:]), dim=1)
    steps = LayerSteps(dtype)
    steps.rotate(norm, num_heads, num_kv_heads, head_dim)
    arrays = [None] * len(Array)
    arrays[Array.QKV], arrays[Array.COS], arrays[Array.SIN] = qkv, cos, sin
    Program(steps.parts[0])(num_tokens, arrays)
    assert torch.equal(qkv[:, num_rotated:], expected[:, num_rotated:])
    assert (qkv.float() - expected.float()).abs().max() < 2 * tolerance


# ---- whole models


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3"])
def test_the_layers_of_a_family_are_one_module(family, tmp_path):
    model = compiled(tiny_models.save(family, tmp_path))
    [layers] = [module for module in model.modules() if isinstance(module, CompiledLayers)]
    assert len(layers.blocks) == model.config.num_hidden_layers
    assert {type(block) for block in layers.blocks} == {CPUGPT2Block if family == "gpt2" else CPUQwenDecoderLayer}
    assert sum(isinstance(module, CompiledNorm) for module in model.modules()) == 1


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_one_call_gives_the_bits_of_a_call_for_each_layer(family, quantization, tmp_path, monkeypatch):
    """A step with a prompt computes each layer in two calls around its attention, a decode step all layers in one."""
    sizes = {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64, "intermediate_size": 96}
    path = tiny_models.save(family, tmp_path, **sizes)
    prompts = [[5, 9, 11], list(range(90)) * 3, [7] * 40]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False, logprobs=3)

    def answers():
        dtype = "bfloat16" if quantization else "float32"  # not every processor has a kernel for dense layers in bfloat16
        llm = LLM(path, dtype=dtype, quantization=quantization, kv_cache_memory=2**24)
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        return [(output.token_ids, [entry.values() for entry in output.logprobs]) for output in outputs]

    num_calls = []
    decode = CompiledLayers._decode_program
    monkeypatch.setattr(CompiledLayers, "_decode_program", lambda self, kernel: num_calls.append(1) or decode(self, kernel))
    in_one_call = answers()
    assert len(num_calls) >= 19
    monkeypatch.setattr(CPUStep, "decode_kernel", None)
    num_calls.clear()
    layer_by_layer = answers()
    assert not num_calls
    assert str(layer_by_layer) == str(in_one_call)


class Doubled(CPUGPT2Block):
    def forward(self, x, attend):
        return 2 * super().forward(x, attend)


def test_a_block_whose_forward_is_its_own_is_not_described_by_its_base_class(tmp_path, monkeypatch):
    monkeypatch.setitem(CPU_BLOCKS, GPT2Block, Doubled)
    model = compiled(tiny_models.save("gpt2", tmp_path))
    assert {type(block) for block in model.h} == {Doubled}


class EarlyExit(GPT2LMHeadModel):
    def forward(self, input_ids, positions, attend):
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.h[:1]:
            x = block(x, attend)
        return self.ln_f(x)


def test_a_model_whose_forward_is_its_own_keeps_its_list_of_blocks(tmp_path):
    model = loader.load_model(Checkpoint.open(str(tiny_models.save("gpt2", tmp_path))), "float32", "cpu")
    model.__class__ = EarlyExit
    optimize_for_cpu(model)
    assert {type(block) for block in model.h} == {CPUGPT2Block}


def test_rows_of_another_dtype_are_refused_and_no_rows_give_none(tmp_path):
    model = compiled(tiny_models.save("gpt2", tmp_path))
    [layers] = model.h
    with pytest.raises(UnsupportedError, match=r"weights are in torch.float32, got rows in torch.bfloat16"):
        layers(torch.zeros(2, 48, dtype=torch.bfloat16), DenseAttention())
    assert layers(torch.zeros(0, 48), lambda layer, q, k, v: q).shape == (0, 48)


def test_a_layer_that_no_kernel_computes_keeps_the_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(optimize, "dense_classes", lambda: CLASSES)
    model = compiled(tiny_models.save("qwen2", tmp_path))
    assert {type(layer) for layer in model.layers} == {CPUQwenDecoderLayer}
    with pytest.raises(UnsupportedError, match="a PackedLinear is no step of a program"):
        CompiledLayers(model.layers)
