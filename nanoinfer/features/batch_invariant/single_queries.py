"""Attend with one query at a time, in a prompt as in decoding, so that a token's bits do not depend on its chunk."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import RunnerWrapper
from nanoinfer.system.transfer import integers_on_device


class InvariantRunner(RunnerWrapper):
    """Passes each step on with single queries."""

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        return self.inner.forward(replace(batch, attention=single_queries(batch.attention)))


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
        first_decodes=None,
        max_num_decodes=1,
    )
