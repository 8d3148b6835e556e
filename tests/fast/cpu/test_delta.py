"""The kernel of Gated DeltaNet against its definition, and its bits in any batch and any chunks."""

from types import SimpleNamespace

import pytest
import torch

from nanoinfer.fast.cpu.delta import KernelRecurrence
from nanoinfer.features.hybrid import gated_delta
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.features.hybrid.cache import make_states
from nanoinfer.features.hybrid.gated_delta import DeltaRecurrence
from nanoinfer.features.hybrid.states import AttendWithStates, StateUpdate

pytestmark = pytest.mark.usefixtures("kernels")

SIZES = [  # key heads, value heads, key_dim, value_dim, kernel_size
    (2, 4, 12, 8, 4),
    (1, 1, 16, 32, 2),
    (2, 2, 128, 128, 4),
]


def make(sizes):
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    config = SimpleNamespace(rms_norm_eps=1e-6, **{f"linear_{name}": size for name, size in zip(names, sizes, strict=True)})
    return DeltaRecurrence(config, 0)


def shapes_of(plain):
    channels = 2 * plain.num_key_heads * plain.key_dim + plain.num_value_heads * plain.value_dim
    return (plain.kernel_size - 1, channels), (plain.num_value_heads, plain.key_dim, plain.value_dim)


def inputs(plain, num_tokens, dtype):
    generator = torch.Generator().manual_seed(1)
    (_, channels), (heads, _, value_dim) = shapes_of(plain)
    sizes = [channels, heads * value_dim, heads, heads]
    merged = torch.randn(num_tokens, sum(sizes), generator=generator).to(dtype)  # as merged projections give them
    shapes = ((channels, 1, plain.kernel_size), (heads,), (heads,), (value_dim,))
    weights = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    return merged.split(sizes, dim=-1), tuple(weights)


def attend_to(states, rows, *, is_single=False):
    return AttendWithStates(lambda *given: None, states, rows, is_single=is_single)


def cache(plain, num_state_slots=4):
    return make_states(1, num_state_slots, shapes_of(plain))


@pytest.mark.slow
@pytest.mark.parametrize(  # each pair is compiled
    ("sizes", "dtype"), [*zip(SIZES, (torch.bfloat16, torch.float32, torch.bfloat16), strict=True), (SIZES[0], torch.float32)]
)
def test_the_kernel_gives_what_the_definition_gives(sizes, dtype, monkeypatch):
    monkeypatch.setattr(gated_delta, "gated_delta_rule_in_chunks", gated_delta.gated_delta_rule)
    plain = make(sizes)
    rows, weights = inputs(plain, 9, dtype)
    states = cache(plain)
    out = KernelRecurrence(plain, dtype).forward(attend_to(states, [StateUpdate(0, 9, -1, {9: 2})]), *rows, weights)
    expected_states = cache(plain)
    expected = plain(attend_to(expected_states, [StateUpdate(0, 9, -1, {9: 2})]), *rows, weights)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    for part, same in zip(states[0], expected_states[0], strict=True):
        torch.testing.assert_close(part[2], same[2], atol=1e-5, rtol=1e-5)
        assert not part[-1].any()  # the state before any token
    dense = plain(HybridDenseAttention(shapes_of(plain)), *rows, weights)
    torch.testing.assert_close(dense, expected, atol=tolerance, rtol=tolerance)


def test_a_token_has_the_same_bits_alone_beside_others_in_chunks_and_as_a_draft():
    plain = make(SIZES[0])
    rows, weights = inputs(plain, 11, torch.float32)
    kernel = KernelRecurrence(plain, torch.float32)

    def run(states, rows_of_states, first, end, **more):
        given = [x[first:end] for x in rows]
        return kernel.forward(attend_to(states, rows_of_states, **more), *given, weights)

    alone = cache(plain)
    expected = run(alone, [StateUpdate(0, 7, -1, {7: 0})], 0, 7)
    beside = cache(plain)
    together = run(beside, [StateUpdate(0, 7, -1, {4: 1, 7: 0}), StateUpdate(7, 11, -1, {4: 2})], 0, 11)
    assert torch.equal(together[:7], expected)
    cut = cache(plain)
    parts = [run(cut, [StateUpdate(0, 3, -1, {3: 0})], 0, 3), run(cut, [StateUpdate(0, 4, 0, {1: 1, 2: 2, 3: 3, 4: 0})], 3, 7)]
    assert torch.equal(torch.cat(parts), expected)
    single = cache(plain)
    assert torch.equal(run(single, [StateUpdate(0, 7, -1, {7: 0})], 0, 7, is_single=True), expected)
    for states in (beside, cut, single):
        assert all(torch.equal(part[0], same[0]) for part, same in zip(states[0], alone[0], strict=True))
    first_four = cache(plain)
    run(first_four, [StateUpdate(0, 4, -1, {4: 0})], 0, 4)
    assert torch.equal(beside[0][1][1], first_four[0][1][0])
