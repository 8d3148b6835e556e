"""A trainer's log-probabilities are the sampler's, bit by bit, and its gradients are torch's."""

import random

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from nanoinfer.fast.fuse import FusedLinear, FusedRotation
from nanoinfer.features.policy import functions
from nanoinfer.features.policy.functions import KernelFunction, TrainedAttention, TrainedLinear, TrainedModule
from nanoinfer.features.policy.policy import Policy
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.models.layers import RMSNorm, ZeroCentredRMSNorm
from tests import ratio_under_load
from tests.helpers import tiny_models

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
    module = TrainedLinear(FusedLinear(*linears, activation=activation), others)
    return module, [numbers(5, 16)], {name: numbers(5, 8 * num) for name in others}, linears


def norm(module):
    return TrainedModule(filled(module), functions.normalize), [numbers(5, 16)], {}, [module]


def rotation(has_norm):
    fused = FusedRotation(filled(RMSNorm(16, 1e-5)) if has_norm else None)
    cos, sin = numbers(5, 1, 8).repeat(1, 1, 2), numbers(5, 1, 8).repeat(1, 1, 2)
    return TrainedModule(fused, functions.rotate), [numbers(5, 3, 16), cos, sin], {}, [fused]


CASES = {
    "linear": lambda: linear(None),
    "merged without biases": lambda: linear(None, num=3, bias=False),
    "silu times factor plus residual": lambda: linear("silu", "factor", "residual"),
    "gelu": lambda: linear("gelu_tanh"),
    "rms norm": lambda: norm(RMSNorm(16, 1e-5)),
    "zero-centred rms norm": lambda: norm(ZeroCentredRMSNorm(16, 1e-5)),
    "layer norm": lambda: norm(nn.LayerNorm(16)),
    "rotation": lambda: rotation(has_norm=False),
    "rotation after a norm": lambda: rotation(has_norm=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_forward_is_the_kernel_and_backward_the_derivative_of_its_definition(case, monkeypatch):
    trained, inputs, others, modules = CASES[case]()
    with torch.no_grad():
        assert torch.allclose(trained(*inputs, **others), trained.plain(*inputs, **others), rtol=1e-4, atol=1e-4)
    parameters = [parameter for module in modules for parameter in module.double().parameters()]
    given = [x.double().requires_grad_() for x in (*inputs, *others.values())]
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # in which an RMSNorm computes its mean

    def plain(*tensors):
        return trained.plain(*tensors[: len(inputs)], **dict(zip(others, tensors[len(inputs) :], strict=True)))

    def compute(*tensors):
        return KernelFunction.apply(plain, plain, len(given), *tensors)

    assert gradcheck(compute, (*given, *parameters))


def test_attention_has_the_derivative_of_its_definition():
    attention = TrainedAttention(DenseAttention(), [3, 1])
    q, k, v = (numbers(4, heads, 8).double().requires_grad_() for heads in (4, 2, 2))
    parts = [DenseAttention()(0, *(x[start:end] for x in (q, k, v))) for start, end in ((0, 3), (3, 4))]
    assert torch.allclose(attention.plain(q, k, v), torch.cat(parts).double(), atol=1e-6)
    assert gradcheck(lambda *tensors: KernelFunction.apply(attention.plain, attention.plain, 3, *tensors), (q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3_tied"])
def test_gradients_are_those_of_the_model_file(tmp_path, family):
    path = tiny_models.save(family, tmp_path)
    policy, plain = Policy(path, "float32"), load_model(Checkpoint.open(str(path)), "float32")
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


RATIOS = [
    pytest.param(family, dtype, marks=[pytest.mark.long] * ((i + j) % 2))
    for i, family in enumerate(["gpt2", "qwen3", "qwen3_tied"])
    for j, dtype in enumerate(["float32", "bfloat16"])
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), RATIOS)
def test_the_ratio_is_exactly_one_under_load_and_after_each_step(tmp_path, family, dtype):
    path = str(tiny_models.save(family, tmp_path))
    rng, policy, events = random.Random(0), Policy(path, dtype), 0
    settings = {"kv_cache_memory": 2**17, "max_model_len": 64, "chunk_size": 16, "max_num_batched_tokens": 48, "block_size": 4}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, fused=True)  # which counts no version of a tensor
    with LLM(path, dtype=dtype, batch_invariant=True, **settings) as llm:
        for version in range(2):
            outputs = ratio_under_load.sample(llm, rng, num_prompts=6, num_ids=96, longest=28)
            events += sum(one.num_cached_tokens + one.metrics.num_preemptions for one in outputs)
            answers = ratio_under_load.answers_of(outputs)
            found = policy([ids for ids, _ in answers])
            assert set(ratio_under_load.ratios(answers, found)) == {1.0}
            torch.cat(found).mean().backward()
            optimizer.step()
            moved = policy([ids for ids, _ in answers])
            assert set(ratio_under_load.ratios(answers, moved)) != {1.0}, "another policy has other numbers"
            assert llm.update_weights(policy.weights()) == version + 1
        assert events > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_with_the_masks_the_ratio_is_exactly_one_where_top_p_and_bans_leave_few_ids(tmp_path, dtype):
    path = str(tiny_models.save("qwen3_tied", tmp_path))
    few = {"allowed_token_ids": list(range(40))}  # the largest logit is often not among them
    kinds = [{"top_p": 0.8}, {"min_p": 0.05} | few, {"top_k": 5} | few, few]
    shared = {"n": 4, "seed": 1, "max_tokens": 12, "detokenize": False, "logprobs": 0, "return_sampling_mask": True}
    params, policy = [SamplingParams(temperature=0.7, **shared, **kind) for kind in kinds], Policy(path, dtype)
    with LLM(path, dtype=dtype, batch_invariant=True, logprobs_mode="processed", kv_cache_memory=2**21) as llm:
        outputs = llm.generate([[5, 6, 7], [8, 9] * 9, [3], [7]], params, use_tqdm=False)
    answers = ratio_under_load.answers_of(outputs)
    texts, masks = [ids for ids, _ in answers], [one.sampling_mask for _, one in answers]
    found, without = policy([*texts, [1]], temperature=0.7, masks=[*masks, []]), policy(texts, temperature=0.7)
    assert set(ratio_under_load.ratios(answers, found[:-1])) == {1.0}
    assert min(ratio_under_load.ratios(answers, without)) < 1
    for with_mask, other in zip(found, without, strict=False):
        assert torch.equal(with_mask[:-12], other[:-12]), "the prompt has no mask"
    torch.cat(found).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters())


def test_models_without_all_gradients_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"windows or states"):
        Policy(tiny_models.save("gemma3_window", tmp_path / "gemma"))
    with pytest.raises(UnsupportedError, match=r"layers.0.mlp.* cannot be traced.*train a model without experts"):
        Policy(tiny_models.save("qwen3_moe", tmp_path / "experts"))


REFUSED = [
    (["Once"], {}, InvalidTypeError, r"list of token ids, got 'Once'; a tokenizer encodes text"),
    ([5, 6], {}, InvalidTypeError, r"list of token ids, got 5"),
    ([[5.0, 6.0]], {}, InvalidTypeError, r"list of token ids, got \[5\.0, 6\.0\]"),
    ([[5, 96]], {}, InvalidValueError, r"token ids are 0 \.\. 95, got \[5, 96\]"),
    ([[5, -1]], {}, InvalidValueError, r"token ids are 0 \.\. 95"),
    ([[5] * 5000], {}, InvalidValueError, r"at most \d+ tokens.*got 5000 tokens"),
    ([[5, 6]], {"temperature": 0}, InvalidValueError, r"temperature must be finite and > 0, got 0"),
    ([[5, 6]], {"masks": []}, InvalidValueError, r"masks must be one per sequence, got 0 for 1"),
    ([[5, 6]], {"masks": [None]}, InvalidTypeError, r"sampling_mask, got None; set return_sampling_mask"),
    ([[5, 6]], {"masks": [["a"]]}, InvalidTypeError, r"entry of a mask must be a list of token ids, got 'a'"),
    ([[5, 6]], {"masks": [[[-1]]]}, InvalidValueError, r"ids are 0 \.\. 95, got \[-1\]"),
    ([[5, 6], [7, 8]], {"masks": [[], [[8], [8]]]}, InvalidValueError, r"got 2 tokens and a mask of 2"),
]


def test_sequences_that_would_give_other_numbers_are_refused_and_a_tensor_of_ids_is_a_sequence(tmp_path):
    small_policy = Policy(tiny_models.save("qwen3_tied", tmp_path), "float32")
    assert torch.equal(small_policy([torch.tensor([5, 6, 7])])[0], small_policy([[5, 6, 7]])[0])
    for sequences, more, error, message in REFUSED:
        with pytest.raises(error, match=message):
            small_policy(sequences, **more)
