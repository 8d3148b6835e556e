"""Whether a prompt's hidden rows have the same bits in any batch, measured with the loaded model on this machine.

In: a model ready to run and its attention backend. Out: True or False. models/cpu_linear.py has examined the linear layers more
closely. This check adds the rest: norms, rotations, attention, a model class registered by the user.

A prompt and two decode steps run alone, then beside other prompts, and with batch_invariant also token by token. One layer of
each kind runs, because the others are alike.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.devices.machine_checks import verdict
from nanoinfer.devices.row_forms import same_bits
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.scratch import scratch_sequences
from nanoinfer.models.cpu_program import CompiledLayers
from nanoinfer.models.parallel_layers import Communicator
from nanoinfer.models.registry import Model
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan

PROMPT_LENGTHS = (5, 37, 1, 66, 20)  # the second one is compared
COMPARED = 1
NUM_DECODES = 2


def is_batch_independent(
    model: Model,
    backend: AttentionBackend,
    block_size: int,
    dtype: torch.dtype,
    *,
    has_single_queries: bool = False,
    communicator: Communicator | None = None,
) -> bool:
    """Whether rows are independent of the batch. With has_single_queries (batch_invariant), also of the chunk.

    Measured once per machine for models and backends of this package. Measured in every process for others, because their code
    may change, and for a model that several ranks share, because all of them must take part.
    """
    if communicator is not None:
        return bool(communicator.minimum(_try(model, backend, block_size, dtype, has_single_queries)))
    if not all(type(part).__module__.startswith("nanoinfer.") for part in (model, backend)):
        return _try(model, backend, block_size, dtype, has_single_queries)
    digest = hashlib.sha256(f"{model.config} {model}".encode()).hexdigest()[:12]  # names the classes of its layers
    dtype_name = str(dtype).removeprefix("torch.")
    check = f"model {type(model).__name__} {digest} {dtype_name}, {type(backend).__name__}, blocks of {block_size}"
    if isinstance(backend, CPUBackend):
        check += f", attention in {backend.form}"
    if has_single_queries:
        check += ", one query at a time"

    def measure() -> str:
        return "independent" if _try(model, backend, block_size, dtype, has_single_queries) else "dependent"

    return verdict(check, measure) == "independent"


def cannot_be_invariant(dtype: torch.dtype, device: torch.device) -> UnsupportedError:
    """The error for batch_invariant=True on a machine that does not support it."""
    return UnsupportedError(
        "batch_invariant=True requires rows whose bits do not depend on the batch; this machine's do, for this model in "
        f"{str(dtype).removeprefix('torch.')} on {device.type}; leave it out, or try another dtype on a CPU"
    )


@torch.inference_mode()
def _try(model: Model, backend: AttentionBackend, block_size: int, dtype: torch.dtype, has_single_queries: bool) -> bool:
    longest = model.config.max_position_embeddings - NUM_DECODES
    if longest < 1:
        return False  # max_position_embeddings is too small for the check
    lengths = [min(length, longest) for length in PROMPT_LENGTHS]
    generator = torch.Generator().manual_seed(0)
    token_ids = [
        torch.randint(0, model.config.vocab_size, (length + NUM_DECODES,), generator=generator).tolist() for length in lengths
    ]
    sequences = scratch_sequences(token_ids, block_size)
    with _one_layer_of_each_kind(model):
        cache = KVCache(
            num_layers=model.config.num_hidden_layers,
            num_blocks=sum(len(seq.block_table) for seq in sequences),
            block_size=block_size,
            num_kv_heads=model.config.num_key_value_heads,
            head_dim=model.config.head_dim,
            dtype=dtype,
            layout=backend.layout,
        )
        decodes = [1] * NUM_DECODES
        run = partial(_hidden_rows, model, backend, cache, has_single_queries=has_single_queries)
        alone = run([sequences[COMPARED]], [[num] for num in (lengths[COMPARED], *decodes)])
        together = run(sequences, [lengths, *([num] * len(sequences) for num in decodes)])
        if has_single_queries:
            token_by_token = run([sequences[COMPARED]], [[1]] * len(alone))
            if not same_bits(token_by_token, alone):
                return False
    return same_bits(together, alone)


def _hidden_rows(
    model: Model,
    backend: AttentionBackend,
    cache: KVCache,
    sequences: list[Sequence],
    steps: list[list[int]],
    *,
    has_single_queries: bool,
) -> Float[Tensor, "num_tokens hidden"]:
    """The compared sequence's rows. steps: the number of each sequence's new tokens in each step."""
    compared = sequences[COMPARED if len(sequences) > 1 else 0]
    for seq in sequences:
        seq.num_computed_tokens = 0
    rows = []
    for nums in steps:
        items = [ScheduledSequence(seq, num) for seq, num in zip(sequences, nums, strict=True)]
        items.sort(key=lambda item: item.num_new_tokens > 1)  # the scheduler's order
        plan, device = StepPlan(tuple(items)), torch.device("cpu")
        batch = ForwardBatch.build(plan, cache.block_size, device, has_single_queries=has_single_queries)
        hidden = model(batch.input_ids, batch.positions, backend.begin_step(cache, batch.attention))
        start = 0
        for item in items:
            if item.sequence is compared:
                rows.append(hidden[start : start + item.num_new_tokens].clone())
            start += item.num_new_tokens
            item.sequence.num_computed_tokens += item.num_new_tokens
    return torch.cat(rows)


@contextmanager
def _one_layer_of_each_kind(model: Model) -> Iterator[None]:
    """Inside, the model has one layer of each form: most models one, some an MLP in one layer and experts in another.

    A model without a list of layers keeps all of its layers.
    """
    for name, child in cast(nn.Module, model).named_children():
        if not isinstance(child, nn.ModuleList):
            continue
        blocks = child[0].blocks if len(child) == 1 and isinstance(child[0], CompiledLayers) else child
        if len(blocks) == model.config.num_hidden_layers:
            kinds = nn.ModuleList({repr(layer): layer for layer in blocks}.values())
            setattr(model, name, kinds if blocks is child else nn.ModuleList([CompiledLayers(kinds)]))
            try:
                yield
            finally:
                setattr(model, name, child)
            return
    yield
