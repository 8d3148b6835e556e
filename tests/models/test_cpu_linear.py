"""Packed and 8-bit linear layers: the same numbers within their rounding, the same bits in any batch, refusals by name."""

import pytest
import torch
from torch import nn

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.models.cpu_linear import Int8Linear, PackedLinear, pack, quantize
from nanoinfer.models.layers import ActivatedLinear, ResidualLinear

KINDS = {
    "plain": lambda bias: nn.Linear(64, 96, bias=bias),
    "silu": lambda bias: ActivatedLinear(64, 96, bias=bias, activation="silu"),
    "gelu_tanh": lambda bias: ActivatedLinear(64, 96, bias=bias, activation="gelu_tanh"),
    "residual": lambda bias: ResidualLinear(64, 96, bias=bias),
}


def arguments(kind, num_rows, dtype):
    x, residual = torch.randn(num_rows, 64).to(dtype), torch.randn(num_rows, 96).to(dtype)
    return (x, residual) if kind == "residual" else (x,)


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("form", "dtype"), [(PackedLinear, "float32"), (PackedLinear, "bfloat16"), (Int8Linear, "bfloat16")])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_nearly_the_plain_layers_numbers(form, dtype, kind, bias):
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    layer = KINDS[kind](bias).to(dtype)
    other = form(layer)
    given = arguments(kind, 70, dtype)
    together, expected = other(*given), layer.float()(*(x.float() for x in given))
    tolerance = {PackedLinear: {torch.float32: 1e-6, torch.bfloat16: 0.02}, Int8Linear: {torch.bfloat16: 0.04}}[form][dtype]
    assert (together.float() - expected).abs().max() < tolerance
    made = nn.Sequential(KINDS[kind](bias).to(dtype))
    report = (quantize if form is Int8Linear else pack)(made)
    together = made[0](*given)
    for start, stop in ((0, 1), (69, 70), (3, 5), (0, 16), (10, 43)) if report.are_rows_independent else ():
        assert torch.equal(made[0](*(x[start:stop] for x in given)), together[start:stop])


@torch.inference_mode()
def test_eight_bits_by_hand():
    """Weights 1.27, -0.635, 0 and a row of zeros: a scale of 0.01 rounded to bfloat16, and the integers that fit it."""
    layer = nn.Linear(16, 2, bias=False)
    layer.weight.zero_()
    layer.weight[0, :3] = torch.tensor([1.27, -0.635, 0.0])
    eight = Int8Linear(layer)
    scale = torch.tensor(0.01).bfloat16().item()
    assert eight._scale[0].item() == scale
    assert eight._weight[0, :3].tolist() == [127, round(-0.635 / scale), 0]
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    assert eight(x).tolist() == [[torch.tensor(127 * scale).bfloat16().item(), 0.0]]


@torch.inference_mode()
def test_the_comparison_would_notice_a_lost_bias_and_a_scale_of_the_wrong_row():
    torch.manual_seed(0)
    layer = nn.Linear(64, 96)
    x = torch.randn(70, 64)
    eight = Int8Linear(layer)
    eight._scale = eight._scale.roll(1)
    assert (eight(x.bfloat16()).float() - layer(x)).abs().max() > 0.04
    assert (Int8Linear(layer)(x.bfloat16()).float() - eight._bias - layer(x)).abs().max() > 0.04


def test_what_eight_bits_cannot_do_is_refused():
    with pytest.raises(UnsupportedError, match="needs layers with inputs in multiples of 32, and 0 has 50; leave it out"):
        quantize(nn.Sequential(nn.Linear(50, 8)))
    with pytest.raises(InvalidValueError, match="quantization must be None or 'int8', got 'int4'"):
        LLM(quantization="int4")
    with pytest.raises(InvalidValueError, match="'int8' computes in bfloat16, got dtype='float32'; leave dtype out"):
        LLM(quantization="int8", dtype="float32")


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-qwen3"])
def test_a_model_in_eight_bits_tells_nearly_the_same_and_the_same_in_any_batch(model):
    """Loss: of text that the model itself wrote in fp32 at temperature 1, by the prompt's log-probabilities."""
    plain, eight = LLM(model), LLM(model, quantization="int8")
    starts = [plain.engine.tokenizer.encode(f"Once upon a time, there was {a}") for a in ("a", "an", "a kind", "a brave")] * 8
    ask = [SamplingParams(temperature=1.0, seed=i, max_tokens=60, detokenize=False) for i in range(len(starts))]
    texts = [
        start + output.outputs[0].token_ids
        for start, output in zip(starts, plain.generate(starts, ask, use_tqdm=False), strict=True)
    ]
    look = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    losses, likeliest = [], []
    for llm in (plain, eight):
        outputs = llm.generate(texts, look, use_tqdm=False)
        told = [(ids[i], one) for ids, o in zip(texts, outputs, strict=True) for i, one in enumerate(o.prompt_logprobs) if one]
        losses.append(-sum(one[token_id].logprob for token_id, one in told) / len(told))
        likeliest.append([min(one, key=lambda i, one=one: one[i].rank) for _, one in told])
    agreement = sum(a == b for a, b in zip(*likeliest, strict=True)) / len(likeliest[0])
    # Measured over 13,500 tokens: loss +0.01% (bf16 alone: -0.05% to +0.04%), agreement 98.0% and 95.8% (97.9% and 96.3%).
    assert abs(losses[1] / losses[0] - 1) < 0.005
    assert agreement > 0.94
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    together = eight.generate(texts[:6], greedy, use_tqdm=False)
    for text, output in zip(texts[:6], together, strict=True) if eight.batch_independent else ():
        assert eight.generate(text, greedy, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids
