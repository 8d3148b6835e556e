"""Scheduled sequences -> the tensors of one step, packed: all sequences' new tokens in one row of tokens, no padding.

In: a SchedulerPlan. Out: a ForwardBatch. AttentionMetadata's docstring draws an example.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.scheduler import SchedulerPlan
from nanoinfer.sequence import Sequence


@dataclass(frozen=True, slots=True)
class LastDrawn:
    """What a step drew, before anybody has read it: rows[seq] is the sequence's place in token_ids."""

    token_ids: Int[Tensor, "num_rows"]
    rows: dict[Sequence, int]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's input. logits_indices: the packed tokens whose hidden rows meet the LM head, in the order of plan.rows."""

    input_ids: Int[Tensor, "num_tokens"]
    positions: Int[Tensor, "num_tokens"]
    logits_indices: Int[Tensor, "num_rows"]
    attention: AttentionMetadata
    block_copies: list[tuple[int, int]]

    @classmethod
    def build(
        cls, plan: SchedulerPlan, block_size: int, device: torch.device, last_drawn: "LastDrawn | None" = None
    ) -> "ForwardBatch":
        """last_drawn: of the step before, if there are sequences whose newest token is on the device alone."""
        drawn_at: list[int] = []
        drawn_rows: list[int] = []
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for item in plan.scheduled:
            seq = item.sequence
            start = seq.num_computed_tokens
            end = start + item.num_new_tokens
            input_ids += seq.token_ids[start:end]
            if last_drawn is not None and end > len(seq.token_ids):
                drawn_at.append(len(input_ids))
                drawn_rows.append(last_drawn.rows[seq])
                input_ids.append(0)  # until the device fills it in
            positions += range(start, end)
            slots += [seq.block_table[i // block_size] * block_size + i % block_size for i in range(start, end)]

        query_lens = [item.num_new_tokens for item in plan.scheduled]
        query_start_loc = [0, *accumulate(query_lens)]
        seq_lens = [item.sequence.num_computed_tokens + item.num_new_tokens for item in plan.scheduled]
        max_blocks = max(len(item.sequence.block_table) for item in plan.scheduled)
        block_tables = [
            item.sequence.block_table + [0] * (max_blocks - len(item.sequence.block_table)) for item in plan.scheduled
        ]

        def tensor(values: list) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        attention = AttentionMetadata(
            query_start_loc=tensor(query_start_loc),
            seq_lens=tensor(seq_lens),
            block_tables=tensor(block_tables),
            slot_mapping=tensor(slots),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            num_decodes=plan.num_decode_tokens,
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=seq_lens,
        )
        ids = tensor(input_ids)
        if last_drawn is not None and drawn_at:
            ids[tensor(drawn_at)] = last_drawn.token_ids[tensor(drawn_rows)].clamp(
                min=0
            )  # -1: none, and its row will be dropped
        return cls(ids, tensor(positions), tensor([i for _, i in plan.rows]), attention, list(plan.block_copies))
