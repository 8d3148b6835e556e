"""Packed and 8-bit linear layers: the same numbers within their rounding, the same bits in any batch, refusals by name."""

import pytest
import torch
from torch import nn

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.models.cpu_linear import CLASSES, LinearOptimizer, PackedLinear
from nanoinfer.models.cpu_quantized import QUANTIZED, Int8Linear
from nanoinfer.models.optimize import optimize_for_cpu

KINDS = {  # arguments of an optimised layer, and what it computes of the plain layer's output and a residual
    "plain": ({}, lambda out, residual: out),
    "silu": ({"activation": "silu"}, lambda out, residual: nn.functional.silu(out)),
    "gelu_tanh": ({"activation": "gelu_tanh"}, lambda out, residual: nn.functional.gelu(out, approximate="tanh")),
    "residual": ({"adds_residual": True}, lambda out, residual: residual + out),
}


@torch.inference_mode()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("form", "dtype"), [(PackedLinear, "float32"), (PackedLinear, "bfloat16"), (Int8Linear, "bfloat16")])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_nearly_the_plain_layers_numbers(form, dtype, kind, bias):
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    options, definition = KINDS[kind]
    layer = nn.Linear(64, 96, bias=bias).to(dtype)
    x, residual = torch.randn(70, 64).to(dtype), torch.randn(70, 96).to(dtype)
    given = (x, residual) if kind == "residual" else (x,)
    linears = LinearOptimizer(QUANTIZED["int8"] if form is Int8Linear else CLASSES)
    optimised = linears.optimize(layer, **options)
    together = optimised(*given)
    for start, stop in ((0, 1), (69, 70), (3, 5), (0, 16), (10, 43)) if linears.report().are_rows_independent else ():
        assert torch.equal(optimised(*(x[start:stop] for x in given)), together[start:stop])
    expected = definition(layer.float()(x.float()), residual.float())
    tolerance = {PackedLinear: {torch.float32: 1e-6, torch.bfloat16: 0.02}, Int8Linear: {torch.bfloat16: 0.04}}[form][dtype]
    for out in (together, form(layer.to(dtype), **options)(*given)):
        assert (out.float() - expected).abs().max() < tolerance


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
    with pytest.raises(
        UnsupportedError, match="needs layers with inputs in multiples of 32, and 0 has 50; leave quantization out"
    ):
        optimize_for_cpu(nn.Sequential(nn.Linear(50, 8)), quantization="int8")
    with pytest.raises(InvalidValueError, match="quantization must be None or 'int8', got 'int4'"):
        LLM(quantization="int4")
    with pytest.raises(InvalidValueError, match="'int8' computes in bfloat16, got dtype='float32'; leave dtype out"):
        LLM(quantization="int8", dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-qwen3"])
def test_a_model_in_eight_bits_has_nearly_the_same_loss_and_the_same_tokens_in_any_batch(model):
    """Loss: of text that the model itself wrote in fp32 at temperature 1, by the prompt's log-probabilities."""
    plain, eight = LLM(model), LLM(model, quantization="int8")
    starts = [plain.engine.tokenizer.encode(f"Once upon a time, there was {a}") for a in ("a", "an", "a kind", "a brave")] * 8
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=60, detokenize=False) for i in range(len(starts))]
    texts = [
        start + output.outputs[0].token_ids
        for start, output in zip(starts, plain.generate(starts, params, use_tqdm=False), strict=True)
    ]
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    losses, likeliest = [], []
    for llm in (plain, eight):
        outputs = llm.generate(texts, scoring, use_tqdm=False)
        entries = [
            (ids[i], entry)
            for ids, output in zip(texts, outputs, strict=True)
            for i, entry in enumerate(output.prompt_logprobs)
            if entry
        ]
        losses.append(-sum(entry[token_id].logprob for token_id, entry in entries) / len(entries))
        likeliest.append([min(entry, key=lambda i, entry=entry: entry[i].rank) for _, entry in entries])
    agreement = sum(a == b for a, b in zip(*likeliest, strict=True)) / len(likeliest[0])
    # Measured over 13,500 tokens: loss +0.01% (bf16 alone: -0.05% to +0.04%), agreement 98.0% and 95.8% (97.9% and 96.3%).
    assert abs(losses[1] / losses[0] - 1) < 0.005
    assert agreement > 0.94
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    together = eight.generate(texts[:6], greedy, use_tqdm=False)
    for text, output in zip(texts[:6], together, strict=True) if eight.batch_independent else ():
        assert eight.generate(text, greedy, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids
