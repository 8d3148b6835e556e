"""Turn scheduled sequences into the packed tensors of one step: the new tokens of all sequences in a row, without padding.

In: a StepPlan. Out: a ForwardBatch. AttentionMetadata's docstring has an example.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.execution.packing import first_decodes, pack
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer.system.transfer import integers_on_device

# The extras of a sequence (Sequence.extras), its first packed token, and the token after its last.
ExtraRuns = tuple[tuple[Mapping[str, object], int, int], ...]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of a step."""

    input_ids: Int[Tensor, " num_tokens"]
    positions: Int[Tensor, " num_tokens"]
    # the packed indices of the tokens whose hidden rows enter the LM head, in the order of plan.rows, or a slice of all tokens
    logits_indices: Int[Tensor, " num_rows"] | slice
    attention: AttentionMetadata
    block_copies: list[tuple[int, int]]
    # the extras of the sequences that have some, for what wraps the runner or begin_step. They reach every rank
    extras: ExtraRuns = ()

    @classmethod
    def build(cls, plan: StepPlan, block_size: int, device: torch.device) -> "ForwardBatch":
        """Make the tensors of a plan. The id of a token that only the device knows is 0."""
        packed = pack(plan, block_size)
        query_start_loc = [0, *accumulate(packed.query_lens)]
        block_tables = padded([seq.block_table for seq in packed.sequences])
        logits_indices = [index for _, index in plan.rows]
        has_all_rows = logits_indices == list(range(len(packed.input_ids)))
        has_drafts = plan.has_further_rows
        ids, positions, starts, lens, tables, slots, rows, firsts = integers_on_device(
            [
                packed.input_ids, packed.positions, query_start_loc, packed.seq_lens, block_tables, packed.slots,
                [] if has_all_rows else logits_indices, first_decodes(plan) if has_drafts else [],
            ],
            device,
        )  # fmt: skip
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
            first_decodes=firsts if has_drafts else None,
            max_num_decodes=max(1 + len(item.draft_token_ids) for item in plan.scheduled) if has_drafts else 1,
        )
        runs = zip(packed.sequences, query_start_loc, query_start_loc[1:], strict=False)
        extras = tuple((seq.extras, start, stop) for seq, start, stop in runs if seq.extras)
        indices = slice(0, len(logits_indices)) if has_all_rows else rows
        return cls(ids, positions, indices, attention, list(plan.block_copies), extras)


def padded(tables: list[list[int]]) -> list[int]:
    """Join block tables, each padded with 0 to the length of the longest."""
    max_blocks = max(map(len, tables))
    padded: list[int] = []
    for table in tables:
        padded += table + [0] * (max_blocks - len(table))
    return padded
