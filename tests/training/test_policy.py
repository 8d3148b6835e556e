"""A trainer's log-probabilities are the sampler's, bit by bit, and its gradients are torch's."""

import itertools
import random

import pytest
import tiny_models
import torch
from torch import nn
from torch.autograd import gradcheck

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.fuse import FusedLinear, FusedRotation
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.models.layers import RMSNorm
from nanoinfer.training.functions import KernelFunction, TrainedAttention, TrainedLinear, TrainedNorm, TrainedRotation
from nanoinfer.training.policy import Policy

pytestmark = pytest.mark.usefixtures("kernels")

GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape):
    return torch.randn(shape, generator=GENERATOR)


def filled(module):
    for parameter in module.parameters():
        parameter.data = numbers(*parameter.shape)
    return module


def linear(activation, *others, num=1, bias=True):
    linears = [filled(nn.Linear(16, 8, bias=bias)) for _ in range(num)]
    parameters = [getattr(one, name) for one in linears for name in ("weight", "bias")]
    module = TrainedLinear(FusedLinear(*linears, activation=activation), others)
    given = {name: numbers(5, 8 * num) for name in others}
    return module, (numbers(5, 16), given), [*given.values(), *parameters]


def norm(module):
    return TrainedNorm(filled(module)), (numbers(5, 16), {}), list(module.parameters())


def rotation(has_norm):
    fused = FusedRotation(filled(RMSNorm(16, 1e-5)) if has_norm else None)
    cos, sin = numbers(5, 1, 8).repeat(1, 1, 2), numbers(5, 1, 8).repeat(1, 1, 2)
    return TrainedRotation(fused), (numbers(5, 3, 16), {"cos": cos, "sin": sin}), [cos, sin, *fused.parameters()]


CASES = {
    "linear": lambda: linear(None),
    "merged without biases": lambda: linear(None, num=3, bias=False),
    "silu times factor plus residual": lambda: linear("silu", "factor", "residual"),
    "gelu": lambda: linear("gelu_tanh"),
    "rms norm": lambda: norm(RMSNorm(16, 1e-5)),
    "layer norm": lambda: norm(nn.LayerNorm(16)),
    "rotation": lambda: rotation(has_norm=False),
    "rotation after a norm": lambda: rotation(has_norm=True),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_is_the_kernel_and_backward_the_derivative_of_its_definition(case):
    module, (x, others), rest = CASES[case]()
    with torch.no_grad():
        assert torch.allclose(module(x, **others), module.plain(x, *rest), rtol=1e-4, atol=1e-4)
    wide = [None if one is None else one.detach().double().requires_grad_() for one in (x, *rest)]
    assert gradcheck(lambda *tensors: KernelFunction.apply(module.plain, module.plain, *tensors), wide)


def test_attention_has_the_derivative_of_its_definition():
    attention = TrainedAttention(DenseAttention(), [3, 1])
    q, k, v = (numbers(4, heads, 8).double().requires_grad_() for heads in (4, 2, 2))
    parts = [DenseAttention()(0, *(x[start:end] for x in (q, k, v))) for start, end in ((0, 3), (3, 4))]
    assert torch.allclose(attention.plain(q, k, v), torch.cat(parts).double(), atol=1e-6)
    assert gradcheck(lambda *tensors: KernelFunction.apply(attention.plain, attention.plain, *tensors), (q, k, v))


@pytest.mark.parametrize("family", ["gpt2", "qwen3_tied"])
def test_gradients_are_those_of_the_model_file(tmp_path, family):
    path = tiny_models.save(family, tmp_path)
    policy, plain = Policy(str(path), "float32"), load_model(Checkpoint.open(str(path)), "float32")
    for parameter in plain.parameters():
        parameter.data = parameter.clone()
        parameter.requires_grad_()
    sequences = [list(range(3, 20)), [5], [7, 8]]
    found = policy(sequences)
    assert [len(one) for one in found] == [16, 0, 1]
    wanted = []
    for ids in sequences:
        hidden = plain(torch.tensor(ids), torch.arange(len(ids)), DenseAttention())
        following = torch.tensor(ids[1:], dtype=torch.int64).unsqueeze(-1)
        wanted.append(plain.compute_logits(hidden[:-1]).log_softmax(-1).gather(-1, following).squeeze(-1))
    assert torch.allclose(torch.cat(found), torch.cat(wanted), atol=1e-3)
    for one in (found, wanted):
        torch.cat(one).exp().sum().backward()
    pairs = zip(policy.model.named_parameters(), plain.named_parameters(), strict=True)
    for (name, parameter), (_, other) in pairs:
        assert parameter.grad is not None, name
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-2, atol=1e-4 * other.grad.abs().max()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "qwen3_tied"])
def test_the_ratio_is_exactly_one_under_load_and_after_each_step(tmp_path, family, dtype):
    """n, top-p, penalties, preemptions, chunks and prefix hits change which tokens are drawn, and no log-probability."""
    path = tiny_models.save(family, tmp_path)
    rng = random.Random(0)
    shared = [rng.randrange(96) for _ in range(24)]
    prompts = [shared[: rng.randrange(1, 24)] + [rng.randrange(96) for _ in range(rng.randrange(1, 20))] for _ in range(8)]
    kinds = itertools.cycle([{"n": 2}, {"top_p": 0.8}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}, {"top_k": 5}])
    params = [SamplingParams(logprobs=0, max_tokens=16, seed=1, detokenize=False, **next(kinds)) for _ in prompts]
    settings = {"kv_cache_memory": 2**17, "max_model_len": 64, "chunk_size": 16, "max_num_batched_tokens": 48, "block_size": 4}
    policy = Policy(str(path), dtype)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)  # which counts no version of a tensor
    with LLM(path, dtype=dtype, batch_invariant=True, **settings) as llm:
        events = 0
        for version in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            events += sum(one.num_cached_tokens + one.metrics.num_preemptions for one in outputs)
            answers = [(one.prompt_token_ids, answer) for one in outputs for answer in one.outputs]
            found = policy([ids + answer.token_ids for ids, answer in answers])
            for logprobs, (_, answer) in zip(found, answers, strict=True):
                old = [entry[i].logprob for entry, i in zip(answer.logprobs, answer.token_ids, strict=True)]
                ratio = (logprobs[-len(old) :].detach().double() - torch.tensor(old, dtype=torch.float64)).exp()
                assert ratio.tolist() == [1.0] * len(old)
            torch.cat(found).mean().backward()
            optimizer.step()
            moved = policy([ids + answer.token_ids for ids, answer in answers])
            assert not torch.equal(torch.cat(moved), torch.cat(found)), "another policy has other numbers"
            assert llm.update_weights(policy.weights()) == version + 1
        assert events > 0


def test_models_without_all_gradients_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"no gradients of zero-centred norms"):
        Policy(str(tiny_models.save("gemma3_window", tmp_path / "gemma")))
    with pytest.raises(UnsupportedError, match=r"layers.0.mlp.* cannot be traced.*train a model without experts"):
        Policy(str(tiny_models.save("qwen3_moe", tmp_path / "experts")))
