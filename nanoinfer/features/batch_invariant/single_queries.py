"""Attend with one query at a time, in a prompt as in decoding, so that a token's bits do not depend on its chunk."""

from dataclasses import replace

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
    starts, seq_lens, device = metadata.query_start_loc_cpu, metadata.seq_lens_cpu, metadata.seq_lens.device
    metadata = replace(metadata, first_decodes=None, max_num_decodes=1)  # no program computes several
    if metadata.num_decodes == len(seq_lens):
        return metadata
    rows = [(i, seq_len - left) for i, seq_len in enumerate(seq_lens) for left in reversed(range(starts[i + 1] - starts[i]))]
    sequences, lens_cpu = [i for i, _ in rows], [length for _, length in rows]
    new_starts = list(range(len(rows) + 1))
    on_device = integers_on_device([new_starts, lens_cpu, sequences], device)  # whose numbers the host need not read back
    return replace(
        metadata,
        query_start_loc=on_device[0],
        seq_lens=on_device[1],
        block_tables=metadata.block_tables[on_device[2]],
        max_query_len=1,
        num_decodes=len(rows),
        query_start_loc_cpu=new_starts,
        seq_lens_cpu=lens_cpu,
    )
