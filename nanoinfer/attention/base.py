"""What a model calls to attend, what a backend is told about a step, and the table of backends.

A model knows one callable, `attend(layer, q, k, v)`. It stores this step's k and v and returns the mixed values; the write
always stays inside it. Swapping `DenseAttention()` for a backend's `begin_step(cache, metadata)` is the whole difference
between a model without and with a KV cache.
"""

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.kv_cache import KVCache, Layout
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError, first_line

logger = logging.getLogger(__name__)


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

    query_start_loc: Int[Tensor, " num_seqs_plus_1"]
    seq_lens: Int[Tensor, " num_seqs"]
    block_tables: Int[Tensor, "num_seqs max_blocks"]
    slot_mapping: Int[Tensor, " num_tokens"]
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
    supports_cuda_graph: bool  # into a CUDA graph: a decode step of it asks the host for nothing but shapes

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        """Why it cannot serve such a model and cache, as a sentence; None if it can. Asked before it is made."""
        ...

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        """What one step's layers share is done here, once; the result is called once per layer."""
        ...


# name -> "module:class", imported when it is asked for: what it needs may not be installed. Or the class itself.
BACKENDS: dict[str, str | type[Any]] = {
    "reference": "nanoinfer.attention.reference:ReferenceBackend",
    "cpu": "nanoinfer.attention.cpu:CPUBackend",
    "flash": "nanoinfer.attention.flash:FlashBackend",
    "triton": "nanoinfer.attention.triton:TritonBackend",
    "torch": "nanoinfer.attention.torch_varlen:VarlenBackend",
}
# device type -> what "auto" takes, the first that can
PREFERRED = {"cpu": ("cpu",), "cuda": ("flash", "triton", "torch", "reference")}


def register_backend(name: str, backend_class: Any) -> None:
    """Let LLM(attention_backend=name) take your AttentionBackend, and `nanoinfer.cli.doctor.examine()` check it. Yours goes
    before ours.

    Raises: InvalidTypeError for what is no such class, InvalidValueError for the name "auto".
    """
    if name == "auto":
        raise InvalidValueError("the name 'auto' stands for the best of all backends; choose another")
    needed = ("layout", "default_block_size", "supports_cuda_graph", "unsupported_reason", "begin_step")
    if missing := [part for part in needed if not (isinstance(backend_class, type) and hasattr(backend_class, part))]:
        raise InvalidTypeError(f"backend_class must be a class like AttentionBackend, got {backend_class!r}: no {missing[0]}")
    BACKENDS[name] = backend_class


def select_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    block_size: int | None = None,
    enforce_eager: bool = False,
) -> tuple[str, AttentionBackend]:
    """The backend of that name; "auto" takes the best one that can serve, and tells in the log why not a better one.

    block_size: None is each backend's own. Returns the backend's name, too.
    Raises: InvalidValueError for an unknown name, UnsupportedError where it cannot serve.
    """
    if name != "auto" and name not in BACKENDS:
        raise InvalidValueError(f"attention_backend must be auto or one of {', '.join(BACKENDS)}, got {name!r}")
    for candidate in PREFERRED.get(device.type, ("reference",)) if name == "auto" else (name,):
        backend_class, reason = find_backend(candidate, device, dtype, head_dim, block_size)
        if backend_class is not None:
            return candidate, backend_class(enforce_eager=enforce_eager)
        if name != "auto":
            raise UnsupportedError(f"attention_backend={name!r} cannot be used: {reason}; use 'auto'")
        logger.info("attention_backend: not %s, because %s", candidate, reason)
    raise UnsupportedError(f"no attention backend can serve on {device}; use device='cpu'")


def find_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> tuple[Any, str | None]:
    """A backend's class, or None and the reason why it cannot serve."""
    entry = BACKENDS[name]
    try:
        backend_class = _imported(entry) if isinstance(entry, str) else entry
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except (ImportError, OSError) as error:  # built for another torch, say
        return None, f"it cannot be imported: {first_line(error)}"
    reason = backend_class.unsupported_reason(device, dtype, head_dim, block_size or backend_class.default_block_size)
    return (None, reason) if reason else (backend_class, None)


def _imported(entry: str) -> Any:
    module, _, class_name = entry.partition(":")
    return getattr(import_module(module), class_name)
