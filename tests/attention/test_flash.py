"""The flash-attn package without a GPU: stand-ins with the library's signatures and requirements.

They refuse what the library refuses (dtypes, int32 indices, page sizes, head counts) and compute in float64, so a wrong
argument, layout or mask shows. The tests marked gpu call the library itself.
Source: flash_attn_interface.py of https://github.com/Dao-AILab/flash-attention, 2.8.
"""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from nanoinfer.attention import base
from tests.helpers.paged_cases import FAULTS, compare, in_float64

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RAGGED = [(0, 1), (15, 1), (255, 1), (256, 1), (299, 1), (0, 2), (0, 65), (40, 20), (256, 44), (200, 300)]


def checked(q, k, v, *indices):
    for x in (q, k, v):
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.stride(-1) == 1
    assert q.shape[-2] % k.shape[-2] == 0
    assert k.shape == v.shape
    assert all(index.dtype is torch.int32 and index.stride(-1) == 1 for index in indices)


def pages_of(pages, block_table, length):
    return pages[block_table.long()].flatten(0, 1)[:length]


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """q: [batch, seqlen, nheads, headdim]. Pages: [num_blocks, page_block_size, nheads_k, headdim]."""
    assert causal
    assert k_cache.shape[1] % 256 == 0
    checked(q, k_cache, v_cache, cache_seqlens, block_table)
    rows = [
        in_float64(one, pages_of(k_cache, table, length), pages_of(v_cache, table, length))
        for one, table, length in zip(q, block_table, cache_seqlens, strict=True)
    ]
    return torch.stack(rows).to(q.dtype)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """q: [total_q, nheads, headdim]. With a block_table, k and v are pages. The mask is aligned to the bottom right."""
    assert causal
    assert k.shape[1] % 256 == 0
    checked(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
    lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert cu_seqlens_q[0] == 0
    assert cu_seqlens_q[-1] == len(q)
    assert max(lengths_q) <= max_seqlen_q
    assert max(lengths_k) <= max_seqlen_k
    assert len(block_table) == len(lengths_q) == len(lengths_k)
    rows = [
        in_float64(one, pages_of(k, table, length), pages_of(v, table, length))
        for one, table, length in zip(q.split(lengths_q), block_table, lengths_k, strict=True)
    ]
    return torch.cat(rows).to(q.dtype)


@pytest.fixture
def backend(monkeypatch):
    standin = ModuleType("flash_attn")
    standin.flash_attn_with_kvcache, standin.flash_attn_varlen_func = flash_attn_with_kvcache, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", standin)
    monkeypatch.delitem(sys.modules, "nanoinfer.attention.flash", raising=False)
    yield importlib.import_module("nanoinfer.attention.flash").FlashBackend()
    sys.modules.pop("nanoinfer.attention.flash")


def error_of(backend, lengths, *, heads=(2, 1), head_dim=64, **more):
    num_kv_heads, group = heads
    return compare(
        backend,
        lengths,
        block_size=256,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        **more,
    )


@pytest.mark.parametrize("heads", [(2, 1), (2, 2), (1, 7)], ids=lambda heads: f"{heads[0]}x{heads[1]}")
def test_decodes_and_chunks_in_one_step_equal_the_definition(backend, heads):
    assert error_of(backend, RAGGED, heads=heads, packed=True) < 0.02


@pytest.mark.parametrize("lengths", [[(299, 1), (0, 1)], [(0, 33)], [(100, 50), (0, 7)]], ids=["decode", "prefill", "chunks"])
def test_a_step_of_one_kind(backend, lengths):
    assert error_of(backend, lengths) < 0.02


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices_a_planted_fault(backend, fault):
    assert error_of(backend, [(400, 1), (300, 1), (257, 90)], spoil=FAULTS[fault]) > 0.05


@pytest.mark.parametrize("poisoned", [(0, 0), (2, 17), (3, 4)])
@pytest.mark.slow
def test_a_token_that_is_not_finite_reaches_later_queries_of_its_sequence_and_no_others(backend, poisoned):
    """The kernels mask scores by selection and values by weight 0, as the stand-ins do."""
    assert error_of(backend, [(400, 1), (7, 1), (0, 30), (20, 9)], heads=(2, 2), poisoned=poisoned) < 0.02


# ---- selection


@pytest.fixture
def a_gpu(monkeypatch):
    """The parts of torch.cuda that the selection of a backend calls."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


def test_auto_takes_the_first_supported_backend_and_logs_the_reasons_against_the_others(a_gpu, monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    caplog.set_level("INFO", logger="nanoinfer")
    assert base.select_backend("auto", CUDA, torch.bfloat16, 128)[0] == "triton"
    assert "attention_backend: not flash, because flash_attn is not installed" in caplog.text
    monkeypatch.setitem(sys.modules, "nanoinfer.attention.triton", None)
    assert base.select_backend("auto", CUDA, torch.bfloat16, 128)[0] == "reference"
    assert "attention_backend: not triton, because" in caplog.text


def test_flash_gives_the_reason_where_it_is_not_supported(backend, a_gpu, monkeypatch):
    def unsupported_reason(device=CUDA, dtype=torch.bfloat16, head_dim=128):
        return base.find_backend("flash", device, dtype, head_dim, None)[1]

    assert unsupported_reason() is None
    assert unsupported_reason(dtype=torch.float32) == "it supports float16 and bfloat16, not float32"
    assert unsupported_reason(head_dim=100) == "it supports a head_dim in multiples of 8 up to 256, not 100"
    assert unsupported_reason(head_dim=264) == "it supports a head_dim in multiples of 8 up to 256, not 264"
    assert unsupported_reason(device=CPU) == "it runs on cuda only, not on cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert unsupported_reason() == "it requires an Ampere GPU or a newer one, not a GPU"


def test_flash_requires_large_blocks(backend, a_gpu):
    for block_size, expected in ((None, None), (512, None), (16, "it requires a block_size in multiples of 256, not 16")):
        assert base.find_backend("flash", CUDA, torch.bfloat16, 128, block_size)[1] == expected
