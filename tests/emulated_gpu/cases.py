"""The kernels of nanoinfer on tiny shapes, emulated and compared with plain fp64. Each case names its tolerance's formula.

    u    the unit roundoff of the tensors' dtype: 2^-8 (bf16), 2^-11 (fp16), 2^-24 (fp32). u * |out| means at least u * the
         smallest normal number, below which roundings are as large as at it
    e    that of fp32, 2^-24
    g(n) 4 * sqrt(n) * e: n roundings in any order. Their errors are independent, so they add up as sqrt(n) (Higham and Mary
         2019, https://doi.org/10.1137/18M1226312). 4 standard deviations, because a step of a tensor core may truncate.

A case returns its largest error as a share of the tolerance, which must be at most 1. Stored keys and values are exact.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from triton import jit, language
from triton.language.extra import libdevice

from nanoinfer.attention import triton
from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.fast.cuda import (
    decode_kernels,
    draw_kernel,
    experts,
    fused_kernels,
    integer_kernels,
    integers,
    invariant,
    linear_kernel,
    lora,
)
from nanoinfer.fast.cuda.fused_kernels import Norm
from nanoinfer.fast.cuda.integers import Integers
from nanoinfer.fast.fuse import ACTIVATIONS
from nanoinfer.features.adapters.layers import AdaptedLinear, AdapterMapping
from nanoinfer.features.adapters.lora import LowRankUpdate
from nanoinfer.features.int8_cache.cache import SplitInt8Cache
from nanoinfer.models.gpt_oss import ClampedSwiGLU
from nanoinfer.models.layers import SwiGLU
from nanoinfer.models.qwen_moe import Experts
from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import ParameterColumns
from nanoinfer.sampling.draw import BITS, argmax, draw_from_weights, uniform
from tests.emulated_gpu import writes
from tests.emulated_gpu.step import FAMILIES, check_step
from tests.helpers.paged_cases import compare, compare_drafts, in_float64, metadata_for, replaced

ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
_E = 2**-24
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ROUNDOFF}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 40}, "window and sinks": {"window": 40, "has_sinks": True},
    "int8": {"window": 40, "has_sinks": True, "in_int8": True},
}  # fmt: skip
EPS = 1e-6
# (tokens in the cache, new tokens). The decodes have up to 5 tiles of keys, the chunks up to 4 tiles of queries.
DECODES = [(290, 1), (0, 1), (15, 1), (64, 1)]
LENGTHS = [*DECODES, (150, 70), (0, 20), (40, 33)]


def _rounded(dtype: torch.dtype, out: Tensor) -> Tensor:
    """u * |out|."""
    return ROUNDOFF[dtype] * out.abs().clamp_min(torch.finfo(dtype).smallest_normal)


def share(out: Tensor, expected: Tensor, tolerance: Tensor) -> float:
    """The largest error, where 1 is the tolerance."""
    return ((out.double() - expected).abs() / tolerance).nan_to_num(nan=float("inf")).max().item()


def check_store(dtype: torch.dtype) -> float:
    """Compare all pages, so that nothing is written elsewhere. Head 1 of token 3 is not finite, and is stored as NaN and 0."""
    k, v = torch.randn(2, 6, 3, 80, generator=_generator()).to(dtype)
    v[3, 1, 5] = float("inf")
    pages = torch.full((2, 4, 16, 3, 80), 7, dtype=dtype)
    slots = torch.tensor([5, 63, 0, 17, 16, 40])
    expected = pages.clone().view(2, 64, 3, 80)
    expected[0, slots], expected[1, slots] = k, v
    expected[0, 17, 1], expected[1, 17, 1] = float("nan"), 0
    # v is a view, as a fused projection gives it.
    assert triton.rotate_and_store(k, None, k, torch.cat((k, v), 1)[:, 3:], *pages, slots) is k
    return 0.0 if torch.equal(pages.view(expected.shape).nan_to_num(-9), expected.nan_to_num(-9)) else float("inf")


def check_store_int8(dtype: torch.dtype, num_tokens: int = 6) -> float:
    """Compare integers and scales with the definition's, to the bit. Heads that are not finite, or 0, and numbers of all sizes.

    Some numbers are in the middle of two integers, of which the even one is stored.
    """
    sizes_of_heads = 2.0 ** torch.linspace(-20, 14, 2 * num_tokens * 3).view(2, num_tokens, 3, 1)
    k, v = (torch.randn(2, num_tokens, 3, 80, generator=_generator()) * sizes_of_heads).to(dtype)
    k[1, 0], v[3, 1, 5], k[4, 2, 7] = 0, float("inf"), float("nan")
    k[2], k[2, :, ::7] = 127, torch.arange(12) + 0.5
    k[5, 1], k[5, 1, ::2] = 1.1875, 0.59375
    sizes = {"num_layers": 1, "num_blocks": 4, "block_size": 16, "num_kv_heads": 3, "head_dim": 80 + 4, "dtype": torch.int8}
    cache, expected = (SplitInt8Cache(**sizes) for _ in range(2))
    slots = torch.randperm(64, generator=_generator())[:num_tokens]
    expected.write(0, slots, k, v)
    triton.rotate_and_store(k, None, k, torch.cat((k, v), 1)[:, 3:], *cache.layer(0), slots, *cache.scales(0))
    pairs = [*zip(cache.pages, expected.pages, strict=True)]
    return 0.0 if all(torch.equal(one.nan_to_num(-9), other.nan_to_num(-9)) for one, other in pairs) else float("inf")


def check_rms_norm(dtype: torch.dtype) -> float:
    """u |out| + 18 e |norm|: the sum of up to 2^16 squares as a tree (17 e / 2), 1 / sqrt (3 e), a division (2 e), 2 products.

    Zero-centred, with 1 e more for the sum with 1 and as much for that with a residual, whose magnitude counts.
    """
    (x, residual), weight = (
        torch.randn(2, 5, 80, generator=_generator()).to(dtype),
        torch.randn(80, generator=_generator()).to(dtype),
    )
    plain, centred = _normed(x) * weight.double(), _normed(x) * (1 + weight.double())
    outs = fused_kernels.rms_norm(x, Norm(weight, EPS)), fused_kernels.rms_norm(x, Norm(weight, EPS, True), residual)
    sums, terms = centred + residual.double(), centred.abs() + residual.double().abs()
    return max(
        share(outs[0], plain, _rounded(dtype, plain) + 16 * _E * plain.abs()),
        share(outs[1], sums, _rounded(dtype, sums) + 18 * _E * terms),
    )


def check_gate(dtype: torch.dtype) -> float:
    """|out| * (u + (12 + 6 |slope|) e): exp(slope) has the error of its argument, 6 |slope| e, and 2 units of its own."""
    gate_up = torch.randn(3, 2 * 1500, generator=_generator()).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    outs = {name: fused_kernels.gate_and_mul(gate_up, name) for name in ACTIVATIONS}
    expected = {name: compute(gate) * up for name, compute in ACTIVATIONS.items()}
    return max(share(out, expected[name], _gated_rounding(dtype, gate, expected[name])) for name, out in outs.items())


def check_rotate(dtype: torch.dtype) -> float:
    """u * |out| + 20 e * (|number * cos| + |other * sin|): as rms_norm, a product and a sum more. With norms and without.

    Queries alone, and with keys and values, which are stored. All are views, as a fused projection gives them. Zero-centred
    norms come with heads of which 48 numbers are rotated, and a factor of the queries, which rounds once more.
    """
    generator, largest = _generator(), 0.0
    x, angles = torch.randn(4, 6, 80, generator=generator).to(dtype), torch.randn(4, 1, 80, generator=generator)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots, pages = torch.tensor([5, 63, 0, 17]), torch.full((2, 4, 16, 1, 80), 7, dtype=dtype)
    (q, k, v), expected = x.split([4, 1, 1], 1), pages.clone().view(2, 64, 1, 80)

    def worst(out: Tensor, given: Tensor, weight: Tensor | None, rotation: triton.Rotation, factor: float = 1.0) -> float:
        number = given.double() if weight is None else _normed(given) * (weight.double() + rotation.zero_centred)
        turned, kept = number.split([width := rotation.cos.shape[-1], 80 - width], -1)
        first, second = turned.chunk(2, -1)
        terms = turned * rotation.cos.double(), torch.cat((-second, first), -1) * rotation.sin.double()
        rotated, magnitude = (
            torch.cat((terms[0] + terms[1], kept), -1),
            torch.cat((terms[0].abs() + terms[1].abs(), kept.abs()), -1),
        )
        tolerance = (1 + (factor != 1)) * _rounded(dtype, rotated) + 20 * _E * magnitude
        return share(out, factor * rotated, factor * tolerance)

    norms = torch.randn(2, 80, generator=generator).to(dtype)
    few = (x[..., :48].contiguous() for x in (cos, sin))
    for rotation in (
        triton.Rotation(cos, sin), triton.Rotation(cos, sin, norms[0], EPS, norms[1], EPS),
        triton.Rotation(*few, norms[0], EPS, norms[1], EPS, 1.375, True),
    ):  # fmt: skip
        outs = [triton.rotate_and_store(q, rotation, k, v, *pages, slots), triton.rotate_and_store(q, rotation)]
        keys = pages[0].view(64, 1, 80)[slots]
        of_q = max(worst(out, q, rotation.weight, rotation, rotation.factor or 1.0) for out in outs)
        largest = max(largest, of_q, worst(keys, k, rotation.k_weight, rotation))
        expected[0, slots], expected[1, slots] = keys, v
        if not torch.equal(pages.view(expected.shape), expected):  # values that are not copied, or something elsewhere
            return float("inf")
    return largest


def check_angles(dtype: torch.dtype) -> float:
    """u * |out| + 8 e * |out|: cos and sin have the error of two units in the last place (4 e), and a product. Large angles."""
    positions, inv_freq = torch.tensor([0, 7, 99_999]), 10_000.0 ** -torch.linspace(0, 1, 12)
    cos, sin = fused_kernels.angles(positions, inv_freq, 1.25, dtype)
    angle = (positions.float()[:, None] * inv_freq).double().repeat(1, 2)[:, None]
    expected = 1.25 * angle.cos(), 1.25 * angle.sin()
    return max(
        share(out, exact, _rounded(dtype, exact) + 8 * _E * exact.abs())
        for out, exact in zip((cos, sin), expected, strict=True)
    )


def check_far_rotate(dtype: torch.dtype) -> float:
    """As check_rotate, with offsets beyond 2^31. The memory between the rows is not touched."""
    x = torch.empty_strided((3, 1, 64), (2**30 + 64, 64, 1), dtype=dtype)
    x.copy_(torch.randn(3, 1, 64, generator=_generator()))
    turn = torch.ones(3, 1, 64, dtype=dtype)
    first, second = x.double().chunk(2, -1)
    expected = torch.cat((first - second, second + first), -1)
    out = triton.rotate_and_store(x, triton.Rotation(turn, turn))
    return share(out, expected, _rounded(dtype, expected) + 18 * _E * x.double().abs().amax())


def check_copy(dtype: torch.dtype) -> float:
    """Blocks of 81 numbers, in two layers' pages. A block is read and written, and two are exchanged."""
    pages = torch.randn(4, 6, 3, 27, generator=_generator()).to(dtype)
    expected, sources, targets = pages.clone(), torch.tensor([0, 1, 4, 5, 1]), torch.tensor([1, 2, 5, 4, 3])
    expected[:, targets] = pages[:, sources]
    triton.copy_blocks(pages, sources, targets)
    return 0.0 if torch.equal(pages, expected) else float("inf")


def check_linear(dtype: torch.dtype, option: str, bits: int = 0) -> float:
    """u * |out| + s: g(n + 1) times the magnitudes of the sum's n products, which are exact, and of the bias or the residual.

    Gated: s of up times |silu(gate)|, plus s of the gate times 1.2 * |up| (silu' and gelu' are below), plus what `gate` has.

    Sizes are no multiples of the kernel's tiles, and there are more tiles than the kernel loads ahead. 5 rows have few inputs,
    and are part of wider rows, with a stride that is no multiple of 16 bytes. A residual is written over. Split: two programs
    share the inputs of the others, a sum more, and the counters serve every launch.

    bits: of a weight that the kernel widens. 0: the weight has the dtype of x.
    """
    tile, columns = linear_kernel.TILE, linear_kernel.COLUMNS
    few, more = (384 if bits == 8 else 288, 128) if bits else (300, 80)
    sizes = ((linear_kernel.NUM_STAGES + 1) * tile + more, 2 * columns + columns // 2)
    gated, has_bias, has_residual = "gated" in option, "bias" in option, "residual" in option
    arrivals = linear_kernel.Arrivals() if "split" in option else None
    generator, largest = _generator(), 0.0
    for num_rows, num_in, num_out, stride in ((1, *sizes, sizes[0]), (5, few, columns + 1, few + 7), (16, *sizes, sizes[0])):
        shapes = (num_rows, stride), (2 * num_out, num_in), (2 * num_out,), (num_rows, num_out)
        x, weight, bias, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        x, weight = x[:, :num_in], weight * num_in**-0.5
        if not gated:
            weight, bias = weight[:num_out], bias[:num_out]
        given: Tensor | Integers = weight
        if bits:
            given = _integers(len(weight), num_in, bits, generator)
            weight = integers.definition(given).to(dtype)
        expected, terms = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        for added in [bias] * has_bias + [residual] * has_residual:
            expected, terms = expected + added.double(), terms + added.double().abs()
        out = linear_kernel.few_rows_linear(
            x, given, bias if has_bias else None, residual=residual if has_residual else None, gated=gated,
            activation=_activation(option), in_place=has_residual, arrivals=arrivals if num_in == sizes[0] else None,
        )  # fmt: skip
        tolerance = terms * _sum_error(num_in + 2)
        largest = max(largest, share(out, *_finished(dtype, expected, tolerance, option)))
    return largest


def check_invariant(dtype: torch.dtype, option: str) -> float:
    """As check_linear. The rows of 16 rows and of 1 have the bits that they have among 50, in every dtype.

    More inputs than a part of a split layer, and sizes that are no multiples of any tile. The residual leaves little of the
    product, so that the rounding to 16 bits does not hide the last bits of the sum.
    """
    gated, is_split = option == "gated with bias", option == "split residual"
    num_in, num_out = 4 * linear_kernel.TILE * (1 + is_split) + 80, invariant.COLUMNS + 3
    generator = _generator()
    shapes = (50, num_in), ((1 + gated) * num_out, num_in), ((1 + gated) * num_out,)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    weight *= num_in**-0.5
    residual = -(x.double() @ weight.double().T).to(dtype)
    arrivals, added = linear_kernel.Arrivals() if is_split else None, bias if gated else residual
    outs = [
        invariant.invariant_linear(
            x[rows], weight, bias if gated else None, gated=gated, residual=None if gated else residual[rows].clone(),
            in_place=not gated, arrivals=arrivals,
        )
        for rows in (slice(0, 50), slice(20, 36), slice(33, 34))
    ]  # fmt: skip
    if not torch.equal(outs[0][20:36], outs[1]) or not torch.equal(outs[0][33:34], outs[2]):
        return float("inf")
    expected, terms = x.double() @ weight.double().T + added.double(), x.double().abs() @ weight.double().abs().T
    tolerance = (terms + added.double().abs()) * _sum_error(num_in + 2)
    return share(outs[0], *_finished(dtype, expected, tolerance, option))


def check_decode_linear(dtype: torch.dtype, option: str) -> float:
    """As check_linear. With a norm its rounding is one more, u of each product, in any direction: 4 * u * sqrt(sum of squares).

    1 row, and 3, of which each has the bits that it has alone, except in fp32. x and the residual are written in the step.
    More inputs than a tile holds are read in several.
    """
    gated, has_bias, has_norm = "gated" in option, "bias" in option, "norm" in option
    generator, largest = _generator(), 0.0
    for num_in, num_out in ((300, 50), (decode_kernels._MAX_TILE + 452, 3)):
        shapes = (3, num_in), ((1 + gated) * num_out, num_in), ((1 + gated) * num_out,), (num_in,), (3, num_out)
        x, weight, bias, scale, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        weight *= num_in**-0.5
        norm, outs = Norm(scale, EPS, "zero-centred" in option) if has_norm else None, []
        for rows in (slice(0, 3), slice(1, 2)):
            with writes.step():
                given, added = x[rows].clone(), residual[rows].clone()
                outs.append(
                    decode_kernels.decode_linear(
                        given, weight, bias if has_bias else None, norm=norm, gated=gated, activation=_activation(option),
                        residual=None if gated else added, in_place=not gated,
                    )
                )  # fmt: skip
        if dtype is not torch.float32 and not torch.equal(outs[0][1:2], outs[1]):
            return float("inf")
        given = _normed(x) * (scale.double() + norm.zero_centred) if norm else x.double()
        expected, terms = given @ weight.double().T, given.abs() @ weight.double().abs().T
        tolerance = (
            16 * _E * terms + 4 * ROUNDOFF[dtype] * (given.square() @ weight.double().square().T).sqrt() if has_norm else 0
        )
        for added in [bias] * has_bias + [residual] * (not gated):
            expected, terms = expected + added.double(), terms + added.double().abs()
        tolerance = tolerance + terms * _sum_error(num_in + 2)
        largest = max(largest, share(outs[0], *_finished(dtype, expected, tolerance, option)))
    return largest


def _integers(num_out: int, num_in: int, bits: int, generator: torch.Generator) -> Integers:
    """A random weight, whose groups have all values of a byte, and zeros of their own."""
    group_size = {8: 128, 4: 64 if num_in % 64 == 0 else 32}[bits]
    packed = torch.randint(0, 256, (num_out, num_in * bits // 8), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 2**bits + (bits == 4), (num_out, num_in // group_size), generator=generator).to(torch.uint8)
    scales = (1 + torch.rand(zeros.shape, generator=generator)) * num_in**-0.5 / 2**bits
    return Integers(packed, scales, zeros, bits)


def check_integer_linear(dtype: torch.dtype, bits: int, option: str) -> float:
    """As check_decode_linear, where a sum's terms are those of integer * x and of zero * x, and there are a few more."""
    gated, has_bias, has_norm = "gated" in option, "bias" in option, "norm" in option
    generator, largest = _generator(), 0.0
    for num_in, num_out in ((384 if bits == 8 else 288, 50), (decode_kernels._MAX_TILE + 512, 3)):
        shapes = (3, num_in), ((1 + gated) * num_out,), (num_in,), (3, num_out)
        x, bias, scale, residual = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        weight, outs = _integers((1 + gated) * num_out, num_in, bits, generator), []
        norm = Norm(scale, EPS, "zero-centred" in option) if has_norm else None
        for rows in (slice(0, 3), slice(1, 2)):
            with writes.step():
                given, added = x[rows].clone(), residual[rows].clone()
                outs.append(
                    integer_kernels.integer_linear(
                        given, weight, bias if has_bias else None, norm=norm, gated=gated,
                        activation=_activation(option), residual=None if gated else added, in_place=not gated,
                    )
                )  # fmt: skip
        if not torch.equal(outs[0][1:2], outs[1]):
            return float("inf")
        given = _normed(x) * (scale.double() + norm.zero_centred) if norm else x.double()
        wide = integers.definition(weight).double()
        magnitude = integers.definition(weight._replace(zeros=torch.zeros_like(weight.zeros))).double()
        magnitude += (magnitude - wide).abs()  # scale * (integer + zero)
        expected, terms = given @ wide.T, given.abs() @ magnitude.T
        tolerance = 16 * _E * terms + 4 * ROUNDOFF[dtype] * (given.square() @ wide.square().T).sqrt() if has_norm else 0
        for added in [bias] * has_bias + [residual] * (not gated):
            expected, terms = expected + added.double(), terms + added.double().abs()
        tolerance = tolerance + terms * _sum_error(num_in + 8)
        largest = max(largest, share(outs[0], *_finished(dtype, expected, tolerance, option)))
    return largest


def check_widen(dtype: torch.dtype, bits: int) -> float:
    """Exactly the definition in fp32, rounded. Of some rows, and with more inputs than a program has."""
    for num_in in (384 if bits == 8 else 288, integers._TILE + 512):
        weight = _integers(5, num_in, bits, _generator())
        out = torch.full((4, num_in), 7.0).to(dtype)
        integers.widen(weight.rows(slice(1, 4)), out[:3])
        expected = integers.definition(weight)[1:4].to(dtype)
        if not torch.equal(out, torch.cat((expected, out[3:] * 0 + 7))):
            return float("inf")
    return 0.0


def check_route(dtype: torch.dtype) -> float:
    """w * (2 R e + 8 e + g(n + 4)): exp as in `_tolerance`, a sum and a division. Experts are exact, the first of equal ones.

    A row has equal scores, another an infinite one, and the last NaN: its weights are NaN, its experts are different.
    """
    scores, largest = torch.randn(6, 90, generator=_generator()).to(dtype)[:, 5:77], 0.0
    scores[1], scores[2, ::2], scores[4, 3], scores[5, 9] = 0.5, float("-inf"), float("inf"), float("nan")
    for is_normed in (False, True):
        weights, chosen = experts.route_by_kernel(scores, 5, is_normed)
        falling, ids = scores.double().sort(dim=-1, descending=True, stable=True)
        expected = falling.softmax(-1)[:, :5]
        expected = expected / expected.sum(-1, keepdim=True) if is_normed else expected
        is_finite = scores.isfinite() | scores.isneginf()
        spread = torch.where(scores.isfinite(), scores.double(), 0).abs().amax(-1, keepdim=True) * 2
        tolerance = expected * ((2 * spread + 8) * _E + _sum_error(scores.shape[1] + 4))
        good = is_finite.all(-1)
        if not torch.equal(chosen[good], ids[good, :5]) or not weights[~good].isnan().all():
            return float("inf")
        if any(len(set(row)) < 5 or not 0 <= min(row) <= max(row) < 72 for row in chosen.tolist()):
            return float("inf")
        largest = max(largest, share(weights[good], expected[good], tolerance[good]))
    return largest


EXPERTS = {"silu": None, "clamped with bias": 1.0}  # the limit


def check_experts(dtype: torch.dtype, option: str, device: str = "cpu") -> float:
    """As linear's, twice: of down's inputs, and of down with their rounding, 4 * u * sqrt(sum of squares). Then k products.

    With biases a residual is added: a rounding more.
    1 and 3 rows, of which each has the bits that it has alone. 19 rows choose expert 0, which has two tiles of pairs, and none
    chooses the last. Sizes are no multiples of the kernels' tiles.
    """
    mixture, largest = _Mixture(dtype, option, num_experts=5, size=300, inner=70, device=device), 0.0
    for num_rows in (3, 1, 19):
        largest = max(largest, share(mixture.outs[num_rows], *mixture.expected(num_rows)))
    return largest if torch.equal(mixture.outs[1], mixture.outs[3][:1]) else float("inf")


def check_large_experts(dtype: torch.dtype) -> float:
    """As check_experts, of so many rows that the tiles are larger."""
    mixture = _Mixture(dtype, "silu", num_experts=2, size=80, inner=70, all_rows=(70,))
    return share(mixture.outs[70], *mixture.expected(70))


class _Mixture:
    """Experts with random weights. outs: what the kernels compute of the first rows, by their number."""

    def __init__(
        self, dtype: torch.dtype, option: str, *, num_experts: int, size: int, inner: int, device: str = "cpu",
        all_rows: tuple[int, ...] = (3, 1, 19),
    ) -> None:  # fmt: skip
        self.dtype, self.limit, generator = dtype, EXPERTS[option], _generator()
        sizes = SimpleNamespace(hidden_size=size, intermediate_size=inner, swiglu_alpha=1.702, swiglu_limit=self.limit)
        self.mlps = [SwiGLU(size, inner) if self.limit is None else ClampedSwiGLU(sizes) for _ in range(num_experts)]
        for weight in (weight for mlp in self.mlps for weight in mlp.to(dtype).parameters()):
            weight.requires_grad_(False).copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
        num_rows = max(all_rows)
        self.x = torch.randn(num_rows, size, generator=generator).to(dtype)
        others = torch.stack([1 + torch.randperm(max(num_experts - 2, 1), generator=generator)[:2] for _ in range(num_rows)])
        self.chosen = torch.cat((others, torch.zeros(num_rows, 1, dtype=torch.int64)), 1)
        self.routing = torch.rand(self.chosen.shape, generator=generator)
        self.residual = None if self.limit is None else torch.randn(num_rows, size, generator=generator).to(dtype)
        module, self.outs = experts.KernelExperts(Experts(deepcopy(self.mlps)).to(device)), {}
        for num in all_rows:
            with writes.step():
                all_given = (self.x, self.routing, self.chosen, self.residual)
                given = (tensor[:num].to(device, copy=True) for tensor in all_given if tensor is not None)
                self.outs[num] = module(*given).cpu()

    def expected(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """The weighted sum of the first rows in fp64, and its tolerance."""
        out, tolerance, magnitude = (torch.zeros(num_rows, self.x.shape[1], dtype=torch.float64) for _ in range(3))
        for row, place in np.ndindex(num_rows, self.chosen.shape[1]):
            found, error = self._of_pair(self.x[row].double(), self.mlps[self.chosen[row, place]])
            weight = self.routing[row, place].double()
            out[row] += weight * found
            tolerance[row] += weight * error
            magnitude[row] += weight * found.abs()
        tolerance += _sum_error(self.chosen.shape[1] + 1) * magnitude
        if self.residual is None:
            return out, tolerance
        added = out + self.residual[:num_rows].double()
        return added, tolerance + _E * out.abs() + _rounded(self.dtype, added)

    def _of_pair(self, x: Tensor, mlp: SwiGLU) -> tuple[Tensor, Tensor]:
        """One expert's output, and its tolerance. The gate's function rises by at most 1.1 times its argument's change."""
        (gate, of_gate), (up, of_up) = (self._product(x, linear) for linear in (mlp.gate_proj, mlp.up_proj))
        alpha, added = (1.0, 0.0) if self.limit is None else (mlp.alpha, 1.0)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        activated, factor = gate * torch.sigmoid(alpha * gate), up + added
        inner = activated * factor
        of_inner = 1.1 * factor.abs() * of_gate + activated.abs() * of_up + (12 + alpha * gate.abs()) * _E * inner.abs()
        out, error = self._product(inner, mlp.down_proj)
        weight = mlp.down_proj.weight.double()
        of_rounding = 4 * ((_rounded(self.dtype, inner)).square() @ weight.square().T).sqrt()
        return out, error + of_inner @ weight.abs().T + of_rounding + _rounded(self.dtype, out)

    def _product(self, x: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor]:
        weight, bias = linear.weight.double(), 0.0 if linear.bias is None else linear.bias.double()
        terms = x.abs() @ weight.abs().T + abs(bias)
        return x @ weight.T + bias, terms * _sum_error(linear.in_features + 2)


def check_lora(dtype: torch.dtype) -> float:
    """u * |out| + scale * |B| @ (u * |s| + g(n + 1) * |A| @ |x| + g(rank + 4) * |s|), where s = A @ x is rounded by u.

    1 row, and 21 of two programs. The second layer is not changed by the first adapter. The last adapter is not finite, which
    reaches no other row. Sizes are no multiples of the kernels' tiles, ranks have two, and rows are parts of wider ones.
    """
    generator, (num_in, sizes, ranks) = _generator(), (lora._PART + 80, (70, 20, 33), (4, 40, 17))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    mapping, linears = AdapterMapping(len(ranks), max(ranks)), [torch.nn.Linear(num_in, size, device="meta") for size in sizes]
    layers = [AdaptedLinear(linear, mapping) for linear in linears]
    updates, mapping.kernels, largest = lora.LowRankUpdates(linears, randn(1)), lora.RowIndices(21, torch.device("cpu")), 0.0
    of: dict[tuple[int, int], LowRankUpdate] = {}
    for index, rank in enumerate(ranks):
        for place, layer in enumerate(layers):
            layer.put(index, LowRankUpdate(randn(rank, num_in), randn(sizes[place], rank), 3.0))  # which is replaced
            of[index, place] = update = LowRankUpdate(randn(rank, num_in) * num_in**-0.5, randn(sizes[place], rank), 0.5)
            update.a[0, 0] = float("inf") if index == 2 else 1.0
            layer.put(index, None if (index, place) == (0, 1) else update)
    for indices in ([1], [row % 4 - 1 for row in range(21)]):
        mapping.kernels.set(indices)
        mapping.kernels.begin(torch.nn.Identity(), (torch.empty(len(indices)),))
        x, base = randn(len(indices), num_in + 7)[:, :num_in], randn(len(indices), sum(sizes) + 9)
        out = updates(x, base.clone()[:, : sum(sizes)])
        for row, index in enumerate(indices):
            for place, (own, given) in enumerate(zip(out[row].split(sizes), base[row, : sum(sizes)].split(sizes), strict=True)):
                expected, tolerance = given.double(), torch.zeros(sizes[place], dtype=torch.float64)
                if index == 2:
                    continue
                if index >= 0 and (index, place) != (0, 1):
                    a, b, scale = of[index, place].a.double(), of[index, place].b.double(), of[index, place].scale
                    shrunk, terms = a @ x[row].double(), a.abs() @ x[row].double().abs()
                    expected = expected + scale * (b @ shrunk)
                    tolerance = b.abs() @ (_rounded(dtype, shrunk) + _sum_error(num_in + 1) * terms) * scale
                    tolerance += _sum_error(len(a) + 4) * scale * (b.abs() @ shrunk.abs()) + 4 * _E * given.double().abs()
                    tolerance += _rounded(dtype, expected)
                largest = max(largest, share(own, expected, tolerance + 1e-30))
    return largest


def _activation(option: str) -> str:
    return "gelu_tanh" if "gelu" in option else "silu"


def _finished(dtype: torch.dtype, expected: Tensor, tolerance: Tensor, option: str) -> tuple[Tensor, Tensor]:
    """What becomes of a product's result and tolerance by the gate and the rounding."""
    if "gated" not in option:
        return expected, tolerance + _rounded(dtype, expected)
    (gate, up), (of_gate, of_up) = expected.chunk(2, -1), tolerance.chunk(2, -1)
    activated = ACTIVATIONS[_activation(option)](gate)
    rounding = _gated_rounding(dtype, gate, activated * up)
    return activated * up, 1.2 * up.abs() * of_gate + activated.abs() * of_up + rounding


@jit
def _exp_kernel(x, out, num, SIZE: language.constexpr):
    ids = language.program_id(0) * SIZE + language.arange(0, SIZE)
    language.store(out + ids, libdevice.exp(language.load(x + ids, mask=ids < num)), mask=ids < num)


def _emulated_weights(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """The integer weights after temperature and min_p, of the exponentials that the emulator computes. logits: fp32."""
    below = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    exponentials = torch.zeros_like(below)
    _exp_kernel[(-(-below.numel() // 1024),)](below, exponentials, below.numel(), 1024)
    weights = (exponentials * 2.0**BITS).long()
    return weights.masked_fill(weights.float() / 2.0**BITS < min_p[:, None], 0)


def _logits_of(rows: str, num_rows: int, dtype: torch.dtype) -> Tensor:
    """rows: "ties": logits of a few values. "spread": of many. The vocabulary has several parts and tiles."""
    logits = torch.randn(num_rows, draw_kernel._PART + 77, generator=_generator())
    if rows == "ties":
        logits = (logits * 2).round() / 2
        logits[-1] *= 0  # 0.0 and -0.0 are equal
    logits[4, ::3] = float("-inf")
    return logits.to(dtype)


_U = torch.tensor([0.31, 0.997, 0.62, 0.45, 1 - 2**-53, 0.88, 0.0, 0.5, 0.999], dtype=torch.float64)


def check_choose(rows: str, dtype: torch.dtype) -> float:
    """Compare with draw.draw_from_weights: ids are exact. Some rows are greedy, and some have no largest logit.

    Most numbers are at an end of an id's interval, so that another weight of any id draws another id.
    """
    temperature = torch.tensor([1.0, 0.6, 1.0, 1.7, 1.0, 0.05, 0.9, 1.0, 2.0])
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.2, 0.0, 0.0, 0.5, 0.0, 0.0])
    greedy = torch.arange(len(_U)) % 4 == 3
    logits = _logits_of(rows, len(_U), dtype)
    logits[1, 5], logits[5, 5], logits[7] = float("nan"), float("inf"), float("-inf")
    largest_ids, weights = argmax(logits.float()), _emulated_weights(logits.float(), temperature, min_p)
    cumulative = weights.cumsum(-1)
    ends = cumulative.gather(1, (cumulative <= cumulative[:, -1:] // 2).sum(-1, keepdim=True).clamp_max(logits.shape[1] - 1))
    rows = torch.arange(len(_U))
    u = torch.where(rows == 4, _U, (ends[:, 0].double() + rows % 4 / 2 - 0.5) / cumulative[:, -1].clamp_min(1))
    expected = torch.where((largest_ids >= 0) & ~greedy, draw_from_weights(weights, u), largest_ids)
    columns = ParameterColumns(greedy=greedy, temperature=temperature, min_p=min_p)
    same = (
        torch.equal(draw_kernel.choose(logits, columns, u), expected),
        torch.equal(draw_kernel.choose(logits, ParameterColumns(), None), largest_ids),
    )
    return 0.0 if all(same) else float("inf")


def check_draw(rows: str) -> float:
    """Compare with the plain stages and with draw.uniform: ids are exact. Also with a list that is full."""
    seeds, positions = [2**64 - 1 - 977 * row for row in range(len(_U))], [2**row + row for row in range(len(_U))]
    top_p = torch.tensor([0.9, 1.0, 0.3, 1.0, 0.999, 0.5, 1e-9, 0.7, 0.95], dtype=torch.float64)
    top_k = torch.tensor([2**63 - 1, 9999, 40, 700, 9999, 3, 9999, 1, 9999])  # more than the vocabulary: off
    temperature = torch.tensor([0.7, 1.0, 1.0, 1.5, 1.0, 1.0, 0.8, 1.0, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0])
    logits = _logits_of(rows, len(_U), torch.float32)
    weights, scaled = _emulated_weights(logits, temperature, min_p), stages.divided(logits, temperature)
    falling = scaled.masked_fill(weights == 0, float("-inf")).sort(descending=True).values
    smallest = falling.gather(1, torch.where(top_k < logits.shape[1], top_k, logits.shape[1])[:, None] - 1)
    kept = scaled.masked_fill((scaled < smallest) | (weights == 0), float("-inf"))
    with mock.patch.object(stages, "integer_weights", lambda falling: _in_order(weights, kept).masked_fill(falling.isinf(), 0)):
        is_kept = stages.drop_beyond(kept, top_p).isfinite()
    expected = draw_from_weights(weights * is_kept, uniform(seeds, positions))
    columns = ParameterColumns(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    of_rows = torch.tensor(np.array(seeds, np.uint64).view(np.int64)), torch.tensor(positions)
    same = []
    for size in (4096, 32):
        with mock.patch.multiple(draw_kernel, _LIST=size, _TRIED=40):
            same.append(torch.equal(draw_kernel.choose(logits, columns, of_rows), expected))
    return 0.0 if all(same) else float("inf")


def _in_order(weights: Tensor, logits: Tensor) -> Tensor:
    """The weights in the order in which stages.drop_beyond sorts the logits."""
    return weights.gather(1, logits.sort(dim=-1, descending=True, stable=True).indices)


def check_attention(dtype: torch.dtype, head_dim: int, option: str, lengths: Sequence[tuple[int, int]] = LENGTHS) -> float:
    """Emulate store, decode, merge and prefill in a step with scattered blocks, and compare within `_tolerance`.

    lengths: the tokens in the cache and the new tokens of each sequence.
    """
    with mock.patch.object(triton, "_TARGET_PROGRAMS", 16):  # two splits, which have several tiles
        return compare(
            triton.TritonBackend(), lengths, block_size=16, num_kv_heads=2, group=2, head_dim=head_dim, dtype=dtype,
            packed=True, tolerance=_tolerance, **OPTIONS[option],
        )  # fmt: skip


class _DecodeAttention:
    """decode_attention as a backend, with a rotation that changes nothing."""

    layout = "NHD"

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        metadata, arrivals = replace(metadata, block_tables=metadata.block_tables.int()), linear_kernel.Arrivals()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
            cos, sin = torch.ones(len(q), 1, q.shape[2], dtype=q.dtype), torch.zeros(len(q), 1, q.shape[2], dtype=q.dtype)
            outs = []
            for _ in range(2):  # the counters serve again
                with writes.step():  # the product before it writes all three
                    q, k, v = torch.cat((q, k, v), 1).split([q.shape[1], k.shape[1], k.shape[1]], 1)
                    rotation = triton.Rotation(cos, sin)
                    outs.append(decode_kernels.decode_attention(cache, metadata, layer, q, k, v, rotation, arrivals, **options))
            return outs[1]

        return attend


def check_decode_attention(dtype: torch.dtype, head_dim: int, option: str, num_splits: int = 2) -> float:
    """As check_attention, of a step's decodes in one kernel, whose last programs merge."""
    with mock.patch.object(triton, "_TARGET_PROGRAMS", 8 * num_splits):
        return compare(
            _DecodeAttention(), DECODES, block_size=16, num_kv_heads=2, group=2, head_dim=head_dim, dtype=dtype,
            tolerance=_tolerance, **OPTIONS[option],
        )  # fmt: skip


def check_drafts(dtype: torch.dtype, option: str) -> float:
    """Three rows are of one sequence, a token and two drafts, whose keys are stored in this launch. Another row is alone."""
    with mock.patch.object(triton, "_TARGET_PROGRAMS", 16):
        return compare_drafts(
            _DecodeAttention(), [(67, 3), (19, 1)], dtype=dtype, window=45, tolerance=_tolerance,
            are_alone="alone" in option, in_int8="int8" in option,
        )  # fmt: skip


def check_paged_drafts(dtype: torch.dtype) -> float:
    """As check_drafts, in three kernels. A program has up to two rows, so three programs share the last sequence's."""
    with mock.patch.object(triton, "_TARGET_PROGRAMS", 16):
        return compare_drafts(
            triton.TritonBackend(), [(67, 3), (19, 1), (140, 5)], group=12, dtype=dtype, window=70, has_sinks=True,
            tolerance=_tolerance,
        )  # fmt: skip


def check_invariant_decode(dtype: torch.dtype) -> float:
    """As check_attention, with a fixed number of splits. Each row has the bits that it has alone."""
    generator, num_tokens = _generator(), torch.tensor([71, 1, 21])
    metadata = metadata_for([(0, num) for num in num_tokens.tolist()], 16, 8, generator)
    cache = KVCache(
        num_layers=1, num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64, dtype=dtype, device="cpu", layout="NHD"
    )
    (k, v), q = torch.randn(2, 93, 2, 64, generator=generator).to(dtype), torch.randn(3, 4, 64, generator=generator).to(dtype)
    cache.write(0, metadata.slot_mapping, k, v)
    backend, new = triton.TritonBackend(), num_tokens.cumsum(0) - 1
    backend.num_splits, outs = 4, []
    for rows in (slice(0, 3), slice(0, 1), slice(1, 2), slice(2, 3)):
        step = replaced(
            metadata, seq_lens=num_tokens[rows], block_tables=metadata.block_tables[rows], num_decodes=len(new[rows]),
            slot_mapping=metadata.slot_mapping[new[rows]],
        )  # fmt: skip
        with mock.patch.object(triton, "_TARGET_PROGRAMS", 4):  # so that the plain number of splits differs
            outs.append(backend.begin_step(cache, step)(0, q[rows], k[new[rows]], v[new[rows]]))
    if not torch.equal(outs[0], torch.cat(outs[1:])):
        return float("inf")
    parts = zip(outs[1:], q.split(1), k.split(num_tokens.tolist()), v.split(num_tokens.tolist()), strict=True)
    return max(share(out, in_float64(*given), _tolerance(*given)) for out, *given in parts)


def _tolerance(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
    """u * |o| + a * (w + 2 * (S * g(head_dim + 2) + 2 R e + 4 e) + g(n + 4)), for each element of the output o.

    a    the sum of the n weights times |v|
    w    u, as weights are rounded to the dtype before they are multiplied by v. 0 in fp32
    S    the largest sum of |q * k| / sqrt(head_dim) of the query. A score's error is S * g(head_dim + 2)
    R    the range of the scores, times e: the rounding of what exp gets, whose own error is 2 units in the last place
    """
    out, magnitude = in_float64(q, k, v, window, sinks), in_float64(q, k, v.abs(), window, sinks)
    wide = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = q.shape[2] ** -0.5
    terms = torch.einsum("ihd,jhd->ihj", q.double().abs(), wide.abs()).amax(-1, keepdim=True) * scale
    scores = torch.einsum("ihd,jhd->ihj", q.double(), wide) * scale
    spread = scores.amax(-1, keepdim=True) - scores.amin(-1, keepdim=True)
    of_rounded = 0 if q.dtype is torch.float32 else ROUNDOFF[q.dtype]
    of_weights = terms * _sum_error(q.shape[2] + 2) + (2 * spread + 4) * _E
    return _rounded(q.dtype, out) + magnitude * (of_rounded + 2 * of_weights + _sum_error(len(k) + 4))


def _gated_rounding(dtype: torch.dtype, gate: Tensor, out: Tensor) -> Tensor:
    slope = gate.abs() * (1.6 + 0.072 * gate.square())  # at least gelu_tanh's, and silu's
    return _rounded(dtype, out) + (12 + 6 * slope) * _E * out.abs()


def _sum_error(num_roundings: int) -> float:
    return 4 * num_roundings**0.5 * _E


def _normed(x: Tensor) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


CASES: dict[str, Callable[[], float]] = {
    f"{kernel} {name}": lambda check=check, dtype=dtype: check(dtype)
    for kernel, check in (
        ("store", check_store), ("store_int8", check_store_int8), ("rms_norm", check_rms_norm), ("gate", check_gate),
        ("rotate", check_rotate), ("copy", check_copy), ("angles", check_angles), ("lora", check_lora), ("route", check_route),
    )
    for name, dtype in DTYPES.items()
} | {
    f"linear {name} {option}": lambda dtype=DTYPES[name], option=option: check_linear(dtype, option)
    for name in ("bfloat16", "float16")  # fp32 is torch's
    for option in ("plain", "bias", "residual", "split residual", "gated", "gated with bias", "gated by gelu")
} | {
    f"linear {name} int{bits} {option}": lambda dtype=DTYPES[name], option=option, bits=bits: check_linear(dtype, option, bits)
    for name in ("bfloat16", "float16")
    for bits in (8, 4)
    for option in ("split residual", "gated with bias")
} | {
    f"integer_linear {name} int{bits} {option}": lambda dtype=DTYPES[name], option=option, bits=bits: check_integer_linear(
        dtype, bits, option
    )
    for name in ("bfloat16", "float16")
    for bits in (8, 4)
    for option in ("residual", "norm and bias", "gated with norm", "gated by gelu with zero-centred norm")
} | {
    f"widen {name} int{bits}": lambda dtype=DTYPES[name], bits=bits: check_widen(dtype, bits)
    for name in ("bfloat16", "float16")
    for bits in (8, 4)
} | {
    f"invariant {name} {option}": lambda dtype=dtype, option=option: check_invariant(dtype, option)
    for name, dtype in DTYPES.items()
    for option in ("split residual", "gated with bias")
} | {
    f"invariant_decode {name}": lambda dtype=dtype: check_invariant_decode(dtype) for name, dtype in DTYPES.items()
} | {
    f"decode_linear {name} {option}": lambda dtype=dtype, option=option: check_decode_linear(dtype, option)
    for name, dtype in DTYPES.items()
    for option in ("residual", "norm and bias", "gated with norm", "gated by gelu with zero-centred norm")
} | {
    f"experts {name} {option}": lambda dtype=dtype, option=option: check_experts(dtype, option)
    for name, dtype in DTYPES.items()
    for option in EXPERTS
} | {
    f"large_experts {name}": lambda dtype=DTYPES[name]: check_large_experts(dtype) for name in ("bfloat16", "float16")
} | {
    f"drafts {name} {option}": lambda dtype=DTYPES[name], option=option: check_drafts(dtype, option)
    for name in ("bfloat16", "float16")
    for option in ("together", "alone", "together int8", "alone int8")
} | {
    f"paged_drafts {name}": lambda dtype=dtype: check_paged_drafts(dtype) for name, dtype in DTYPES.items()
} | {
    f"decode_attention {name} {head_dim} {option}": lambda dtype=DTYPES[name], head_dim=head_dim, option=option: (
        check_decode_attention(dtype, head_dim, option)
    )
    for name in ("bfloat16", "float16")  # without tensor cores the step has the plain kernels
    for head_dim in (64, 128, 256)
    for option in OPTIONS
} | {
    f"decode_attention {num_splits} splits": lambda num_splits=num_splits: (
        check_decode_attention(torch.bfloat16, 64, "plain", num_splits)
    )
    for num_splits in (8, 16)
} | {
    f"step {family} {num_rows}": lambda family=family, num_rows=num_rows: check_step(family, num_rows, torch.bfloat16)
    for family in FAMILIES
    for num_rows in (1, 3, 6)
} | {
    f"draw {rows}": lambda rows=rows: check_draw(rows) for rows in ("ties", "spread")
} | {
    f"choose {rows} {name}": lambda rows=rows, dtype=dtype: check_choose(rows, dtype)
    for rows in ("ties", "spread")
    for name, dtype in DTYPES.items()
} | {
    "far rotate bfloat16": lambda: check_far_rotate(torch.bfloat16)
} | {
    f"{kernels} {name} {head_dim} {option}": lambda dtype=dtype, head_dim=head_dim, option=option, lengths=lengths: (
        check_attention(dtype, head_dim, option, lengths)
    )
    for kernels, lengths in (("attention", LENGTHS), ("decode", DECODES))
    for name, dtype in DTYPES.items()
    for head_dim in (64, 128, 256)
    for option in OPTIONS
}  # fmt: skip
