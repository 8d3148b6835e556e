"""Every kernel of a compiled model gives the plain operation's numbers for every layout that the operation allows.

Triton interprets the kernels on a CPU, and compiles them on a GPU.
"""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from nanoinfer.attention import triton
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.triton import TritonBackend
from nanoinfer.fast.cuda import draw_kernel
from nanoinfer.fast.cuda.compile import AddedLinear, FewRowsLinear, KernelRMSNorm, KernelRotation, RotatedAttention
from nanoinfer.fast.cuda.draw_kernel import choose
from nanoinfer.fast.cuda.fused_kernels import gate_and_mul
from nanoinfer.fast.cuda.linear_kernel import MAX_ROWS, few_rows_linear, supports
from nanoinfer.fast.fuse import ACTIVATIONS, FusedRotation
from nanoinfer.models.layers import RMSNorm, ZeroCentredRMSNorm, apply_rotary, partial_rotary
from nanoinfer.sampling.batch import ParameterColumns
from nanoinfer.sampling.draw import argmax
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.paged_cases import metadata_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.003, torch.bfloat16: 0.02}  # of numbers around 1


def layouts(x):
    """The same numbers in memory in other ways, and numbers that are the same along an axis. The last are broadcast."""
    yield x
    yield torch.stack((x, x + 1), dim=-1)[..., 0]
    yield torch.cat((x, x + 1), dim=-1)[..., : x.shape[-1]]
    yield torch.cat((x + 1, x))[len(x) :]
    yield torch.stack((x, x + 1), dim=1).flatten(0, 1)[::2]
    for axis in range(x.ndim - 1):
        yield x.transpose(axis, -1).contiguous().transpose(axis, -1)
    for axis in range(x.ndim):
        yield x.narrow(axis, 0, 1).expand_as(x)


def rotated(x, cos, sin, weight):
    return apply_rotary(normed(x, weight), cos, sin)


ANGLES = torch.randn(2, 3, 1, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
K_WEIGHT = torch.linspace(0.5, 2, 16, device=DEVICE)


def rotated_and_kept(q, k, v):
    return torch.cat((apply_rotary(q, *ANGLES) * 0.75, rotated(k, *ANGLES, K_WEIGHT), v), dim=1)


def rotated_and_stored(q, k, v):
    """The queries with which a prompt attends, and what it stores. Its last token is in the second block."""
    module = RotatedAttention(KernelRotation(FusedRotation(None)), KernelRotation(FusedRotation(norm_of(K_WEIGHT))), 0.75)
    cache = KVCache(num_layers=1, num_blocks=4, block_size=2, num_kv_heads=2, head_dim=16, device=DEVICE)
    metadata = metadata_for([(0, 3)], 2, 4, torch.Generator().manual_seed(0), DEVICE)
    with mock.patch.object(triton, "prefill", lambda q, pages, out, *others: out.copy_(q)):
        out = module(TritonBackend().begin_step(cache, metadata), 0, q, k, v, *ANGLES)
    return torch.cat((out, *cache.gather(0, metadata.block_tables[0], 3)), dim=1)


def normed(x, weight):
    return norm_of(weight)(x)


def norm_of(weight, norm_class=RMSNorm):
    norm = norm_class(len(weight), 1e-6)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def linear_of(weight, bias=None):
    linear = nn.Linear(*reversed(weight.shape), device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return linear


def partly_rotated(x, cos, sin, weight):
    return partial_rotary(norm_of(weight, ZeroCentredRMSNorm)(x), cos, sin, cos.shape[-1])


def partly_rotated_by_kernel(x, cos, sin, weight):
    return KernelRotation(FusedRotation(norm_of(weight, ZeroCentredRMSNorm), 8))(x, cos, sin)


def normed_and_added(x, weight, residual):
    return residual + norm_of(weight, ZeroCentredRMSNorm)(x)


def normed_and_added_by_kernel(x, weight, residual):
    return KernelRMSNorm(norm_of(weight, ZeroCentredRMSNorm))(x, residual)


def multiplied(gate_up, activation="silu"):
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def gated(x, weight, bias):
    return multiplied(nn.functional.linear(x, weight, bias))


def added(x, weight, residual):
    return residual + nn.functional.linear(x, weight)


def normed_by_kernel(x, weight):
    return KernelRMSNorm(norm_of(weight))(x)


def rotated_by_kernel(x, cos, sin, weight=None):
    return KernelRotation(FusedRotation(None if weight is None else norm_of(weight)))(x, cos, sin)


def merged_by_kernel(x, weight, bias):
    return FewRowsLinear(linear_of(weight, bias))(x)


def gated_by_kernel(x, weight, bias):
    return FewRowsLinear(linear_of(weight, bias), "silu")(x)


def added_by_kernel(x, weight, residual):
    return AddedLinear(linear_of(weight), in_place=False)(x, residual)


def added_in_place(x, weight, residual):
    """The residual is another kernel's result, or an embedding's. Either is contiguous."""
    return AddedLinear(linear_of(weight), in_place=True)(x, residual.contiguous().clone())


FP32, FP16, BF16 = TOLERANCE
# name -> the plain operation, the kernel's, the dtype and the shapes of their arguments
CASES = {
    "a norm": (normed, normed_by_kernel, FP32, [(3, 5, 24), (24,)]),
    "a norm of 1024 numbers": (normed, normed_by_kernel, BF16, [(5, 1024), (1024,)]),
    "a rotation": (rotated, rotated_by_kernel, FP32, [(5, 3, 16), (5, 1, 16), (5, 1, 16), (16,)]),
    "a rotation of 80 numbers": (rotated, rotated_by_kernel, BF16, [(2, 2, 80), (2, 1, 80), (2, 1, 80), (80,)]),
    "a rotation without a norm": (apply_rotary, rotated_by_kernel, BF16, [(2, 3, 128), (2, 1, 128), (2, 1, 128)]),
    "a rotation and a store": (rotated_and_kept, rotated_and_stored, FP32, [(3, 4, 16), (3, 2, 16), (3, 2, 16)]),
    "a zero-centred norm and a sum": (normed_and_added, normed_and_added_by_kernel, FP32, [(3, 5, 24), (24,), (3, 5, 24)]),
    "a zero-centred norm and a shared sum": (normed_and_added, normed_and_added_by_kernel, BF16, [(5, 24), (24,), (1, 24)]),
    "a rotation of 8 numbers": (partly_rotated, partly_rotated_by_kernel, FP32, [(5, 3, 16), (5, 1, 8), (5, 1, 8), (16,)]),
    "a product of two halves": (multiplied, gate_and_mul, FP32, [(5, 160)]),
    "a product of two halves of 1500": (multiplied, gate_and_mul, BF16, [(5, 3000)]),
    "a gate of GELU": (
        partial(multiplied, activation="gelu_tanh"),
        partial(gate_and_mul, activation="gelu_tanh"),
        FP32,
        [(5, 160)],
    ),
    "merged layers": (nn.functional.linear, merged_by_kernel, FP16, [(5, 48), (20, 48), (20,)]),
    "a merged layer of odd sizes": (nn.functional.linear, merged_by_kernel, BF16, [(MAX_ROWS, 520), (17, 520), (17,)]),
    "merged layers, 3 axes": (nn.functional.linear, merged_by_kernel, FP16, [(2, 3, 48), (20, 48), (20,)]),
    "a residual in fp32": (added, added_by_kernel, FP32, [(5, 48), (30, 48), (5, 30)]),
    "a residual in place in fp32": (added, added_in_place, FP32, [(5, 48), (30, 48), (5, 30)]),
    "a residual of one vector": (added, added_by_kernel, FP16, [(5, 48), (30, 48), (30,)]),
} | {
    f"{name}, {len(shape)} axes, {shape[0]} rows": (plain, fused, FP16, [shape, *others(shape)])
    for shape in ((5, 32), (MAX_ROWS + 1, 32), (2, 3, 32))
    for name, plain, fused, others in (
        ("a gate", gated, gated_by_kernel, lambda shape: [(24, 32), (24,)]),
        ("a residual", added, added_by_kernel, lambda shape: [(18, 32), (*shape[:-1], 18)]),
        ("a residual in place", added, added_in_place, lambda shape: [(18, 32), (*shape[:-1], 18)]),
        ("a shared residual in place", added, added_in_place, lambda shape: [(18, 32), (1, 18)]),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_layout_of_no_argument_changes_a_number(name):
    plain, fused, dtype, shapes = CASES[name]
    torch.manual_seed(0)
    given = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]

    def error(arguments, got):
        expected = plain(*(x.double() for x in arguments))
        assert (got.dtype, got.shape) == (dtype, expected.shape)
        return (got.double() - expected).abs().max() / expected.abs().max()

    for i, argument in enumerate(given):
        for other in layouts(argument):
            arguments = [*given[:i], other, *given[i + 1 :]]
            assert error(arguments, fused(*arguments)) < TOLERANCE[dtype], (i, other.shape, other.stride())
    assert error(given, fused(given[0].flip(-1), *given[1:])) > 0.05  # the comparison notices other numbers


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_a_product_is_added_in_place_where_nothing_reads_the_residual_again(dtype):
    x, weight, residual = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((5, 48), (30, 48), (5, 30)))
    for in_place in (False, True):
        out = AddedLinear(linear_of(weight), in_place=in_place)(x, residual)
        assert (out.data_ptr() == residual.data_ptr()) == in_place


def test_a_row_has_the_same_bits_in_any_number_of_rows():
    x, weight = torch.randn(MAX_ROWS, 300, device=DEVICE).bfloat16(), torch.randn(40, 300, device=DEVICE).bfloat16()
    together = few_rows_linear(x, weight, None)
    assert torch.equal(together[5:6], few_rows_linear(x[5:6], weight, None))


def test_more_rows_fp32_and_weights_that_are_not_contiguous_are_torchs():
    linear = nn.Linear(4, 6, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.empty(MAX_ROWS, 4, dtype=torch.bfloat16)
    assert supports(x, linear)
    assert not supports(torch.empty(MAX_ROWS + 1, 4, dtype=torch.bfloat16), linear)
    assert not supports(torch.empty(1, 4), linear)
    assert not supports(torch.empty(1, 2, 4, dtype=torch.bfloat16), linear)  # rows with more axes
    assert not supports(torch.empty(4, 2, dtype=torch.bfloat16).t(), linear)
    linear.bias = nn.Parameter(torch.empty(12, dtype=torch.bfloat16)[::2], requires_grad=False)
    assert not supports(x, linear)
    linear.bias, linear.weight = None, nn.Parameter(linear.weight.t().contiguous().t(), requires_grad=False)
    assert not supports(x, linear)


@pytest.mark.parametrize("name", ["a norm", "a rotation"])
def test_weights_and_angles_in_another_dtype_give_the_dtype_of_the_plain_operation(name):
    plain, fused, _, shapes = CASES[name]
    x, *others = (torch.randn(shape, device=DEVICE) for shape in shapes)
    assert torch.equal(fused(x.half(), *others), plain(x.half(), *others))
    assert fused(x.half(), *others).dtype is torch.float32


class Recorded:
    """In place of a kernel: keeps the addresses of its arguments."""

    def __init__(self, addresses):
        self.addresses = addresses

    def __getitem__(self, grid):
        return lambda *given, **options: self.addresses.extend(x.data_ptr() for x in given if isinstance(x, torch.Tensor))


def test_every_tensor_that_a_launch_makes_begins_at_16_bytes_whatever_the_number_of_rows(monkeypatch):
    """Triton compiles another kernel for other addresses, in the middle of serving."""
    addresses = []
    for module, names in ((draw_kernel, ("_largest", "_bound", "_sum", "_choose")), (triton, ("_decode", "_merge"))):
        for name in names:
            monkeypatch.setattr(module, f"{name}_kernel", Recorded(addresses))
    pages = torch.zeros(4, 16, 1, 16)
    for num_rows in (1, 2, 3):
        top_p, u = (torch.zeros(num_rows, dtype=torch.float64) for _ in range(2))
        choose(torch.zeros(num_rows, 40), ParameterColumns(top_p=top_p), u)
        lens, tables = torch.ones(num_rows, dtype=torch.int64), torch.zeros(num_rows, 1, dtype=torch.int32)
        metadata = SimpleNamespace(max_seq_len=1, seq_lens=lens, block_tables=tables, first_decodes=None, max_num_decodes=1)
        q = torch.zeros(num_rows, 7, 16)
        triton.decode(q, (pages, pages, None, None), q.clone(), metadata, 0, None)
    assert len(addresses) > 30
    assert all(address % 16 == 0 for address in addresses)


def test_the_layout_of_logits_changes_no_token():
    torch.manual_seed(0)
    for logits in layouts(torch.randn(3, 40, device=DEVICE)):
        assert torch.equal(choose(logits, ParameterColumns(), None), argmax(logits))
