"""The definition of attention: torch's own, and cases computed by hand."""

import pytest
import torch
import torch.nn.functional as F

from nanoinfer.attention.dense import DenseAttention, causal_attention, with_whole_heads


def heads(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_it_is_torchs_causal_attention_with_as_many_queries_as_keys(num_kv_heads):
    q, k, v = heads(9, 4, 8), heads(9, num_kv_heads, 8, seed=1), heads(9, num_kv_heads, 8, seed=2)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(causal_attention(q, k, v), expected)
    torch.testing.assert_close(DenseAttention()(3, q, k, v), expected)  # the layer is of no account


def test_the_last_tokens_of_a_sequence_get_what_they_get_among_all_of_them():
    q, k, v = heads(9, 2, 8), heads(9, 2, 8, seed=1), heads(9, 2, 8, seed=2)
    torch.testing.assert_close(causal_attention(q[6:], k, v), causal_attention(q, k, v)[6:])


def test_half_precision_is_computed_in_fp32_and_returned_as_it_came():
    q, k, v = (heads(5, 2, 8, seed=seed).bfloat16() for seed in range(3))
    out = causal_attention(q, k, v)
    assert torch.equal(out, causal_attention(q.float(), k.float(), v.float()).bfloat16())


def test_a_token_whose_heads_are_not_side_by_side_is_copied_and_another_is_not():
    fused = heads(5, 6, 8)
    part = fused[:, 2:4]
    assert with_whole_heads(part).data_ptr() == part.data_ptr()
    turned = heads(5, 8, 2).transpose(1, 2)
    assert torch.equal(with_whole_heads(turned), turned)
    assert with_whole_heads(turned).is_contiguous()


def test_dense_attention_is_transformers_formula_by_hand():
    """Two tokens, one head of size 1: the first sees itself, the second weighs both by exp(q k)."""
    q, k, v = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([10.0, 20.0])
    out = DenseAttention()(0, *(x.view(2, 1, 1) for x in (q, k, v))).flatten()
    weight = torch.tensor(2.0).exp() / (1 + torch.tensor(2.0).exp())
    torch.testing.assert_close(out, torch.stack([torch.tensor(10.0), 10 + 10 * weight]))
