"""Scheduled sequences -> the tensors of one step, packed: the new tokens of all sequences one after the other, no padding.

In: a StepPlan. Out: a ForwardBatch. AttentionMetadata's docstring has an example.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.devices.transfer import integers_on_device
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer.tracing import BatchBuilt, Tracer


@dataclass(frozen=True, slots=True)
class LastDrawn:
    """The tokens that a step drew, still on the device. rows[seq] is the sequence's row in token_ids."""

    token_ids: Int[Tensor, " num_rows"]
    rows: dict[Sequence, int]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input. logits_indices: the packed tokens whose hidden rows enter the LM head, in the order of plan.rows."""

    input_ids: Int[Tensor, " num_tokens"]
    positions: Int[Tensor, " num_tokens"]
    logits_indices: Int[Tensor, " num_rows"]
    attention: AttentionMetadata
    block_copies: list[tuple[int, int]]

    @classmethod
    def build(
        cls,
        plan: StepPlan,
        block_size: int,
        device: torch.device,
        last_drawn: "LastDrawn | None" = None,
        tracer: Tracer | None = None,
        *,
        has_single_queries: bool = False,
    ) -> "ForwardBatch":
        """The tensors of a plan.

        Args:
            plan: The scheduled sequences and block copies.
            block_size: Tokens of a block.
            device: The device of the tensors.
            last_drawn: The previous step's tokens, if the newest tokens of some sequences are only on the device.
            tracer: Receives a BatchBuilt event.
            has_single_queries: Let the attention compute a chunk's tokens as it computes decodes, one query each, so that a
                token's bits do not depend on the chunk (batch_invariant).
        """
        drawn_at: list[int] = []
        drawn_rows: list[int] = []
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_lens: list[int] = []
        seq_lens: list[int] = []
        sequences: list[Sequence] = []  # of each query: one for a chunk, one for the newest token, one for each draft
        for item in plan.scheduled:
            seq = item.sequence
            start = seq.num_computed_tokens
            end = start + item.num_new_tokens
            input_ids += seq.token_ids[start:end]
            if last_drawn is not None and end > len(seq.token_ids):
                drawn_at.append(len(input_ids))
                drawn_rows.append(last_drawn.rows[seq])
                input_ids.append(0)  # replaced on the device below
            num_drafts = len(item.draft_token_ids)
            input_ids += item.draft_token_ids
            positions += range(start, end + num_drafts)
            slots += [seq.block_table[i // block_size] * block_size + i % block_size for i in range(start, end + num_drafts)]
            query_lens += [item.num_new_tokens] + [1] * num_drafts
            seq_lens += range(end, end + num_drafts + 1)
            sequences += [seq] * (num_drafts + 1)

        query_start_loc = [0, *accumulate(query_lens)]
        max_blocks = max(len(seq.block_table) for seq in sequences)
        block_tables: list[int] = []
        for seq in sequences:
            block_tables += seq.block_table + [0] * (max_blocks - len(seq.block_table))
        logits_indices = [index for _, index in plan.rows]
        if tracer is not None:
            known_ids = list(input_ids)
            for index in drawn_at:
                known_ids[index] = -1
            tracer.emit(
                BatchBuilt(
                    sequence_ids=tuple(seq.sequence_id for seq in sequences),
                    query_start_loc=tuple(query_start_loc),
                    seq_lens=tuple(seq_lens),
                    input_ids=tuple(known_ids),
                    positions=tuple(positions),
                    slot_mapping=tuple(slots),
                    logits_indices=tuple(logits_indices),
                )
            )

        ids, at, starts, lens, tables, slot_mapping, wanted, drawn_from, drawn_to = integers_on_device(
            [
                input_ids, positions, query_start_loc, seq_lens, block_tables, slots, logits_indices,
                drawn_rows, drawn_at,
            ],
            device,
        )  # fmt: skip
        if last_drawn is not None and drawn_at:
            # -1 is no token. Such a row is dropped later.
            ids[drawn_to] = last_drawn.token_ids[drawn_from].clamp(min=0)
        attention = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=lens,
            block_tables=tables.view(len(seq_lens), max_blocks),
            slot_mapping=slot_mapping,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            num_decodes=plan.num_decode_tokens,
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=seq_lens,
        )
        if has_single_queries:
            attention = single_queries(attention)
        return cls(ids, at, wanted, attention, list(plan.block_copies))


def single_queries(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same step with every packed token as a decoding sequence of its own, which ends with the token.

    Rows of one sequence have the same blocks, and are in order.
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
