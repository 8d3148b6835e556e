"""Gated DeltaNet: chunks against the definition, and the definition against a memory that is computed on paper."""

import pytest
import torch

from nanoinfer.features.hybrid.gated_delta import CHUNK, causal_convolution, gated_delta_rule, gated_delta_rule_in_chunks


def random_tokens(num_tokens, num_seqs=2, heads=3, key_dim=8, value_dim=5):
    generator = torch.Generator().manual_seed(num_tokens)
    q, k = torch.randn(2, num_seqs, num_tokens, heads, key_dim, generator=generator)
    v = torch.randn(num_seqs, num_tokens, heads, value_dim, generator=generator)
    log_decay, beta = -torch.rand(2, num_seqs, num_tokens, heads, generator=generator)
    memory = torch.randn(num_seqs, heads, key_dim, value_dim, generator=generator)
    return memory, q, k / k.norm(dim=-1, keepdim=True), v, log_decay, -beta


@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunks_give_what_the_definition_gives(num_tokens):
    given = random_tokens(num_tokens)
    for one, other in zip(gated_delta_rule_in_chunks(*given), gated_delta_rule(*given), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_a_memory_holds_the_last_value_that_was_written_for_a_key_and_fades():
    keys = torch.eye(2)[[0, 1, 0]].view(1, 3, 1, 2)
    values = torch.tensor([2.0, 5.0, 7.0]).view(1, 3, 1, 1)
    nothing = torch.zeros(1, 1, 2, 1)
    out, memory = gated_delta_rule(nothing, keys, keys, values, torch.zeros(1, 3, 1), torch.ones(1, 3, 1))
    assert out.flatten().tolist() == [2, 5, 7]
    assert memory.flatten().tolist() == [7, 5]  # 2 was replaced
    half = torch.full((1, 3, 1), 0.5).log()
    _, memory = gated_delta_rule(nothing, keys, keys, values, half, torch.ones(1, 3, 1))
    assert memory.flatten().tolist() == [7, 2.5]


def test_a_convolution_continues_from_its_window():
    x, weight = torch.randn(1, 9, 4), torch.randn(4, 3)
    whole, last = causal_convolution(torch.zeros(1, 2, 4), x, weight)
    first, window = causal_convolution(torch.zeros(1, 2, 4), x[:, :1], weight)
    second, window = causal_convolution(window, x[:, 1:], weight)
    assert torch.equal(torch.cat((first, second), 1), whole)
    assert torch.equal(window, last)
    expected = torch.nn.functional.conv1d(x.transpose(1, 2), weight.unsqueeze(1), padding=2, groups=4)[..., :9]
    torch.testing.assert_close(whole.transpose(1, 2), expected)
