"""A model and its optimised form compute the same logits, for every family, dtype and device."""

import pytest
import tiny_models
import torch
from torch import nn

from nanoinfer.attention.dense import DenseAttention
from nanoinfer.models import cpu_blocks, loader, optimize
from nanoinfer.models.checkpoint import Checkpoint
from nanoinfer.models.cpu_blocks import CPUGPT2Block, CPUQwenDecoderLayer
from nanoinfer.models.cpu_linear import CPULinear, PlainLinear
from nanoinfer.models.cpu_quantized import QuantizedLinear
from nanoinfer.models.gpt2 import GPT2MLP, GPT2Block
from nanoinfer.models.layers import RMSNorm, SwiGLU
from nanoinfer.models.optimize import optimize_for_cpu, optimize_for_cuda
from nanoinfer.models.qwen import QwenDecoderLayer

IDS = torch.arange(1, 14) * 31 % tiny_models.VOCAB_SIZE
GPU = "cuda" if torch.cuda.is_available() else "cpu"  # where there is none, Triton interprets its kernels
GPU_FACTOR = 1.25 if GPU == "cuda" else 1.6  # the interpreter cuts bits off where it should round to bf16
DTYPES = ("float32", "bfloat16")
# Sizes that 8 and 4 bits need: inputs in multiples of 32.
QUANTIZABLE = {"gpt2": {"n_embd": 64}, "qwen2": {"hidden_size": 64, "intermediate_size": 96}}
QUANTIZABLE |= {"gpt2_untied": QUANTIZABLE["gpt2"], "qwen2_tied": QUANTIZABLE["qwen2"]}
QUANTIZABLE |= {"qwen3": QUANTIZABLE["qwen2"], "qwen3_tied": QUANTIZABLE["qwen2"]}

families = pytest.mark.parametrize("family", tiny_models.FAMILIES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def load(path, dtype="float32", device="cpu"):
    return loader.load_model(Checkpoint.open(str(path)), dtype, device)


@torch.inference_mode()
def logits_of(model):
    ids = IDS.to(next(model.parameters()).device)
    positions = torch.arange(len(ids), device=ids.device)
    return model.compute_logits(model(ids, positions, DenseAttention())).float().cpu()


def assert_same_logits(path, dtype, optimised, device="cpu", factor=1.25):
    """In fp32 within rounding. In bf16, which rounds every layer, as near the fp32 truth as the textbook's bf16 logits.

    factor: by how much the mean error may exceed the textbook's.
    """
    truth = logits_of(load(path))
    if dtype == "float32":
        torch.testing.assert_close(logits_of(optimised), truth, atol=1e-4, rtol=0)
        return
    error_of_textbook = (logits_of(load(path, dtype, device)) - truth).abs().mean()
    assert error_of_textbook < 0.1 * truth.abs().mean()  # the comparison means something
    assert (logits_of(optimised) - truth).abs().mean() < factor * error_of_textbook


@families
@dtypes
def test_the_form_for_a_cpu_gives_the_textbooks_logits(family, dtype, tmp_path):
    path = tiny_models.save(family, tmp_path)
    model = load(path, dtype)
    report = optimize_for_cpu(model)
    left = {type(module) for module in model.modules()} & {nn.Linear, GPT2Block, QwenDecoderLayer, SwiGLU}
    assert left == ({QwenDecoderLayer} if "moe" in family else set())
    assert report.forms
    assert_same_logits(path, dtype, model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3"])  # Triton's interpreter is slow
@dtypes
def test_the_form_for_a_gpu_gives_the_textbooks_logits(family, dtype, tmp_path):
    pytest.importorskip("triton")
    path = tiny_models.save(family, tmp_path)
    model = load(path, dtype, GPU)
    optimize_for_cuda(model)
    left = {type(module) for module in model.modules()} & {QwenDecoderLayer, SwiGLU}
    assert left == set()
    assert_same_logits(path, dtype, model, GPU, GPU_FACTOR)


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.1), ("int4", 0.4)])
@pytest.mark.parametrize("family", QUANTIZABLE)
def test_few_bits_stay_near_the_textbooks_logits(family, quantization, limit, tmp_path):
    """The error of rounding to 8 or 4 bits, beside that of bf16, which the activations are in."""
    path = tiny_models.save(family, tmp_path, **QUANTIZABLE[family])
    model = load(path, "bfloat16")
    optimize_for_cpu(model, quantization=quantization)
    assert {type(module) for module in model.modules() if isinstance(module, CPULinear)} == {QuantizedLinear}
    truth = logits_of(load(path))
    assert (logits_of(model) - truth).abs().mean() < limit * truth.abs().mean()


@torch.inference_mode()
def test_experts_compute_the_tokens_that_chose_them_and_no_others(tmp_path):
    mixture = load(tiny_models.save("qwen3_moe", tmp_path)).layers[0].mlp
    num_rows = []
    for expert in mixture.experts:
        expert.register_forward_hook(lambda expert, inputs, out: num_rows.append(len(out)))
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(0))
    mixture(x[:1])
    assert num_rows == [1, 1, 1]  # of 8 experts
    num_rows.clear()
    mixture(x)
    assert len(num_rows) == 8
    assert sum(num_rows) == 3 * 50


# ---- the comparison can fail


class WithoutResidual(CPUGPT2Block):
    def forward(self, x, attend):
        return super().forward(x, attend) - x


class WithoutActivation(CPUQwenDecoderLayer):
    def __init__(self, layer, linears):
        gate_proj = layer.mlp.gate_proj
        super().__init__(layer, linears)
        self.gate_proj = linears.optimize(gate_proj)


class WithSwappedNorms(CPUQwenDecoderLayer):
    def __init__(self, layer, linears):
        super().__init__(layer, linears)
        self.norm.weight.data = self.norm.weight.flip(0)  # the heads in reverse: keys first


@dtypes
@pytest.mark.parametrize(
    ("family", "block", "wrong"),
    [
        ("gpt2", GPT2Block, WithoutResidual),
        ("qwen2", QwenDecoderLayer, WithoutActivation),
        ("qwen3", QwenDecoderLayer, WithSwappedNorms),
    ],
)
def test_the_comparison_notices_a_wrong_form(family, block, wrong, dtype, tmp_path, monkeypatch):
    monkeypatch.setitem(cpu_blocks.CPU_BLOCKS, block, wrong)
    path = tiny_models.save(family, tmp_path)
    model = load(path, dtype)
    optimize_for_cpu(model)
    with pytest.raises(AssertionError):
        assert_same_logits(path, dtype, model)


@pytest.mark.slow
@dtypes
def test_the_comparison_notices_a_product_on_a_gpu_that_forgets_the_residual(dtype, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("nanoinfer.models.cuda_blocks.add_product", lambda residual, x, linear: linear(x))
    path = tiny_models.save("qwen3", tmp_path)
    model = load(path, dtype, GPU)
    optimize_for_cuda(model)
    with pytest.raises(AssertionError):
        assert_same_logits(path, dtype, model, GPU, GPU_FACTOR)


# ---- what is swapped, and what is left alone


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class ReluMLP(GPT2MLP):
    def forward(self, x):
        return self.c_proj(self.c_fc(x).relu())


def test_a_subclass_of_a_linear_layer_is_left_alone():
    model = nn.Sequential(DoubledLinear(8, 8), nn.Linear(8, 8))
    expected = model(torch.ones(1, 8))
    optimize_for_cpu(model)
    assert type(model[0]) is DoubledLinear
    assert isinstance(model[1], CPULinear)
    torch.testing.assert_close(model(torch.ones(1, 8)), expected)


def test_a_block_with_a_part_of_the_users_own_keeps_its_forward_and_its_linear_layers_are_packed(tmp_path):
    path = tiny_models.save("gpt2", tmp_path)
    model, expected = load(path), load(path)
    for one in (model, expected):
        one.h[0].mlp.__class__ = ReluMLP
    optimize_for_cpu(model)
    assert [type(block) for block in model.h] == [GPT2Block, CPUGPT2Block]
    assert isinstance(model.h[0].mlp.c_fc, CPULinear)
    torch.testing.assert_close(logits_of(model), logits_of(expected), atol=1e-4, rtol=0)
    assert (logits_of(expected) - logits_of(load(path))).abs().max() > 0.1  # relu is not gelu_tanh


class LayerOfOnesOwn(QwenDecoderLayer):
    def forward(self, x, cos, sin, attend):
        return super().forward(x, cos, sin, attend) * 0.5


def test_on_a_gpu_a_layer_without_a_form_gets_fused_norms_also_over_heads(tmp_path):
    cuda_blocks = pytest.importorskip("nanoinfer.models.cuda_blocks")
    path = tiny_models.save("qwen3", tmp_path)
    model, expected = load(path, device=GPU), load(path, device=GPU)
    for one in (model, expected):
        one.layers[1].__class__ = LayerOfOnesOwn
    optimize_for_cuda(model)
    assert [type(layer) for layer in model.layers] == [cuda_blocks.CUDAQwenDecoderLayer, LayerOfOnesOwn]
    assert type(model.layers[1].self_attn.q_norm) is type(model.norm) is cuda_blocks.FusedRMSNorm
    assert RMSNorm not in {type(module) for module in model.layers[1].modules()}
    torch.testing.assert_close(logits_of(model), logits_of(expected), atol=1e-4, rtol=0)


class HalvedLayer(nn.Module):
    """A form for LayerOfOnesOwn, as a user would add it."""

    parts = CPUQwenDecoderLayer.parts

    def __init__(self, layer, linears):
        super().__init__()
        self.whole = CPUQwenDecoderLayer(layer, linears)

    def forward(self, x, cos, sin, attend):
        return self.whole(x, cos, sin, attend) * 0.5


def test_a_form_that_a_user_adds_to_the_table_is_used(tmp_path, monkeypatch):
    monkeypatch.setitem(cpu_blocks.CPU_BLOCKS, LayerOfOnesOwn, HalvedLayer)
    path = tiny_models.save("qwen3", tmp_path)
    model, expected = load(path), load(path)
    for one in (model, expected):
        one.layers[1].__class__ = LayerOfOnesOwn
    optimize_for_cpu(model)
    assert [type(layer) for layer in model.layers] == [CPUQwenDecoderLayer, HalvedLayer]
    torch.testing.assert_close(logits_of(model), logits_of(expected), atol=1e-4, rtol=0)


def test_without_triton_the_model_stays_unchanged_and_one_log_line_says_so(tmp_path, monkeypatch, caplog):
    def missing(name):
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(optimize, "import_module", missing)
    model = load(tiny_models.save("qwen3", tmp_path))
    before = [type(module) for module in model.modules()]
    with caplog.at_level("INFO", "nanoinfer.models"):
        optimize_for_cuda(model)
    assert [type(module) for module in model.modules()] == before
    [record] = caplog.records
    assert record.message.startswith("triton is not installed: norms, rotations and gates run as torch's own operators")


@dtypes
def test_q_k_and_v_are_one_product(dtype, tmp_path):
    """4 query heads and 2 key-value heads of 16: 128 outputs. The report has every kind of layer, the head first."""
    model = load(tiny_models.save("qwen3", tmp_path), dtype)
    report = optimize_for_cpu(model)
    assert list(report.forms) == [
        f"48 -> 96 {dtype}",
        f"48 -> 128 {dtype}",
        f"64 -> 48 {dtype} residual",
        f"48 -> 80 {dtype} silu",
        f"48 -> 80 {dtype}",
        f"80 -> 48 {dtype} residual",
    ]
    assert not any(isinstance(module, PlainLinear) for module in model.modules()) or not report.are_rows_independent
