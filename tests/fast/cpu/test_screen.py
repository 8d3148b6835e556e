"""The screened LM head: its bounds hold for weights that are made to break them, and no token changes."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from nanoinfer import LLM, SamplingParams
from nanoinfer.fast.cpu import accelerate
from nanoinfer.fast.cpu.linear import KernelLinear, PackedLinear
from nanoinfer.fast.cpu.screen import UNIT, ScreenedLinear
from nanoinfer.fast.fuse import FusedLinear
from tests import fuzz
from tests.helpers import tiny_models

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INFINITY = float("inf")


def layer_of(weight, dtype):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False).requires_grad_(False).to(dtype)
    layer.weight.copy_(torch.as_tensor(weight))
    return layer


def screened(layer):
    return ScreenedLinear(FusedLinear(layer))


def hard_cases():
    """Yield a name, the weights of an id and a row: [n], in float64."""
    random, ones = np.random.default_rng(0), np.ones(256)
    halves = np.where(np.arange(256) == 0, 127, 126.5)  # rounded down to 126: half a scale too low, for every input but one
    yield "weights halfway between two integers", halves, ones
    yield "negative weights halfway", -halves, ones
    signs = np.where(np.arange(256) % 2, 1, -1)
    yield "signs that make every error add up", halves * signs, ones * signs
    is_outlier = np.arange(256) == 9
    x = np.where(is_outlier, 32512, 0.499)  # rounded to zero, for every input but one
    yield "a weight halfway at an outlier of x", np.where(is_outlier, 2.5, 127), x
    yield "an outlier in the weights", np.where(is_outlier, 1e4, random.normal(size=256)), random.normal(size=256)
    yield "groups that cancel", np.repeat([3.7, -3.7], 128), np.tile(random.normal(size=128), 2)
    yield "equal numbers", ones * 0.3, ones * 0.7
    yield "zeros", ones * 0, ones
    yield "x is zero", ones, ones * 0
    yield "denormal weights", ones * 3e-39, ones * 1e30
    yield "denormal x", ones, ones * 3e-39
    yield "denormal products", ones * 1e-20, ones * 1e-20
    yield "huge products", ones * 1e17, ones * 1e17
    yield "a sum that overflows before it is zero", np.repeat([1e37, -1e37], 64), ones[:128]
    yield "huge x", ones * 1e-20, ones * 1e36
    yield "normal numbers", random.normal(size=768), random.normal(size=768)
    yield "x with outliers", random.normal(size=768), random.normal(size=768) * np.exp(3 * random.normal(size=768))
    yield "uniform numbers", random.random(96), random.random(96)
    # Weights halfway, and after a first group with a large sum 3,968 products that are each rounded up by half a unit.
    size, group, unit = 4096, np.arange(4096) < 128, 2.0**-10
    weights = np.where(group, np.where(np.arange(size) == 0, 127, 126.5), 127)
    yield "sums that are always rounded up", weights, np.where(group, 0.5078125, 0.51 * unit / 127)


CASES = [pytest.param(weights, x, id=name) for name, weights, x in hard_cases()]


@torch.inference_mode()
@pytest.mark.parametrize(("weights", "x"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_sum_and_the_kernels_logit_are_between_the_bounds(weights, x, dtype):
    layer = layer_of(np.tile(weights, (UNIT, 1)), dtype)  # a bound is that of UNIT ids
    row = torch.as_tensor(x).to(dtype).unsqueeze(0)
    lowest, highest = (bound[0, 0].item() for bound in screened(layer).bounds(row))
    logit = KernelLinear(PackedLinear(FusedLinear(layer)))(row)[0, 0].item()
    assert lowest <= logit <= highest or (np.isnan(logit) and (lowest, highest) == (-INFINITY, INFINITY))
    if dtype is torch.float32:  # not rounded
        exact = sum(Fraction(a) * Fraction(b) for a, b in zip(layer.weight[0].tolist(), row[0].tolist(), strict=True))
        assert lowest == -INFINITY or Fraction(lowest) <= exact
        assert highest == INFINITY or Fraction(highest) >= exact


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bounds_are_close_to_the_logits(dtype):
    torch.manual_seed(0)
    layer, x = layer_of(torch.randn(4096, 256), dtype), torch.randn(3, 256).to(dtype)
    lowest, highest = screened(layer).bounds(x)
    spread = layer(x.to(dtype)).float().std()
    assert (highest - lowest).mean() < 0.4 * spread


@torch.inference_mode()
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 5000), (256, 1003), (96, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3, 40])
def test_the_largest_logits_and_their_ties_have_the_bits_of_the_plain_head(num_in, num_out, dtype, k):
    torch.manual_seed(0)
    weight = torch.randn(num_out, num_in)
    weight[num_out // 2 :] = weight[: num_out - num_out // 2].clone()  # every logit is there twice
    layer, x = layer_of(weight, dtype), torch.randn(9, num_in).to(dtype)
    head, plain = screened(layer), KernelLinear(PackedLinear(FusedLinear(layer)))(x)
    for rows in (slice(0, 1), slice(1, 3), slice(0, 9)):
        found, expected = head.largest_logits(x[rows], k), plain[rows]
        is_left_out = found == -INFINITY
        assert torch.equal(found[~is_left_out], expected[~is_left_out])
        smallest = expected.float().topk(k).values[:, -1:]
        assert not (is_left_out & (expected >= smallest)).any()
        if num_out == 5000 and k == 1:
            assert is_left_out.float().mean() > 0.5


@torch.inference_mode()
@pytest.mark.parametrize("special", [float("nan"), INFINITY, -INFINITY, 3e38])
@pytest.mark.parametrize("place", ["x", "weight"])
def test_a_row_without_bounds_has_all_logits(special, place):
    torch.manual_seed(0)
    layer, x = layer_of(torch.randn(100, 64), torch.float32), torch.randn(2, 64)
    (x if place == "x" else layer.weight)[1, 5] = special
    found, plain = screened(layer).largest_logits(x, 1), KernelLinear(PackedLinear(FusedLinear(layer)))(x)
    if place == "x":
        torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)
    else:
        torch.testing.assert_close(found[:, :16], plain[:, :16], rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def for_any_size(monkeypatch):
    monkeypatch.setattr(accelerate, "LEAST_BYTES", 0)


REQUESTS = [
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "logit_bias": {7: 3.0}, "repetition_penalty": 1.3},
    {"temperature": 1, "top_p": 0.9},
    {"temperature": 0, "logprobs": 2},
]


SIZES = {"vocab_size": 2048, "n_embd": 96, "n_head": 8}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


@pytest.mark.parametrize(("dtype", "speculative"), [("float32", None), ("bfloat16", DRAFTS)])
def test_an_engine_gives_the_same_tokens_also_after_an_update(tmp_path, for_any_size, monkeypatch, dtype, speculative):
    sizes_of_steps = []

    def counted(head, x, k, compute=ScreenedLinear.largest_logits):
        sizes_of_steps.append((len(x), k))
        return compute(head, x, k)

    monkeypatch.setattr(ScreenedLinear, "largest_logits", counted)
    folder, other = tiny_models.save("gpt2", tmp_path, **SIZES), tiny_models.build("gpt2", seed=1, **SIZES)
    params = [SamplingParams(max_tokens=12, seed=1, detokenize=False, **request) for request in REQUESTS]
    prompts = [{"prompt_token_ids": [3, 4, 5, 3, 4]}] * len(params)
    answers = []
    for screened_head in (True, False):
        arguments = {"dtype": dtype, "speculative_config": speculative, "screened_head": screened_head}
        llm = LLM(str(folder), skip_tokenizer_init=True, kv_cache_memory=2**22, max_num_seqs=1, **arguments)
        before = llm.generate(prompts, params, use_tqdm=False)
        llm.update_weights(other.named_parameters())
        after = llm.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in (*before, *after)])
        expected = {(1, 1), (4, 1), (1, 5)} if speculative else {(1, 1), (1, 5)}
        assert set(sizes_of_steps) >= expected if screened_head else not sizes_of_steps
        sizes_of_steps.clear()
    assert answers[0] == answers[1]


def test_the_fuzz_test_finds_a_bound_that_is_too_tight(tmp_path, monkeypatch):
    """The copy keeps three of its eight bits, so that it is farther from the weights than the bound says."""
    model = str(tiny_models.save("gpt2", tmp_path, **SIZES))
    drafts = {"none": None, "own": fuzz.DRAFTS["own"]}
    counts = fuzz.compare_paths(model, 6, random.Random(1), "bfloat16", drafts)
    assert counts["tokens"] > 200
    assert counts["logits left out"] > 10_000
    assert not any(count for what, count in counts.items() if what.startswith("different"))
    write = ScreenedLinear.write

    def write_too_few_bits(head, *given):
        write(head, *given)
        head._words.view(torch.uint8).bitwise_and_(0xE0)

    monkeypatch.setattr(ScreenedLinear, "write", write_too_few_bits)
    counts = fuzz.compare_paths(model, 6, random.Random(1), "bfloat16", drafts)
    assert counts["different logits"] > 100
    assert counts["different tokens"] > 20


def head_of(compute=None, num_in=64, *, bias=False):
    """A model whose logits are compute(head, hidden). None: those of its head."""
    model = nn.Module()
    model.head = nn.Linear(num_in, 100, bias=bias)
    model.compute_logits = lambda hidden: compute(model.head, hidden) if compute else model.head(hidden)
    return model


def test_a_head_is_screened_only_if_its_logits_are_the_models(for_any_size, monkeypatch):
    plain = head_of()
    assert accelerate.screened_head(plain) is plain.head
    for other in (
        head_of(lambda head, hidden: head(hidden) * 2),
        head_of(lambda head, hidden: head(hidden).mul_(2)),
        head_of(lambda head, hidden: head(hidden[:, :64])),
        head_of(lambda head, hidden: head(hidden) if hidden.sum() > 0 else hidden),
        head_of(num_in=63),
        head_of(bias=True),
    ):
        assert accelerate.screened_head(other) is None
    plain.head.register_forward_hook(lambda *_: None)
    assert accelerate.screened_head(plain) is None
    monkeypatch.setattr(accelerate, "available_cpu_memory", lambda: 100 * 64 * 5 - 1)
    assert accelerate.screened_head(head_of()) is None
    monkeypatch.undo()
    assert accelerate.screened_head(head_of()) is None  # it is small
