"""A replayed step is the step of its batch, whatever the shapes of the graphs, which share the tensors that they read.

Captures are doubles on a CPU. The model is a double too, whose rows are sums of what their sequence has in the cache.
"""

import itertools
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.fast.batch_independence import scratch_sequences
from nanoinfer.fast.cuda.graphs import DECODE_SIZES, PROMPT_SIZES, CUDACapture, StepGraphs, StepSize, prompt_sizes
from nanoinfer.features.hybrid.groups import groups_of
from nanoinfer.features.hybrid.tables import tables_of
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, MAX_NUM_ROWS = 4, 400, 24, 19
CPU = torch.device("cpu")


def run_again(run):
    """In place of a capture. A replay runs the function again."""
    out = torch.zeros_like(run())
    return lambda: out.copy_(run()), out


def graphs_of(capture=run_again, *, max_num_rows=MAX_NUM_ROWS, num_graph_tokens=64, **options):
    info = ExecutorInfo(64, MAX_MODEL_LEN, MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE, num_graph_tokens=num_graph_tokens)
    return StepGraphs(info, max_num_rows, capture, num_groups=2, **({"sizes": (8, 24, 64)} | options))


def batch_of(lengths, rng=random):
    """A step of two KV groups. lengths: (tokens in the cache, new tokens) of each sequence, decodes first."""
    sequences = scratch_sequences([[rng.randrange(1, 60) for _ in range(sum(pair))] for pair in lengths], BLOCK_SIZE)
    for seq, (num_cached, _) in zip(sequences, lengths, strict=True):
        tables_of(seq).block_tables = [seq.block_table[::-1]]
        seq.num_computed_tokens = num_cached
    scheduled = tuple(ScheduledSequence(seq, new) for seq, (_, new) in zip(sequences, lengths, strict=True))
    return ForwardBatch.build(StepPlan(scheduled), BLOCK_SIZE, CPU)


class Model:
    """Writes a token's id and position into its slots, and returns, for each token, sums over its sequence up to it."""

    def __init__(self):
        self.pages = torch.zeros(2, (NUM_BLOCKS + 1) * BLOCK_SIZE)

    def __call__(self, batch):
        groups = groups_of(batch, BLOCK_SIZE)
        hidden = torch.full((len(batch.input_ids), 2), torch.nan)
        for of_group, (metadata, pages) in enumerate(zip(groups, self.pages, strict=True)):
            pages[metadata.slot_mapping] = batch.input_ids + batch.positions / 100
            starts, tables = metadata.query_start_loc.tolist(), metadata.block_tables
            num_new = [stop - start for start, stop in itertools.pairwise(starts)]
            assert num_new[: metadata.num_decodes] == [1] * metadata.num_decodes
            assert 1 not in num_new[metadata.num_decodes :]  # a kernel for chunks computes them
            assert max(num_new) <= metadata.max_query_len
            assert metadata.seq_lens.max() <= metadata.max_seq_len
            for seq, (start, stop) in enumerate(itertools.pairwise(starts)):
                for token in range(start, stop):
                    num_keys = int(metadata.seq_lens[seq]) - (stop - 1 - token)
                    slots = tables[seq, : -(-num_keys // BLOCK_SIZE), None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
                    keys = pages[slots.flatten()[:num_keys]]
                    hidden[token, of_group] = (keys * torch.arange(1, num_keys + 1)).sum()
        return hidden


def random_lengths(rng, max_num_decodes=MAX_NUM_ROWS, max_num_tokens=64):
    decodes = [(rng.randrange(MAX_MODEL_LEN - 1), 1) for _ in range(rng.choice([0, 0, 1, 3, 16, 17, max_num_decodes]))]
    chunks = []
    while rng.random() < 0.7:
        num_cached = rng.choice([0, 0, 4, 9])
        chunks.append((num_cached, rng.randint(2, MAX_MODEL_LEN - num_cached)))
    return [*decodes, *chunks] or [(3, 1)]


def spoil(graphs, pages):
    """Give values that no row may read to everything that a replay does not write first."""
    pages[:, NUM_BLOCKS * BLOCK_SIZE :] = torch.nan
    if "hidden" in graphs._rows:
        graphs._rows["hidden"].fill_(torch.nan)


def check_random_steps(num_steps, graphs, rng):
    """Compare steps with eager ones: their rows and both caches. Returns how many were replayed."""
    replayed, eager, num_replayed = Model(), Model(), 0
    for _ in range(num_steps):
        batch = batch_of(random_lengths(rng), rng)
        spoil(graphs, replayed.pages)
        hidden = graphs.try_replay(batch, replayed)
        num_replayed += hidden is not None
        hidden = replayed(batch) if hidden is None else hidden
        torch.testing.assert_close(hidden, eager(batch), rtol=0, atol=0)
        used = slice(NUM_BLOCKS * BLOCK_SIZE)
        assert torch.equal(replayed.pages[:, used], eager.pages[:, used])
    return num_replayed


def test_rows_and_caches_of_random_steps_are_those_of_eager_steps():
    assert check_random_steps(60, graphs_of(), random.Random(0)) > 40


def test_a_step_is_padded_to_the_smallest_shape_that_has_room():
    shapes, graphs = [], graphs_of()

    def run(batch):
        shapes.append((len(batch.input_ids) - batch.attention.num_decodes, batch.attention.num_decodes))
        return torch.zeros(len(batch.input_ids), 2)

    def shape_of(num_decodes, *chunks):
        is_replayed = graphs.try_replay(batch_of([(3, 1)] * num_decodes + [(0, num) for num in chunks]), run) is not None
        return shapes[-1] if is_replayed else None

    assert shape_of(1) == (0, 1)
    assert [shape_of(num) for num in (3, 8, 9, 17, 19)] == [(0, 4), (0, 8), (0, 16), (0, 19), (0, 19)]
    assert [shape_of(0, num) for num in (2, 8, 9, 24)] == [(8, 0), (8, 0), (24, 0), (24, 0)]
    assert [shape_of(num, 8) for num in (1, 16, 17, 19)] == [(8, 16), (8, 16), (8, 19), (8, 19)]
    assert [shape_of(2, *[2] * num) for num in (5, 12, 16)] == [(24, 16), (24, 16), (64, 16)]
    assert shape_of(2, *[2] * 17) is None  # more chunks than slots
    assert shape_of(0, *[20] * 4) is None  # more tokens than the largest shape
    assert shape_of(20) is None


def test_the_memory_decides_which_shapes_there_are():
    assert graphs_of(num_graph_tokens=0).shapes == [StepSize(0, size) for size in (1, 2, 4, 8, 16, 19)]
    assert {shape.num_chunk_tokens for shape in graphs_of(num_graph_tokens=24).shapes} == {0, 8, 24}
    assert {shape.num_decodes for shape in graphs_of().shapes if shape.num_chunk_tokens} == {0, 16, 19}
    assert [prompt_sizes(num)[-1] for num in (40, 64, 1000, 2048, 4096)] == [40, 64, 1000, 2048, 2048]
    assert prompt_sizes(9999) == PROMPT_SIZES
    shapes = graphs_of(max_num_rows=300, num_graph_tokens=64).shapes
    assert {shape.num_decodes for shape in shapes if shape.num_chunk_tokens} == {*DECODE_SIZES, 300}


def recording(captured):
    """A capture that keeps the numbers of rows."""

    def capture(run):
        captured.append(len(run()))
        return run_again(run)

    return capture


def test_all_shapes_are_captured_before_the_first_step_the_largest_first_and_share_a_table_for_each_group():
    captured, tables, model = [], {}, Model()

    def run(batch):
        for group, metadata in enumerate(groups_of(batch, BLOCK_SIZE)):
            assert torch.all(metadata.block_tables == NUM_BLOCKS)  # all rows are padding, in its own block
            storage = metadata.block_tables.untyped_storage()
            tables[group, storage.data_ptr()] = storage.nbytes()
        return model(batch)

    graphs = graphs_of(recording(captured))
    assert len(graphs.prepare(run)) == 64 + 19
    num_blocks = -(-MAX_MODEL_LEN // BLOCK_SIZE)
    assert list(tables.values()) == [(MAX_NUM_ROWS + 16) * num * 4 for num in (num_blocks, -(-num_blocks // 4) * 4)]
    assert captured == sorted(map(sum, graphs.shapes), reverse=True)
    assert check_random_steps(5, graphs, random.Random(1)) > 2
    assert len(captured) == len(graphs.shapes)


def test_what_a_step_lacked_is_captured_when_nothing_runs_or_at_once():
    model, batch, captured = Model(), batch_of([(3, 1)] * 3), []
    graphs = graphs_of(recording(captured), on_first_use=False)
    assert graphs.try_replay(batch, model) is None
    assert captured == []
    assert [graphs.capture_next(), graphs.capture_next(), graphs.capture_next()] == [True, True, False]
    assert captured == [64 + 19, 4]
    assert torch.equal(graphs.try_replay(batch, model), Model()(batch))
    at_once = graphs_of(recording(captured))
    assert torch.equal(at_once.try_replay(batch, model), Model()(batch))
    assert captured == [64 + 19, 4] * 2
    assert not at_once.capture_next()


def test_a_capture_that_fails_is_logged_once_and_not_tried_again(caplog):
    calls = []

    def fail(run):
        calls.append(run)
        raise RuntimeError("CUDA out of memory\nand so on")

    graphs, model = graphs_of(fail), Model()
    for _ in range(2):
        assert graphs.try_replay(batch_of([(2, 1), (0, 9)]), model) is None
    assert len(calls) == 2  # the largest, and that of the step
    text = "a step of 16 decodes and 24 prompt tokens could not be captured as a CUDA graph (CUDA out of memory)"
    assert caplog.text.count(text) == 1


class Streams:
    """Of torch.cuda only the streams. waits: which streams have waited for which."""

    def __init__(self):
        self.waits = []
        self.current = self.first = self.Stream()

    def Stream(self):
        stream = SimpleNamespace()
        stream.wait_stream = lambda other: self.waits.append((stream, other))
        return stream

    def current_stream(self):
        return self.current

    def CUDAGraph(self):
        pass

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        before, self.current = self.current, stream
        yield
        self.current = before  # not after an error, as in torch


@pytest.mark.parametrize("num_good", [0, 1])
def test_after_a_capture_that_fails_kernels_are_launched_on_the_stream_of_before_behind_those_of_the_capture(
    num_good, monkeypatch
):
    gpu, runs = Streams(), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    capture = CUDACapture(CPU)

    def run():
        runs.append(gpu.current)
        if len(runs) > num_good:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        capture(run)
    assert len(runs) == num_good + 1
    assert gpu.first not in runs
    assert gpu.current is gpu.first
    assert gpu.waits == [(runs[0], gpu.first), (gpu.first, runs[0])]


# ---- faults, which the comparison must find

plain_fill = StepGraphs._fill


def stale(name):
    """A tensor of the graphs that keeps what the first step of a shape has filled in."""
    seen = set()

    def fill(self, shape, batch):
        tensors = {"starts": self._inputs[shape].attention.query_start_loc} | self._rows
        kept = tensors[name].clone()
        plain_fill(self, shape, batch)
        if batch is not None and shape in seen:
            tensors[name].copy_(kept)
        seen.add(shape)

    return fill


def spoiled(spoil):
    """Inputs to which something is done. spoil: takes them and the shape."""

    def fill(self, shape, batch):
        plain_fill(self, shape, batch)
        if batch is not None:
            spoil(self._inputs[shape].attention, shape)

    return fill


def begin_a_token_later(inputs, shape):
    if shape.num_chunk_tokens:
        inputs.query_start_loc[shape.num_decodes + 1 :] += 1


STATIC = ("ids", "positions", "lengths", "tables", "further tables", "slots 0", "slots 1", "starts")
FAULTS = {f"{name} that are not filled again": stale(name) for name in STATIC} | {
    "rows that read a key of the padding block": spoiled(lambda inputs, _: inputs.block_tables[:1, 0].fill_(NUM_BLOCKS)),
    "a chunk that begins a token later": spoiled(begin_a_token_later),
    "a slot off by one": spoiled(lambda inputs, _: inputs.slot_mapping[:1].add_(1)),
    "padding in a block of a sequence": spoiled(
        lambda inputs, _: inputs.slot_mapping.masked_fill_(inputs.slot_mapping == NUM_BLOCKS * BLOCK_SIZE, 0)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices_inputs_that_are_filled_wrongly(fault, monkeypatch):
    monkeypatch.setattr(StepGraphs, "_fill", FAULTS[fault])
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        check_random_steps(60, graphs_of(), random.Random(0))


def test_the_comparison_notices_the_graph_of_another_shape(monkeypatch):
    plain = StepGraphs._shape_of

    def next_smaller(self, *numbers):
        shape = plain(self, *numbers)
        return shape if shape is None or shape[0] != 24 else StepSize(8, shape[1])

    monkeypatch.setattr(StepGraphs, "_shape_of", next_smaller)
    with pytest.raises((AssertionError, RuntimeError)):
        check_random_steps(30, graphs_of(), random.Random(0))
