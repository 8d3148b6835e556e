"""Turn scheduled sequences into the packed tensors of one step: the new tokens of all sequences in a row, without padding.

In: a StepPlan. Out: a ForwardBatch. AttentionMetadata's docstring has an example.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata, StateUpdate
from nanoinfer.execution.packing import pack
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer.system.transfer import integers_on_device

# The extras of a sequence (Sequence.extras), its first packed token, and the token after its last.
ExtraRuns = tuple[tuple[Mapping[str, object], int, int], ...]


@dataclass(frozen=True, slots=True)
class PreviousTokens:
    """The tokens that the previous step sampled, still on the device. rows[seq]: the sequence's row in token_ids."""

    token_ids: Int[Tensor, " num_rows"]
    rows: dict[Sequence, int]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of a step.

    Attributes:
        logits_indices: the packed indices of the tokens whose hidden rows enter the LM head, in the order of plan.rows, or a
            slice of all tokens.
        attention: the metadata of all layers, or of the first KV group. further_groups has that of the others.
        extras: the extras of the sequences that have some, for runners that wrap the model's.
    """

    input_ids: Int[Tensor, " num_tokens"]
    positions: Int[Tensor, " num_tokens"]
    logits_indices: Int[Tensor, " num_rows"] | slice
    attention: AttentionMetadata
    block_copies: list[tuple[int, int]]
    further_groups: tuple[AttentionMetadata, ...] = ()
    extras: ExtraRuns = ()

    @classmethod
    def build(
        cls,
        plan: StepPlan,
        block_size: int,
        device: torch.device,
        previous: PreviousTokens | None = None,
        *,
        has_single_queries: bool = False,
    ) -> "ForwardBatch":
        """Make the tensors of a plan.

        Args:
            previous: the previous step's tokens, if some of the newest tokens are only on the device. None: all are known.
            has_single_queries: if True, each token of a chunk is a query of its own for the attention, as in decoding, so
                that a token's bits do not depend on the chunk (batch_invariant).
        """
        packed = pack(plan, block_size, None if previous is None else previous.rows)
        query_start_loc = [0, *accumulate(packed.query_lens)]
        block_tables = _padded([seq.block_table for seq in packed.sequences])
        logits_indices = [index for _, index in plan.rows]
        all_tokens = list(range(len(packed.input_ids)))
        has_all_rows = logits_indices == all_tokens
        ids, positions, starts, lens, tables, slots, rows, placeholders, previous_rows = integers_on_device(
            [
                packed.input_ids, packed.positions, query_start_loc, packed.seq_lens, block_tables, packed.slots,
                [] if has_all_rows else logits_indices, packed.placeholders, packed.previous_rows,
            ],
            device,
        )  # fmt: skip
        if previous is not None and packed.previous_rows == all_tokens and len(previous.token_ids) == len(all_tokens):
            ids = previous.token_ids.clamp(min=0)  # -1 is no token, and its row is dropped later
        elif previous is not None and packed.placeholders:
            ids[placeholders] = previous.token_ids[previous_rows].clamp(min=0)
        attention = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=lens,
            block_tables=tables.view(len(packed.sequences), -1),
            slot_mapping=slots,
            max_query_len=max(packed.query_lens),
            max_seq_len=max(packed.seq_lens),
            num_decodes=plan.num_decode_tokens,
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=packed.seq_lens,
            states=_states_of(plan),
        )
        groups = [attention]
        for tables_of_group in zip(*[_hybrid(seq).block_tables for seq in packed.sequences], strict=True):
            groups.append(_in_group(attention, list(tables_of_group), packed.positions, block_size))
        runs = zip(packed.sequences, query_start_loc, query_start_loc[1:], strict=False)
        extras = tuple((seq.extras, start, stop) for seq, start, stop in runs if seq.extras)
        if has_single_queries:
            groups = list(map(single_queries, groups))
        indices = slice(0, len(logits_indices)) if has_all_rows else rows
        return cls(ids, positions, indices, groups[0], list(plan.block_copies), tuple(groups[1:]), extras)


def _padded(tables: list[list[int]]) -> list[int]:
    """Join block tables, each padded with 0 to the length of the longest."""
    max_blocks = max(map(len, tables))
    padded: list[int] = []
    for table in tables:
        padded += table + [0] * (max_blocks - len(table))
    return padded


def _in_group(first: AttentionMetadata, tables: list[list[int]], positions: list[int], block_size: int) -> AttentionMetadata:
    """Return the metadata of a further KV group, which has these block tables."""
    starts = first.query_start_loc_cpu
    slots = [
        table[position // block_size] * block_size + position % block_size
        for i, table in enumerate(tables)
        for position in positions[starts[i] : starts[i + 1]]
    ]
    block_tables, slot_mapping = integers_on_device([_padded(tables), slots], first.seq_lens.device)
    return replace(first, block_tables=block_tables.view(len(tables), -1), slot_mapping=slot_mapping)


NOTHING = SimpleNamespace(block_tables=[], state_slot=-1, state_writes={})


def _hybrid(seq: Sequence) -> Any:
    return seq.extras.get("hybrid", NOTHING)


def _states_of(plan: StepPlan) -> tuple[StateUpdate, ...]:
    """Return where the sequences' states are, or nothing if the model keeps no states."""
    if not [item for item in plan.scheduled if _hybrid(item.sequence).state_writes]:
        return ()
    updates, start = [], 0
    for item in plan.scheduled:
        seq, stop = item.sequence, start + item.num_packed_tokens
        if (record := _hybrid(seq)).state_writes:
            writes = {num_tokens - seq.num_computed_tokens: slot for num_tokens, slot in record.state_writes.items()}
            updates.append(StateUpdate(start, stop, record.state_slot, writes))
        start = stop
    return tuple(updates)


def single_queries(metadata: AttentionMetadata) -> AttentionMetadata:
    """Return the same step with every packed token as a decoding sequence of its own, which ends with that token.

    Rows of the same sequence have the same blocks, and are in order.
    """
    starts, seq_lens = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
    query_lens = metadata.query_start_loc.diff()
    lens_cpu = [seq_len - left for i, seq_len in enumerate(seq_lens) for left in reversed(range(starts[i + 1] - starts[i]))]
    return replace(
        metadata,
        query_start_loc=torch.arange(len(lens_cpu) + 1, device=query_lens.device),
        seq_lens=integers_on_device([lens_cpu], query_lens.device)[0],
        block_tables=metadata.block_tables.repeat_interleave(query_lens, dim=0),
        max_query_len=1,
        num_decodes=len(lens_cpu),
        query_start_loc_cpu=list(range(len(lens_cpu) + 1)),
        seq_lens_cpu=lens_cpu,
    )
