"""A model and its compiled forward pass give the same numbers: our families, and model files of a stranger's."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.fast.batch_independence import scratch_sequences
from nanoinfer.fast.cpu import compile as module
from nanoinfer.fast.cpu.accelerate import compile_model
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.cpu.linear import KernelLinear, PackedLinear
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.models.layers import (
    Embedding,
    RMSNorm,
    RotaryEmbedding,
    ZeroCentredRMSNorm,
    apply_rotary,
    partial_rotary,
    sigmoid,
)
from nanoinfer.models.rope import RopeConfig
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan
from tests.helpers import tiny_models

pytestmark = pytest.mark.usefixtures("kernels")
WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS = 64, 4, 2, 16, 96, 100, 2
IDS = torch.arange(1, 14) * 31 % VOCAB
POSITIONS = torch.arange(len(IDS))


# ---- what a stranger may write


class Attention(nn.Module):
    def __init__(self, index, *, norms_heads=False):
        super().__init__()
        self.index = index
        self.query = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.key = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.value = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        if norms_heads:
            self.query_norm, self.key_norm = RMSNorm(HEAD_DIM, 1e-6), RMSNorm(HEAD_DIM, 1e-6)

    def forward(self, h, c, s, attention):
        q = self.query(h).view(h.shape[0], HEADS, HEAD_DIM)
        k = self.key(h).reshape(-1, KV_HEADS, HEAD_DIM)
        v = self.value(h).unflatten(1, (-1, HEAD_DIM))
        if hasattr(self, "query_norm"):
            q, k = self.query_norm(q), self.key_norm(k)
        return self.out(attention(self.index, apply_rotary(q, c, s), apply_rotary(k, c, s), v).reshape(len_of(h), -1))


def len_of(h):
    return h.size(0)


class MergedAttention(Attention):
    def __init__(self, index):
        super().__init__(index)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)

    def forward(self, h, c, s, attention):
        heads = self.qkv(h).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = apply_rotary(q, c, s), apply_rotary(k, c, s)
        return self.out(attention(self.index, q, k, v).flatten(1))


class Unrotated(Attention):
    """The queries before their rotation are read again, so they cannot be rotated in place."""

    def forward(self, h, c, s, attention):
        q = self.query(h).view(-1, HEADS, HEAD_DIM)
        k = self.key(h).view(-1, KV_HEADS, HEAD_DIM)
        v = self.value(h).view(-1, KV_HEADS, HEAD_DIM)
        out = attention(self.index, apply_rotary(q, c, s), apply_rotary(k, c, s), v)
        return self.out((out + q).flatten(1))


class GatedAttention(Attention):
    """A gate beside each query, in the same rows of the weight, and a rotation of a part of each head, as in Qwen3.5."""

    def __init__(self, index):
        super().__init__(index)
        self.query = nn.Linear(WIDTH, 2 * HEADS * HEAD_DIM, bias=False)
        self.query_norm, self.key_norm = (ZeroCentredRMSNorm(HEAD_DIM, 1e-6) for _ in range(2))

    def forward(self, h, c, s, attention):
        q, gate = self.query(h).unflatten(-1, (HEADS, -1)).chunk(2, dim=-1)
        q, k = self.query_norm(q), self.key_norm(self.key(h).unflatten(-1, (KV_HEADS, -1)))
        out = attention(self.index, self.rotated(q, c, s), self.rotated(k, c, s), self.value(h).unflatten(-1, (KV_HEADS, -1)))
        return self.out((out * sigmoid(gate)).flatten(1))

    def rotated(self, x, c, s):
        size = HEAD_DIM // 4
        return partial_rotary(x, c[..., :size], s[..., :size], size)


class SwappedParts(GatedAttention):
    """What is not rotated comes first, so the two parts are no partial rotation."""

    def rotated(self, x, c, s):
        return torch.cat((x[..., 4:], apply_rotary(x[..., :4], c[..., :4], s[..., :4])), -1)


class MLP(nn.Module):
    def __init__(self, *, second_class=nn.Linear):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.w2 = second_class(INNER, WIDTH, bias=False)

    def forward(self, h):
        return self.w2(self.w3(h) * F.silu(self.w1(h)))


class BranchingMLP(MLP):
    def forward(self, h):
        return super().forward(h) if h.sum() < 1e9 else h


class DoubledLinear(nn.Linear):
    """A subclass of a linear layer, which is left alone."""

    def forward(self, x):
        return 2 * super().forward(x)


class Layer(nn.Module):
    def __init__(self, index, attention=Attention, mlp=MLP):
        super().__init__()
        self.first, self.second, self.third = (RMSNorm(WIDTH, 1e-6) for _ in range(3))
        self.attention, self.mlp, self.shift = attention(index), mlp(), nn.Parameter(torch.randn(WIDTH))
        self.square, self.alone = nn.Linear(WIDTH, WIDTH), nn.Linear(HEAD_DIM, WIDTH)

    def forward(self, h, c, s, attention):
        h = self.attention(self.first(h), c, s, attention) + h
        return self.mlp(self.second(h)) + h


def parallel(self, h, c, s, attention):
    """Attention and MLP of the same input, as in GPT-J."""
    normed = self.first(h)
    return h + self.attention(normed, c, s, attention) + self.mlp(normed)


def scaled(self, h, c, s, attention):
    h = h + 0.5 * self.attention(self.first(h), c, s, attention)
    return torch.add(h, self.mlp(self.second(h)), alpha=2)


def relu(self, h, c, s, attention):
    h = h + self.attention(self.first(h), c, s, attention)
    return h + self.mlp.w2(self.mlp.w1(self.second(h)).relu())


def branching(self, h, c, s, attention):
    h = h + self.attention(self.first(h), c, s, attention)
    return h if h.sum() > 1e9 else h + self.mlp(self.second(h))


def sandwich(self, h, c, s, attention):
    """A norm behind the attention as well, as in Gemma 3."""
    h = h + self.third(self.attention(self.first(h), c, s, attention))
    return h + self.mlp(self.second(h))


def shifted(self, h, c, s, attention):
    """A parameter is added, which has no rows."""
    return Layer.forward(self, h, c, s, attention) + self.mlp(self.second(h) + self.shift) + self.shift


def unnormed(self, h, c, s, attention):
    """A product adds to its own input, which must not be overwritten before all of it is read."""
    h = Layer.forward(self, h, c, s, attention)
    return h + self.square(h)


def unused(self, h, c, s, attention):
    self.mlp(self.first(h))
    return Layer.forward(self, h, c, s, attention)


def gates_twice(self, h, c, s, attention):
    """A gate is read outside of the program as well."""
    gate = self.attention.query(h).unflatten(-1, (HEADS, -1)).chunk(2, dim=-1)[1]
    return Layer.forward(self, h, c, s, attention) + gate.tanh().sum((1, 2)).unsqueeze(1)


def reads_one_head(self, h, c, s, attention):
    """A single head is read from heads that are not contiguous."""
    gate = self.attention.query(h).unflatten(-1, (HEADS, -1)).chunk(2, dim=-1)[1]
    return Layer.forward(self, h, c, s, attention) + self.alone(gate[:, 1])


def one_norm(index):
    """An attention whose queries have a norm, and whose keys have none."""
    attention = Attention(index, norms_heads=True)
    attention.key_norm = nn.Identity()
    return attention


def hooked(index):
    layer = Layer(index)
    layer.second.register_forward_hook(lambda module, given, out: 2 * out)
    return layer


def with_forward(forward, **parts):
    """A function that makes a layer with this forward pass."""
    layer_class = type("Layer", (Layer,), {"forward": forward})
    return lambda index: layer_class(index, **parts)


KINDS = {
    "plain": Layer,
    "norms of heads": lambda index: Layer(index, partial(Attention, norms_heads=True)),
    "a norm of queries": lambda index: Layer(index, one_norm),
    "parallel": with_forward(parallel),
    "scaled": with_forward(scaled),
    "relu": with_forward(relu),
    "branching": with_forward(branching),
    "a branching MLP": lambda index: Layer(index, mlp=BranchingMLP),
    "sandwich": with_forward(sandwich),
    "merged heads": lambda index: Layer(index, MergedAttention),
    "queries read twice": lambda index: Layer(index, Unrotated),
    "shifted": with_forward(shifted),
    "unnormed": with_forward(unnormed),
    "unused": with_forward(unused),
    "hooked": hooked,
    "another linear layer": lambda index: Layer(index, mlp=partial(MLP, second_class=DoubledLinear)),
    "gated": lambda index: Layer(index, GatedAttention),
    "swapped parts": lambda index: Layer(index, SwappedParts),
    "gates read twice": with_forward(gates_twice, attention=GatedAttention),
    "one head read": with_forward(reads_one_head, attention=GatedAttention),
}
ROPE = RopeConfig.from_hf({"rope_theta": 10000.0, "max_position_embeddings": 64})


class Stranger(nn.Module):
    """A model file with other names than ours."""

    def __init__(self, layer=Layer):
        super().__init__()
        self.tokens, self.rotation = Embedding(VOCAB, WIDTH), RotaryEmbedding(HEAD_DIM, ROPE)
        self.stack = nn.ModuleList(layer(index) for index in range(LAYERS))
        self.final, self.head = RMSNorm(WIDTH, 1e-6), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, places, attention):
        h = self.tokens(ids)
        c, s = self.rotation(places, h.dtype)
        for layer in self.stack:
            h = layer(h, c, s, attention)
        return self.final(h)

    def compute_logits(self, h):
        return self.head(h)


class EarlyExit(Stranger):
    def forward(self, ids, places, attention):
        h = self.tokens(ids)
        return self.final(self.stack[0](h, *self.rotation(places, h.dtype), attention))


class AllStates(Stranger):
    """Every state is read at the end, so none may be overwritten."""

    def forward(self, ids, places, attention):
        h = states = self.tokens(ids)
        c, s = self.rotation(places, h.dtype)
        for layer in self.stack:
            h = layer(h, c, s, attention)
            states = states + h
        return self.final(states)


def stranger(layer="plain", model_class=Stranger):
    torch.manual_seed(0)
    model = model_class(KINDS[layer])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return model.requires_grad_(False)


def compiled(layer="plain", model_class=Stranger):
    report = compile_model(stranger(layer, model_class))
    return report.model, report


@torch.inference_mode()
def logits_of(model, attend=None):
    return model.compute_logits(model(IDS, POSITIONS, attend or HybridDenseAttention())).float()


def paged(backend):
    """attend() of a prompt, and of a decode step after it, of two sequences."""
    ids = [IDS.tolist(), IDS.flip(0).tolist()]
    sequences = scratch_sequences(ids, 16)
    cache = KVCache(num_layers=LAYERS, num_blocks=8, block_size=16, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, layout="HND")
    for num in (len(IDS) - 1, 1):
        batch = ForwardBatch.build(StepPlan(tuple(ScheduledSequence(seq, num) for seq in sequences)), 16, torch.device("cpu"))
        yield batch, backend.begin_step(cache, batch.attention)
        for seq in sequences:
            seq.num_computed_tokens += num


@torch.inference_mode()
def steps_of(model, backend):
    return [model(batch.input_ids, batch.positions, attend).clone() for batch, attend in paged(backend)]


@pytest.mark.slow
@pytest.mark.parametrize("layer", KINDS)
def test_any_model_file_gives_the_numbers_of_its_own_forward(layer):
    """With an attention that Python calls, and with one that is a part of the program."""
    backend = KernelBackend(torch.float32, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    plain, (model, report) = stranger(layer), compiled(layer)
    assert report.num_plain_linears == 0
    torch.testing.assert_close(logits_of(model), logits_of(plain), atol=1e-4, rtol=1e-4)
    ours = steps_of(model, backend)
    torch.testing.assert_close(ours, steps_of(plain, CPUBackend()), atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, steps_of(model, backend), ours))


NUM_PROGRAMS = dict.fromkeys(("plain", "norms of heads", "parallel", "merged heads", "sandwich", "gated"), 1)
NUM_PROGRAMS |= {"relu": 3, "hooked": 3, "scaled": 5}


@pytest.mark.parametrize("layer", NUM_PROGRAMS)
def test_the_forward_pass_is_one_program_unless_something_between_has_no_kernel(layer):
    model, report = compiled(layer)
    code = model.forward.__self__.code
    assert code.count("self.program_") == NUM_PROGRAMS[layer], code
    assert report.compiled[""] > 10
    assert not report.left


def test_what_branches_on_values_stays_a_module_between_programs_and_the_report_says_why():
    model, report = compiled("a branching MLP")
    assert set(report.left) == {"stack.0.mlp", "stack.1.mlp"}
    assert "symbolically traced variables cannot be used as inputs to control flow" in report.left["stack.0.mlp"]
    assert isinstance(model.stack[0].mlp.w1, KernelLinear)
    _, report = compiled("branching")
    assert set(report.left) == {"stack.0", "stack.1"}
    assert {"stack.0.attention", "stack.0.mlp"} <= set(report.compiled)


@pytest.mark.parametrize("model_class", [EarlyExit, AllStates])
def test_a_model_whose_forward_is_its_own_is_compiled_as_it_is(model_class):
    plain, (model, _) = stranger(model_class=model_class), compiled(model_class=model_class)
    torch.testing.assert_close(logits_of(model), logits_of(plain), atol=1e-4, rtol=1e-4)
    assert (logits_of(plain) - logits_of(stranger())).abs().max() > 0.1


class Keeping(HybridDenseAttention):
    """An attention that keeps what it was given."""

    def __init__(self):
        self.kept = []

    def __call__(self, layer, q, k, v):
        self.kept += [(x, x.clone()) for x in (q, k, v)]
        return super().__call__(layer, q, k, v)


@pytest.mark.parametrize("layer", ["plain", "norms of heads", "merged heads"])
def test_an_attention_may_keep_its_arguments(layer):
    attend = Keeping()
    logits_of(compiled(layer)[0], attend)
    assert len(attend.kept) == LAYERS * 3
    assert all(torch.equal(x, copy) for x, copy in attend.kept)


def test_a_plain_model_runs_beside_its_compiled_one_until_its_weights_are_freed():
    model, expected = stranger(), logits_of(stranger())
    compiled = compile_model(model, keeps_plain=True).model
    assert type(model.head) is nn.Linear
    assert isinstance(compiled.head, KernelLinear)  # in no program
    assert torch.equal(logits_of(model), expected)
    torch.testing.assert_close(logits_of(compiled), expected, atol=1e-4, rtol=1e-4)
    assert "forward" not in vars(model)
    again = compile_model(model).model
    assert model.stack[0].mlp.w1.weight is None
    assert torch.equal(logits_of(again), logits_of(compiled))


def test_rows_of_another_dtype_or_number_are_refused_with_a_hint():
    model, _ = compiled()
    program = next(value for name, value in vars(model.forward.__self__).items() if name.startswith("program"))
    angles = torch.zeros(2, 1, HEAD_DIM)
    for rows, message in (
        (torch.zeros(2, WIDTH, dtype=torch.bfloat16), r"are in torch.float32, got tokens in torch.bfloat16; use one dtype"),
        (torch.zeros(2, WIDTH - 1), r"must have the shape \(2, 64\), got \(2, 63\); for a forward pass .* enforce_eager"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            program(HybridDenseAttention(), rows, angles, angles)
    assert program(lambda layer, q, k, v: q, torch.zeros(0, WIDTH), angles[:0], angles[:0]).shape == (0, WIDTH)


# ---- our families


DTYPES = ("float32", "bfloat16", "float16")
FAMILY_IDS = torch.arange(1, 14) * 31 % tiny_models.VOCAB_SIZE


def load(path, dtype="float32"):
    return loader.load_model(Checkpoint.open(str(path)), dtype, "cpu")


@torch.inference_mode()
def family_logits(model):
    attend = HybridDenseAttention(getattr(model.config, "state_shapes", ()))
    return model.compute_logits(model(FAMILY_IDS, POSITIONS, attend)).float()


def assert_same_logits(path, dtype, compiled):
    """In fp32 within rounding. In 16 bits, which round every layer, nearly as near the fp32 truth as the textbook's logits."""
    truth = family_logits(load(path))
    if dtype == "float32":
        torch.testing.assert_close(family_logits(compiled), truth, atol=1e-4, rtol=0)
        return
    error_of_textbook = (family_logits(load(path, dtype)) - truth).abs().mean()
    assert error_of_textbook < 0.1 * truth.abs().mean()  # the comparison means something
    assert (family_logits(compiled) - truth).abs().mean() < 1.25 * error_of_textbook


IN_FLOAT16 = "gpt2", "qwen3", "qwen3_5", "gpt_oss_window"  # by default. Both 16-bit dtypes have the same code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "family"),
    [
        pytest.param(dtype, family, marks=[pytest.mark.long] * (dtype == "float16" and family not in IN_FLOAT16))
        for dtype in DTYPES
        for family in tiny_models.FAMILIES
    ],
)
def test_a_compiled_family_gives_the_textbooks_logits(family, dtype, tmp_path):
    path = tiny_models.save(family, tmp_path)
    report = compile_model(load(path, dtype))
    model = report.model
    assert report.num_plain_linears == 0
    has_experts = any(name in family for name in ("moe", "next", "gpt_oss"))
    assert bool(report.left) == has_experts
    if not has_experts and family != "gemma3_window":  # torch scales that one's queries
        assert model.forward.__self__.code.count("self.program_") == 1
    assert_same_logits(path, dtype, model)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["residual", "activation", "factor", "norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_comparison_notices_what_a_kernel_forgets(wrong, dtype, tmp_path, monkeypatch):
    call, rotate = PackedLinear.call, module.rotate_call

    def forgetful(self, **operands):
        if wrong == "activation":
            self._activation = 0
        return call(self, **{name: operand for name, operand in operands.items() if name != wrong})

    monkeypatch.setattr(PackedLinear, "call", forgetful)
    if wrong == "norm":
        monkeypatch.setattr(module, "rotate_call", lambda *given, **more: rotate(*given[:2], None, *given[3:], **more))
    path = tiny_models.save("qwen3", tmp_path)
    with pytest.raises(AssertionError):
        assert_same_logits(path, dtype, compile_model(load(path, dtype)).model)
