"""The graphs of decode steps share the tensors that they read, whatever their size."""

import torch

from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.fast.batch_independence import scratch_sequences
from nanoinfer.fast.cuda.graphs import DecodeGraphs
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, MAX_NUM_ROWS = 4, 40, 24, 19


def run_again(run):
    """In place of a capture. A replay runs the function again."""
    out = torch.zeros_like(run())
    return lambda: out.copy_(run()), out


def decode_batch(lengths):
    sequences = scratch_sequences([[0] * length for length in lengths], BLOCK_SIZE)
    for seq in sequences:
        seq.more_block_tables = [seq.block_table[::-1]]
        seq.num_computed_tokens = len(seq.token_ids) - 1
    return ForwardBatch.build(StepPlan(tuple(ScheduledSequence(seq, 1) for seq in sequences)), BLOCK_SIZE, torch.device("cpu"))


def test_graphs_of_all_sizes_read_the_first_rows_of_one_table_for_each_group_and_pad_the_others():
    info = ExecutorInfo(64, MAX_MODEL_LEN, MAX_MODEL_LEN, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    graphs, tables = DecodeGraphs(info, MAX_NUM_ROWS, run_again), {}

    def run(batch):
        for group, metadata in enumerate((batch.attention, *batch.further_groups)):
            if batch.attention.seq_lens_cpu[0] == MAX_MODEL_LEN:  # the graphs' own
                assert torch.all(metadata.seq_lens[num_rows:] == 1)
                assert torch.all(metadata.block_tables[num_rows:] == NUM_BLOCKS)
                assert torch.all(metadata.slot_mapping[num_rows:] == NUM_BLOCKS * BLOCK_SIZE)
                storage = metadata.block_tables.untyped_storage()
                tables[group, storage.data_ptr()] = storage.nbytes()
        return batch.attention.seq_lens[:, None].float() + batch.further_groups[0].block_tables[:, :1]

    for num_rows in (*range(1, MAX_NUM_ROWS + 1), 3, 17, 5):
        batch = decode_batch([1 + row % 5 for row in range(num_rows)])
        assert torch.equal(graphs.replay(batch, run), run(batch))
    assert list(tables.values()) == [MAX_NUM_ROWS * -(-MAX_MODEL_LEN // BLOCK_SIZE) * 4] * 2
