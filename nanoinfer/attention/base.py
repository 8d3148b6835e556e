"""The attention interface: the callable of a model, the metadata of a step, the protocol and the table of backends.

A model calls `attend(layer, q, k, v)`, which stores this step's k and v and returns the weighted values. Without a KV
cache a model gets `DenseAttention()`, and with a KV cache a backend's `begin_step(cache, metadata)`. Nothing else differs.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.dense import Keys, Queries, Sinks, Window
from nanoinfer.attention.kv_cache import KVCache, Layout
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError, first_line, shown

logger = logging.getLogger(__name__)


@runtime_checkable
class Attend(Protocol):
    """Causal attention of this step's tokens over all tokens of their sequences so far, themselves included.

    Scores are q . k / sqrt(head_dim). num_heads is a multiple of num_kv_heads (GQA): heads g * i .. g * i + g - 1 share KV
    head i, with g = num_heads / num_kv_heads. Layers with a window or sinks pass them, others do not.
    """

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys, *, window: Window = None, sinks: Sinks = None) -> Queries: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The sequence of each packed token of a step, and the cache blocks of each sequence.

    Example with blocks of 4 slots, where the first sequence decodes its 6th token and the second prefills 3 tokens:

        query_start_loc [0, 1, 4]      packed token 0 is the first sequence's, 1 to 3 are the second's
        seq_lens        [6, 3]         tokens in the cache after this step is written
        block_tables    [[2, 5],       row i: the blocks of sequence i in order, padded with 0
                         [7, 0]]
        slot_mapping    [21, 28, 29, 30]    the slot of each new token: 5 * 4 + 1, 7 * 4 + 0, ...

    The first num_decodes sequences have one new token each, and the prompt chunks follow. A draft counts as a sequence of its
    own, with the blocks of the sequence before it. The *_cpu lists hold the values of
    the tensors as Python ints, for backends that loop over sequences.
    """

    query_start_loc: Int[Tensor, " num_seqs_plus_1"]
    seq_lens: Int[Tensor, " num_seqs"]
    block_tables: Int[Tensor, "num_seqs max_blocks"]  # a block that no query of the step reads may be -1
    slot_mapping: Int[Tensor, " num_tokens"]
    max_query_len: int
    max_seq_len: int
    num_decodes: int
    query_start_loc_cpu: list[int]
    seq_lens_cpu: list[int]
    # The first decode of each decode's sequence, and the most decodes of a sequence, which drafts make more than one. A backend
    # that knows them reads a sequence's keys once. None: each decode is a sequence of its own
    first_decodes: Int[Tensor, " num_decodes"] | None = None
    max_num_decodes: int = 1


@runtime_checkable
class AttentionBackend(Protocol):
    """An implementation of attention over the paged cache, which also chooses the layout of the cache's blocks.

    The engine constructs it as `TheBackend(enforce_eager=...)`. With enforce_eager it must not compile or capture anything.

    It must store k and v by KVCache.write, or as kv_cache.finite_values returns them, and mask a score by setting it to -inf,
    so that a token that is not finite reaches no query of another sequence.

    A backend that reads the cache only by `gather` and `gather_blocks`, or with its `scales`, has `supports_int8_cache = True`.
    Those of NEEDS say what its Attend takes. A backend with `supports_prompt_graph = True` reads only shapes on the host for
    prompt chunks too, of which some may have no tokens.
    """

    layout: Layout
    default_block_size: int
    supports_cuda_graph: bool  # True if a decode step reads only shapes on the host, so that a CUDA graph can capture it

    @staticmethod
    def unsupported_reason(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
        """Return the reason why the backend does not support this model and cache, or None if it does.

        It is called before the backend is constructed. The reason is a clause such as "it runs on cuda only".
        """
        ...

    def begin_step(self, cache: KVCache, metadata: AttentionMetadata) -> Attend:
        """Compute what the layers of one step share, and return the callable that runs once per layer."""
        ...


# What the Attend of some models needs: an attribute that is True in a backend that supports it -> its name in an error.
NEEDS = {"supports_windows": "sliding windows", "supports_sinks": "attention sinks"}
# name -> "module:class", imported on first use because its dependencies may be missing, or the class itself
BACKENDS: dict[str, str | type[Any]] = {
    "reference": "nanoinfer.attention.reference:ReferenceBackend",
    "cpu": "nanoinfer.attention.cpu:CPUBackend",
    "flash": "nanoinfer.attention.flash:FlashBackend",
    "triton": "nanoinfer.attention.triton:TritonBackend",
}
# device type -> the order in which "auto" tries backends
PREFERRED = {"cpu": ("cpu",), "cuda": ("triton", "flash", "reference")}


def register_backend(name: str, backend_class: Any) -> None:
    """Make an attention backend available as LLM(attention_backend=name), and to `nanoinfer.cli.doctor.examine()`.

    Args:
        name: any name except "auto". A backend of this name is replaced.
        backend_class: a class that implements AttentionBackend.

    Raises:
        InvalidTypeError: backend_class is not a class, or lacks a part of the interface.
        InvalidValueError: the name is "auto".
    """
    if name == "auto":
        raise InvalidValueError("the name 'auto' is reserved for choosing a backend; use another name")
    needed = ("layout", "default_block_size", "supports_cuda_graph", "unsupported_reason", "begin_step")
    if missing := [name for name in needed if not (isinstance(backend_class, type) and hasattr(backend_class, name))]:
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
    needed: Sequence[str] = (),
) -> tuple[str, AttentionBackend]:
    """Construct the attention backend of this name, and return its name with it. "auto" is the first of PREFERRED that fits.

    "auto" logs why it skips a backend. block_size: the tokens of a block. None: the backend's default. needed: keys of NEEDS.
    """
    if name != "auto" and name not in BACKENDS:
        raise InvalidValueError(f"attention_backend must be auto or one of {', '.join(BACKENDS)}, got {shown(name)}")
    for candidate in PREFERRED.get(device.type, ("reference",)) if name == "auto" else (name,):
        backend_class, reason = find_backend(candidate, device, dtype, head_dim, block_size)
        if backend_class is not None and (missing := [name for name in needed if not getattr(backend_class, name, False)]):
            backend_class, reason = None, f"it does not support {NEEDS[missing[0]]}"
        if backend_class is not None:
            return candidate, backend_class(enforce_eager=enforce_eager)
        if name != "auto":
            raise UnsupportedError(f"attention_backend={name!r} cannot be used: {reason}; use 'auto'")
        logger.info("attention_backend: not %s, because %s", candidate, reason)
    raise UnsupportedError(f"no attention backend supports {device}; use device='cpu'")


def find_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> tuple[Any, str | None]:
    """Return a backend's class and None, or None and the reason why the backend is not supported."""
    entry = BACKENDS[name]
    try:
        if isinstance(entry, str):
            entry = resolve_name(entry)
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except (ImportError, OSError) as error:  # for example, the package was built for another version of torch
        return None, f"it cannot be imported: {first_line(error)}"
    reason = entry.unsupported_reason(device, dtype, head_dim, block_size or entry.default_block_size)
    return (None, reason) if reason else (entry, None)
