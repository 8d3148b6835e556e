"""flash-attn's two functions without a GPU, and torch's, which calls its copy of the package.

They refuse what the package refuses, and compute what its page says in fp32.

Source: flash_attn-2.8.3.tar.gz of https://pypi.org/project/flash-attn/2.8.3/. A refusal names its line in
csrc/flash_attn/flash_api.cpp, or the file where the kernel relies on a rule that nobody checks. Arguments that the package
has and nanoinfer does not use are left out.
"""

import torch
from torch.nn.attention import varlen


def rule(is_kept, line, text):
    assert is_kept, f"{line if isinstance(line, str) else f'flash_api.cpp:{line}'}: {text}"


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal=False, window_size=(-1, -1)):
    """q: [batch, seqlen_q, nheads, headdim]. The last seqlen_q of cache_seqlens tokens are the queries."""
    rule(q.dtype in (torch.float16, torch.bfloat16), 1233, "only fp16 and bf16")
    rule(k_cache.dtype == v_cache.dtype == q.dtype, 1235, "query, key and value must have the same dtype")
    rule(k_cache.stride(-1) == v_cache.stride(-1) == 1, 1241, "the last dimension must be contiguous")
    rule(block_table.dtype == torch.int32, 1250, "block_table must have dtype torch.int32")
    num_seqs, _, num_heads, head_dim = q.shape
    num_blocks, page_size, num_kv_heads, _ = k_cache.shape
    rule(page_size % 256 == 0, 1264, "the block size must be divisible by 256")
    rule(num_seqs > 0, 1268, "batch size must be positive")
    rule(head_dim <= 256, 1269, "head dimension at most 256")
    rule(num_heads % num_kv_heads == 0, 1270, "the heads of keys must divide those of queries")
    rule(k_cache.shape == v_cache.shape == (num_blocks, page_size, num_kv_heads, head_dim), 1294, "shapes of the cache")
    rule(block_table.dim() == 2 and len(block_table) == num_seqs, 1296, "shape of block_table")
    rule(head_dim % 8 == 0, 1300, "the whole cache would be copied to pad the heads")
    rule(cache_seqlens.dtype == torch.int32, 1388, "seqlens_k must have dtype int32")
    rule(cache_seqlens.is_contiguous(), 1390, "seqlens_k must be contiguous")
    rule(cache_seqlens.shape == (num_seqs,), 1391, "shape of seqlens_k")
    check_addresses(q, k_cache, v_cache, block_table, cache_seqlens)
    return torch.stack(attend_each(q, k_cache, v_cache, block_table, cache_seqlens.tolist(), causal, window_size))


def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, causal=False, window_size=(-1, -1)
):
    """q: [total_q, nheads, headdim]. k, v: [num_blocks, page_block_size, nheads_k, headdim]."""
    rule(q.dtype in (torch.float16, torch.bfloat16), 545, "only fp16 and bf16")
    rule(k.dtype == v.dtype == q.dtype, 547, "query, key and value must have the same dtype")
    rule(cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32, 549, "cu_seqlens must have dtype int32")
    rule(block_table.dtype == torch.int32, 561, "block_table must have dtype torch.int32")
    rule(block_table.stride(-1) == 1, 562, "block_table must have contiguous last dimension")
    rule(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "flash_attn_interface.py:20", "the package would copy the tensor")
    rule(cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous(), 568, "cu_seqlens must be contiguous")
    num_seqs = len(cu_seqlens_q) - 1
    _, num_heads, head_dim = q.shape
    num_blocks, page_size, num_kv_heads, _ = k.shape
    rule(page_size % 256 == 0, 583, "the block size must be divisible by 256")
    rule(num_seqs > 0, 603, "batch size must be positive")
    rule(head_dim <= 256, 604, "head dimension at most 256")
    rule(head_dim % 8 == 0, 605, "head dimension must be a multiple of 8")
    rule(num_heads % num_kv_heads == 0, 606, "the heads of keys must divide those of queries")
    rule(k.shape == v.shape == (num_blocks, page_size, num_kv_heads, head_dim), 617, "shapes of the cache")
    rule(block_table.dim() == 2 and len(block_table) == num_seqs, 619, "shape of block_table")
    rule(cu_seqlens_k.shape == (num_seqs + 1,), 623, "shape of cu_seqlens_k")
    check_addresses(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    rule(cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] == len(q), "block_info.h:17", "cu_seqlens_q must cover the rows of q")
    rule(max(lengths_q) <= max_seqlen_q, "flash_fwd_launch_template.h:106", "later queries would have no block of threads")
    rule(max(lengths_k) <= max_seqlen_k, "flash_fwd_kernel.h:528", "later keys would be in no split")
    return torch.cat(attend_each(q.split(lengths_q), k, v, block_table, lengths_k, causal, window_size))


def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False, seqused_k, block_table):
    """torch's function, in torch/nn/attention/varlen.py of 2.13, which computes by the package's code.

    The function itself gets the arguments on the meta device, where it computes nothing.
    """
    on_meta = [x.to("meta") for x in (q, k, v, cu_seq_q, cu_seq_k, seqused_k, block_table)]
    options = {"window_size": window_size, "enable_gqa": enable_gqa, "seqused_k": on_meta[5], "block_table": on_meta[6]}
    varlen.varlen_attn(*on_meta[:5], max_q, max_k, **options)
    rule(seqused_k.dtype == torch.int32 and seqused_k.is_contiguous(), "varlen.py", "seqused_k must be contiguous, in int32")
    rule(torch.equal(cu_seq_k.diff(), seqused_k), "varlen.py", "the lengths are given twice")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k, max_seqlen_q=max_q, max_seqlen_k=max_k, block_table=block_table,
        window_size=window_size,
    )  # fmt: skip


def check_addresses(*tensors):
    """Check what no line of the package checks, because its kernels rely on it."""
    rule(len({x.device for x in tensors}) == 1, "flash_api.cpp:19", "all tensors must be on the same CUDA device")
    for x in tensors[:3]:
        are_aligned = x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
        rule(are_aligned, "kernel_traits.h:127", "rows must begin at multiples of 16 bytes, which are copied at once")


def attend_each(queries, k, v, block_table, lengths, causal, window_size):
    left, right = window_size[0], 0 if causal else window_size[1]
    page_size, outputs = k.shape[1], []
    for q, row, length in zip(queries, block_table.tolist(), lengths, strict=True):
        first = max(length - len(q) - left, 0) // page_size if left >= 0 else 0  # flash_fwd_kernel.h:531
        blocks = row[first : -(-length // page_size)]
        rule(0 <= length <= len(row) * page_size, "flash_fwd_kernel.h:585", "keys after the end of a row of block_table")
        rule(all(0 <= block < len(k) for block in blocks), "flash_fwd_kernel.h:590", f"a block outside the cache in {blocks}")
        keys, values = (pages[blocks].flatten(0, 1)[: length - first * page_size] for pages in (k, v))
        outputs.append(attend(q, keys, values, left, right))
    return outputs


def attend(q, k, v, left, right):
    """Query i attends to the keys from i + shift - left to i + shift + right, with shift = keys - queries. -1: to all."""
    rows, columns = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None], torch.arange(len(k), device=q.device)
    is_hidden = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    if left >= 0:
        is_hidden |= columns < rows - left
    if right >= 0:
        is_hidden |= columns > rows + right
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float() for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.float(), k) * q.shape[2] ** -0.5
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)
    weights = weights.masked_fill(is_hidden.all(-1, keepdim=True), 0)  # a query without keys gets zeros
    return torch.einsum("hij,jhd->ihd", weights, v).to(q.dtype)
