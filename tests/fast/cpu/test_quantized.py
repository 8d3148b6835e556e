"""Linear layers in 8 and 4 bits: the numbers of their definition, the same bits in any batch, less memory, refusals by name."""

from statistics import mean

import pytest
import torch
from torch import nn

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.fast.cpu.accelerate import compile_model
from nanoinfer.fast.cpu.linear import KernelLinear
from nanoinfer.fast.cpu.quantized import PackedQuantizedLinear
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.features.quantization.rounding import QuantizedLinear, quantize, quantize_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels")]

KINDS = {  # an activation, and what is computed of the product with the bias, and of a residual
    "plain": (None, lambda out, residual: out),
    "silu": ("silu", lambda out, residual: nn.functional.silu(out)),
    "gelu_tanh": ("gelu_tanh", lambda out, residual: nn.functional.gelu(out, approximate="tanh")),
    "residual": (None, lambda out, residual: residual + out),
}
SIZES = [(32, 5), (96, 100), (352, 64), (256, 50)]  # inputs (groups of 32, 64 and 128), outputs (not in whole tiles)
BITS = pytest.mark.parametrize("bits", [8, 4])


def kernel_of(layer, bits, kind="plain"):
    packed = PackedQuantizedLinear(FusedLinear(layer, activation=KINDS[kind][0]), bits)
    return KernelLinear(packed, ["residual"] if kind == "residual" else [])


def rounded(x, group):
    """x in 8 bits per group, as the kernel rounds it, in float64."""
    groups = x.double().unflatten(1, (-1, group))
    scales = groups.abs().amax(2, keepdim=True) / 127
    return ((groups / scales).round() * scales).flatten(1)


def by_definition(layer, x, residual, kind, bits):
    weight = quantize(layer.weight, bits)
    out = rounded(x, weight.group_size) @ weight.widened().double().T
    if layer.bias is not None:
        out = out + layer.bias.double()
    return KINDS[kind][1](out, residual.double())


def example(size, *, bias=True):
    torch.manual_seed(0)
    num_in, num_out = size
    x, residual = torch.randn(70, num_in).bfloat16(), torch.randn(70, num_out).bfloat16()
    return nn.Linear(num_in, num_out, bias=bias).requires_grad_(False), x, residual


def error(out, expected):
    return (out.double() - expected).abs().max() / expected.abs().max()


@torch.inference_mode()
@BITS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_computes_its_definition_and_a_row_has_the_same_bits_alone_and_in_any_batch(size, kind, bias, bits):
    layer, x, residual = example(size, bias=bias)
    given = {"residual": residual} if kind == "residual" else {}
    kernel = kernel_of(layer.bfloat16(), bits, kind)
    out = kernel(x, **given)
    assert error(out, by_definition(layer, x, residual, kind, bits)) < 2**-7  # rounding to bfloat16, once or twice
    for start, stop in ((0, 1), (69, 70), (3, 5), (0, 16), (10, 43), (1, 8)):
        some = {name: array[start:stop] for name, array in given.items()}
        assert torch.equal(kernel(x[start:stop], **some), out[start:stop])


@torch.inference_mode()
@BITS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2**-20), (torch.float16, 2**-10)])
def test_rows_may_be_float32_or_float16(dtype, tolerance, bits):
    layer, x, residual = example(SIZES[-1])
    x, residual = x.to(dtype) + 2**-10, residual.to(dtype)  # numbers that bfloat16 does not have
    out = kernel_of(layer.to(dtype), bits, "residual")(x, residual=residual)
    assert out.dtype == dtype
    assert error(out, by_definition(layer, x, residual, "residual", bits)) < tolerance


@torch.inference_mode()
@BITS
def test_the_comparison_would_notice_a_lost_bias_a_wrong_scale_and_a_wrong_zero(bits):
    layer, x, residual = example((256, 50))
    expected = by_definition(layer.bfloat16(), x, residual, "plain", bits)
    quantized = kernel_of(layer, bits)
    assert error(quantized(x), expected) < 2**-7
    for index in range(3):  # weight, scales, zeros
        wrong = kernel_of(layer, bits)
        wrong._packed._arrays[index].view(-1)[:32] += 30
        assert error(wrong(x), expected) > 2**-7
    assert error(quantized(x).double() - layer.bias, expected) > 2**-7


@torch.inference_mode()
def test_eight_bits_by_hand():
    """Weights 1.27, -0.64 and 0 have a scale of 0.01 and the integers 127, -64 and 0, above the zero of 128."""
    weight = torch.zeros(2, 32)
    weight[0, :2] = torch.tensor([1.27, -0.64])
    found = quantize(weight, 8)
    assert (found.group_size, found.integers[0, :3].tolist()) == (32, [255, 64, 128])
    torch.testing.assert_close(found.widened(), weight)


@torch.inference_mode()
def test_four_bits_by_hand():
    """Weights from -0.5 to 1 have steps of 0.1, and 0 is the integer 5. A group of zeros stays zeros."""
    weight = torch.zeros(1, 64 * 2)
    weight[0, :4] = torch.tensor([-0.5, 1.0, 0.3, -0.1])
    found = quantize(weight, 4)
    assert (found.group_size, found.zeros.tolist()) == (64, [[5, 0]])
    assert found.integers[0, :5].tolist() == [0, 15, 8, 4, 5]
    torch.testing.assert_close(found.widened(), weight)


@torch.inference_mode()
@BITS
def test_no_weight_moves_by_more_than_a_step_and_most_by_less_than_half_of_one(bits):
    weight = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    found = quantize(weight, bits)
    steps = (found.widened() - weight).abs() / found.scales.repeat_interleave(found.group_size, dim=1)
    assert steps.max() < 1
    assert steps.quantile(0.95) < 0.51


@torch.inference_mode()
@BITS
def test_a_row_that_is_not_finite_stays_so_and_changes_no_other_row(bits):
    layer, x, _ = example((96, 40))
    quantized = kernel_of(layer.bfloat16(), bits)
    expected = quantized(x[:3])
    x[0, 5], x[2, 90] = float("nan"), float("inf")
    out = quantized(x[:3])
    assert not out[0].isfinite().any()
    assert not out[2].isfinite().any()
    assert torch.equal(out[1], expected[1])
    assert quantized(torch.zeros(1, 96, dtype=torch.bfloat16)).equal(layer.bias.unsqueeze(0))


@torch.inference_mode()
@pytest.mark.parametrize(("bits", "limit"), [(8, 1.05), (4, 0.6)])
def test_the_bytes_per_weight(bits, limit):
    held = sum(array.nbytes for array in kernel_of(nn.Linear(768, 3072, bias=False), bits)._packed._arrays)
    assert held < limit * 768 * 3072


@torch.inference_mode()
@BITS
def test_the_plain_layer_widens_the_weights_to_the_same_numbers(bits):
    layer, x, _ = example((256, 50))
    layer = layer.bfloat16()
    expected = x.double() @ quantize(layer.weight, bits).widened().double().T + layer.bias.double()
    assert error(QuantizedLinear(layer, bits)(x), expected) < 2**-6


@torch.inference_mode()
@BITS
def test_without_a_compiler_a_quantised_model_runs_in_its_plain_layers_and_one_warning_says_so(bits, monkeypatch, caplog):
    def fail(*source, structures=()):
        raise UnsupportedError("no C++ compiler works (there is no g++); install g++ or clang++, or name one in CXX")

    monkeypatch.setattr("nanoinfer.fast.cpu.native.load", fail)
    llm = LLM(quantization=f"int{bits}", kv_cache_memory=2**24)
    assert isinstance(llm.engine.executor.runner.model.lm_head, QuantizedLinear)
    assert len(llm.generate([5, 6, 7], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids) == 3
    assert caplog.text.count("the model runs without its C++ kernels, which are faster: no C++ compiler works") == 1


def test_what_few_bits_cannot_do_is_refused():
    needs = "weights in 8 or 4 bits need layers with inputs in multiples of 32, and 0 has 50; leave out quantization"
    for quantize_layers in (compile_model, quantize_model):
        with pytest.raises(UnsupportedError, match=needs):
            quantize_layers(nn.Sequential(nn.Linear(50, 8)), "int4")
    with pytest.raises(InvalidValueError, match="quantization must be None, 'int8' or 'int4', got 'int2'"):
        LLM(quantization="int2")
    for name in ("int8", "int4"):
        with pytest.raises(InvalidValueError, match=f"'{name}' computes in bfloat16, got dtype='float32'; leave dtype out"):
            LLM(quantization=name, dtype="float32")
    with pytest.raises(UnsupportedError, match=r"rows of 32 numbers in torch\.bfloat16, got \(1, 32\) in torch\.float32"):
        kernel_of(nn.Linear(32, 8).bfloat16(), 8)(torch.zeros(1, 32))


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-qwen3"])
def test_a_model_in_few_bits_has_nearly_the_same_loss_and_the_same_tokens_in_any_batch(model):
    """Loss: of text that the model itself wrote in fp32 at temperature 1, by the prompt's log-probabilities."""
    plain = LLM(model, dtype="float32")
    starts = [plain.engine.tokenizer.encode(f"Once upon a time, there was {a}") for a in ("a", "an", "a kind", "a brave")] * 8
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=60, detokenize=False) for i in range(len(starts))]
    written = plain.generate(starts, params, use_tqdm=False)
    texts = [start + output.outputs[0].token_ids for start, output in zip(starts, written, strict=True)]

    def losses(llm):
        scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        scored = zip(texts, llm.generate(texts, scoring, use_tqdm=False), strict=True)
        return [-row[ids[i]].logprob for ids, output in scored for i, row in enumerate(output.prompt_logprobs) if row]

    expected = mean(losses(plain))
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    # Measured over 13,500 tokens: +0.01% and +0.02% in 8 bits, +1.3% and +0.9% in 4 (bf16 alone: +0.08% and 0.00%).
    for quantization, limit in (("int8", 0.005), ("int4", 0.03)):
        llm = LLM(model, quantization=quantization)
        assert abs(mean(losses(llm)) / expected - 1) < limit
        assert llm.batch_independent
        together = llm.generate(texts[:6], greedy, use_tqdm=False)
        for text, output in zip(texts[:6], together, strict=True):
            assert llm.generate(text, greedy, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids
