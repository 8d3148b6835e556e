"""Attention by torch.nn.attention.varlen, the FlashAttention that is built into torch.

When it is selected: with attention_backend="torch", or by "auto" on a GPU if neither flash.py nor triton.py can be used.
triton.py supports every dtype, block size and head_dim that this backend supports (it has no condition but a head_dim up to
256). So "auto" selects this one only if all of these hold: the `triton` package is not installed or cannot be imported,
flash.py cannot be used either, the GPU is Ampere or newer, the dtype is float16 or bfloat16, and head_dim is a multiple of 8 up
to 256. torch's CUDA builds for Linux install triton.

torch's function has pages in its signature since torch 2.12, but only FlashAttention 3 reads them. The built-in FlashAttention
2 raises. `reads_pages` tries it once per device and size. If it raises, each layer of a step first copies the keys and values
of its sequences out of their pages.
"""

import inspect
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from nanoinfer.attention.base import Attend, AttentionMetadata
from nanoinfer.attention.kv_cache import KVCache, Layout


class VarlenBackend:
    """The fallback on a GPU without flash-attn and Triton."""

    layout: Layout = "NHD"
    default_block_size = 256
    supports_cuda_graph = False

    def __init__(self, *, enforce_eager: bool = False) -> None:
        """enforce_eager has no effect, because torch comes with compiled kernels."""

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        return flash_attention_2_unsupported_reason(device, dtype, head_dim)

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        return _Step(cache, metadata)


def flash_attention_2_unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why FlashAttention 2, torch's or the flash-attn package's, does not support a model, or None if it does."""
    if device.type != "cuda":
        return f"it runs on cuda only, not on {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"it requires an Ampere GPU or a newer one, not {torch.cuda.get_device_name(device)}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it supports float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"it supports a head_dim in multiples of 8 up to 256, not {head_dim}"
    return None


@lru_cache
def reads_pages(device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int) -> bool:
    """Whether the installed torch reads a paged cache on this device. It is tried with one query over one page."""
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return False
    q = torch.zeros(1, 1, head_dim, dtype=dtype, device=device)
    pages = torch.zeros(1, block_size, 1, head_dim, dtype=dtype, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    try:
        varlen_attn(
            q, pages, pages, starts, None, 1, 1, window_size=(-1, 0),
            seqused_k=starts[1:], block_table=starts[:1].unsqueeze(0),
        )  # fmt: skip
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


class _Step:
    """One step's attend: all sequences in one call, decoding or not."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata) -> None:
        self._cache = cache
        self._metadata = metadata
        k_pages, _ = cache.layer(0)
        # The parameters for a causal mask and for shared KV heads have different names in different versions of torch.
        names = inspect.signature(varlen_attn).parameters
        self._causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
        self._takes_gqa = "enable_gqa" in names
        self._query_starts = metadata.query_start_loc.int()
        self._key_starts: Tensor | None = None
        self._slots: Tensor | None = None
        self._paging: dict[str, Any] = {}
        if reads_pages(k_pages.device, k_pages.dtype, cache.block_size, k_pages.shape[-1]):
            self._paging = {"seqused_k": metadata.seq_lens.int(), "block_table": metadata.block_tables.int()}
        else:
            self._key_starts = pad(metadata.seq_lens.cumsum(0), (1, 0)).int()
            self._slots = _slots_of_all_keys(metadata, cache.block_size)

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "num_tokens num_heads head_dim"],
        k: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        v: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        self._cache.write(layer, self._metadata.slot_mapping, k, v)
        keys, values = self._cache.layer(layer)
        options = self._causal | ({"enable_gqa": q.shape[1] != k.shape[1]} if self._takes_gqa else {})
        if self._slots is not None:  # to [num_keys, num_kv_heads, head_dim]
            keys, values = (pages.flatten(0, 1)[self._slots] for pages in (keys, values))
            if not self._takes_gqa:
                group = q.shape[1] // k.shape[1]
                keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        out = varlen_attn(
            q, keys, values, self._query_starts, self._key_starts, self._metadata.max_query_len, self._metadata.max_seq_len,
            **options, **self._paging,
        )  # fmt: skip
        assert isinstance(out, Tensor)  # it is a tuple only with return_aux
        return out


def _slots_of_all_keys(metadata: AttentionMetadata, block_size: int) -> Tensor:
    """[num_keys]: the slots of every sequence's tokens, one sequence after the other. The host does not wait for the device."""
    device, num_keys = metadata.seq_lens.device, sum(metadata.seq_lens_cpu)
    sequences = torch.arange(len(metadata.seq_lens_cpu), device=device)
    sequence_of = sequences.repeat_interleave(metadata.seq_lens, output_size=num_keys)
    starts = metadata.seq_lens.cumsum(0) - metadata.seq_lens
    positions = torch.arange(num_keys, device=device) - starts[sequence_of]
    return metadata.block_tables[sequence_of, positions // block_size] * block_size + positions % block_size
