"""What a model calls to attend, what a backend is told about a step, and the table of backends.

A model knows one callable, `attend(layer, q, k, v)`. It stores this step's k and v and returns the mixed values; the write
always stays inside it. Swapping `DenseAttention()` for a backend's `begin_step(cache, metadata)` is the whole difference
between a model without and with a KV cache.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.kv_cache import KVCache, Layout


@runtime_checkable
class Attend(Protocol):
    """Causal attention of this step's tokens over everything their sequences have so far, themselves included.

    Scores are q . k / sqrt(head_dim). num_heads is a multiple of num_kv_heads (GQA): heads g * i .. g * i + g - 1 share KV
    head i, with g = num_heads / num_kv_heads.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "num_tokens num_heads head_dim"],
        k: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        v: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Which packed token belongs to which sequence, and where each sequence's keys and values lie.

    Two sequences, the first decoding its 6th token, the second prefilling 3 tokens, with blocks of 4 slots:

        query_start_loc [0, 1, 4]      tokens 0..1 are the first's, 1..4 the second's
        seq_lens        [6, 3]         tokens in the cache once this step is written
        block_tables    [[2, 5],       row i: the blocks of sequence i in order, padded with 0
                         [7, 0]]
        slot_mapping    [21, 28, 29, 30]    where each new token goes: 5 * 4 + 1, 7 * 4 + 0, ...

    The first num_decodes sequences have one new token each; the others come after them. The *_cpu lists repeat the tensors as
    Python ints, for backends that loop over sequences.
    """

    query_start_loc: Int[Tensor, "num_seqs_plus_1"]
    seq_lens: Int[Tensor, "num_seqs"]
    block_tables: Int[Tensor, "num_seqs max_blocks"]
    slot_mapping: Int[Tensor, "num_tokens"]
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    query_start_loc_cpu: list[int]
    seq_lens_cpu: list[int]


@runtime_checkable
class AttentionBackend(Protocol):
    """One way to attend over the paged cache. The layout of the cache's blocks is its choice.

    It is made as `TheBackend(enforce_eager=...)`; with enforce_eager it must not compile or capture anything.
    """

    layout: Layout
    default_block_size: int

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        """What one step's layers share is done here, once; the result is called once per layer."""
        ...


# name -> "module:class", imported when chosen; and the device types it runs on, None for all.
BACKENDS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "reference": ("nanoinfer.attention.reference:ReferenceBackend", None),
    "cpu": ("nanoinfer.attention.cpu:CPUBackend", ("cpu",)),
}


def select_backend(name: str, device: torch.device, *, enforce_eager: bool = False) -> tuple[str, AttentionBackend]:
    """The backend of that name; "auto" takes the best one for the device. Returns its name, too.

    Raises: InvalidValueError for an unknown name, UnsupportedError where it cannot run on the device.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "reference"
    if name not in BACKENDS:
        raise InvalidValueError(f"attention_backend must be auto or one of {', '.join(BACKENDS)}, got {name!r}")
    target, device_types = BACKENDS[name]
    if device_types is not None and device.type not in device_types:
        raise UnsupportedError(
            f"attention_backend={name!r} runs on {', '.join(device_types)} only, got device {str(device)!r}; use 'auto'"
        )
    module, _, class_name = target.partition(":")
    return name, getattr(import_module(module), class_name)(enforce_eager=enforce_eager)
