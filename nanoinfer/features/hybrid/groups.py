"""The attention of a step whose layers are in several KV groups: each layer attends by the block tables of its group.

In: a ForwardBatch, whose extras have each sequence's tables. Out: the metadata of each group, and an Attend. Models whose
layers form a single group do not use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionBackend, AttentionMetadata
from nanoinfer.attention.dense import Sinks, Window
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.execution.forward_batch import ExtraRuns, ForwardBatch, padded
from nanoinfer.features.hybrid.sizes import KVGroup
from nanoinfer.features.hybrid.tables import HybridTables
from nanoinfer.system.transfer import integers_on_device


class GroupedAttend:
    """Calls the Attend of a layer's group."""

    def __init__(
        self, cache: KVCache, backend: AttentionBackend, metadata: Sequence[AttentionMetadata], groups: Sequence[KVGroup]
    ) -> None:
        self.steps: list[Attend] = [backend.begin_step(cache, of_group) for of_group in metadata]
        # The index of each layer's group, and the layer's place in the group's blocks.
        self.places = {layer: (i, place) for i, group in enumerate(groups) for place, layer in enumerate(group.layers)}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: Window = None, sinks: Sinks = None) -> Tensor:
        group, place = self.places[layer]
        return self.steps[group](place, q, k, v, window=window, sinks=sinks)


class FurtherGroups(NamedTuple):
    """The block tables and the slots of the groups after the first, as in AttentionMetadata."""

    block_tables: Int[Tensor, "num_seqs groups max_blocks"]
    slot_mappings: tuple[Int[Tensor, " num_tokens"], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMetadata(AttentionMetadata):
    """The metadata of the first group with what the others have, for the batch whose tensors a CUDA graph reads."""

    further: FurtherGroups


def groups_of(batch: ForwardBatch, block_size: int) -> list[AttentionMetadata]:
    """Return the metadata of each group, of which batch.attention is the first. Freed blocks before a window may be -1."""
    first, further = batch.attention, further_groups(batch, block_size)
    tables = () if further is None else zip(further.block_tables.unbind(1), further.slot_mappings, strict=True)
    return [first, *(replace(first, block_tables=table, slot_mapping=slots) for table, slots in tables)]


def further_groups(batch: ForwardBatch, block_size: int) -> FurtherGroups | None:
    """Return what the groups after the first have, in tensors that one transfer copies. None: there is one group."""
    first = batch.attention
    if isinstance(first, GroupedMetadata):
        return first.further
    starts, positions = first.query_start_loc_cpu, positions_of(first)
    tables = [run.block_tables for run, start, stop in runs_of(batch.extras) for _ in range(start, stop)]  # of each token
    if not tables or not tables[0]:
        return None
    num_groups, slots = len(tables[0]), []
    for group in range(num_groups):
        blocks = [table[group][position // block_size] for table, position in zip(tables, positions, strict=True)]
        slots.append([block * block_size + position % block_size for block, position in zip(blocks, positions, strict=True)])
    joined = padded([tables[start][group] for group in range(num_groups) for start in starts[:-1]])
    block_tables, *slot_mappings = integers_on_device([joined, *slots], first.seq_lens.device)
    return FurtherGroups(block_tables.view(num_groups, len(starts) - 1, -1).transpose(0, 1), tuple(slot_mappings))


def runs_of(extras: ExtraRuns) -> list[tuple[HybridTables, int, int]]:
    """Return the tables of each sequence that has some, its first packed token, and the token after its last."""
    found = [(run[0].get("hybrid"), *run[1:]) for run in extras]
    return [(tables, start, stop) for tables, start, stop in found if isinstance(tables, HybridTables)]


def positions_of(metadata: AttentionMetadata) -> list[int]:
    """Return the position of each packed token."""
    starts = metadata.query_start_loc_cpu
    return [
        position
        for seq_len, start, stop in zip(metadata.seq_lens_cpu, starts, starts[1:], strict=False)
        for position in range(seq_len - (stop - start), seq_len)
    ]
