"""flash_attn for one_file/engine.py: the package's functions, in its order of parameters, as operations of torch.

They compute by tests/helpers/flash_attn_double.py, which refuses what the package refuses.
"""

import torch
from torch import Tensor

from tests.helpers import flash_attn_double


def checked(name, *tensors, integers):
    """Assert what the double does not check."""
    assert len({tensor.device for tensor in (*tensors, *integers)}) == 1, f"{name}: tensors on several devices"
    assert {tensor.dtype for tensor in integers} == {torch.int32}, f"{name}: tables and lengths must be int32"
    assert len({tensor.dtype for tensor in tensors}) == 1, f"{name}: queries, keys and values of several dtypes"


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal=False):
    checked("decode", q, k_cache, v_cache, integers=(cache_seqlens, block_table))
    assert len(q) == len(cache_seqlens) == len(block_table)
    return torch.ops.one_file.decode(q, k_cache, v_cache, cache_seqlens, block_table, causal)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, block_table, causal=False
):  # fmt: skip
    checked("chunks", q, k, v, integers=(cu_seqlens_q, cu_seqlens_k, block_table))
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    return torch.ops.one_file.chunks(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, causal)


@torch.library.custom_op("one_file::decode", mutates_args=())
def decode(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, block_table: Tensor, causal: bool) -> Tensor:
    return flash_attn_double.flash_attn_with_kvcache(q, k, v, cache_seqlens=seq_lens, block_table=block_table, causal=causal)


@torch.library.custom_op("one_file::chunks", mutates_args=())
def chunks(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, longest_query: int, longest_key: int,
    block_table: Tensor, causal: bool,
) -> Tensor:  # fmt: skip
    return flash_attn_double.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=query_starts, cu_seqlens_k=key_starts, max_seqlen_q=longest_query, max_seqlen_k=longest_key,
        block_table=block_table, causal=causal,
    )  # fmt: skip
