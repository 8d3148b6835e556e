"""The steady batch: while the same sequences decode, their state stays on the device, and a step is the replay of one graph.

In: the plans of steps. Out: the tokens that an engine without it gives. Most steps compute the next token of the same sequences
as the step before. Then the plan is the same, and the device only needs to know which blocks have begun:

    host      Continued: the same rows again, and a block for each sequence whose last block is full
    device    SteadyBatch: forward, LM head, draw, and the advance, which makes each row's token its next input

                  ids        13   7  42      the newest token of each row             = the token that was drawn
                  positions   5  11   4      its position                             + 1
                  lengths     6  12   5      the tokens in the cache with it          + 1
                  slots      21  83  16      where its keys and values are stored     + 1, or the first slot of a new block
                  seeds, steps, tables, parameters of the draw                        as before

SteadyExecutor writes the rows when a plan has others. It leaves other steps to LocalExecutor: those with prompts, penalties,
grammars or log-probabilities, and whatever else must read a token before the next one is drawn.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.config import EngineConfig
from nanoinfer.engine.observer import Observer, Planner
from nanoinfer.engine.request import Request
from nanoinfer.execution.executor import ExecutorInfo, SequenceOutput, StepOutput
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.local_executor import LaunchedStep, LocalExecutor
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast.cuda.graphs import Capture, CapturedGraph, CapturedGraphs, StepGraphs, capture_sizes
from nanoinfer.fast.sampling.cuda_graphs import INPUTS, PREPARED, SamplerGraphs, inputs_read
from nanoinfer.fast.sampling.few_logits import sample_on_gpu
from nanoinfer.features.batch_invariant.single_queries import InvariantRunner
from nanoinfer.sampling.batch import ParameterColumns, SamplingBatch, columns_and_groups, is_stateful_row
from nanoinfer.sampling.sampler import NOT_FINITE, SampledTokens
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.scheduling.step_plan import StepPlan
from nanoinfer.system.transfer import integers_on_device

IDS, POSITIONS, LENGTHS, SLOTS, SEEDS, STEPS = range(6)  # the rows of SteadyBatch.numbers
COUNTERS = slice(POSITIONS, SLOTS + 1)  # those that a step advances
Rows = tuple[tuple[Sequence, int], ...]  # StepPlan.rows
NO_GRAPH = CapturedGraph(lambda: None, torch.empty(0))


# ---- the host


class Continued(Planner):
    """Plans the steps of a scheduler. As long as the same sequences decode, it gives their rows again, in less time."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None  # the plan of the step before, if it may go on
        self._sequences: list[Sequence] = []  # of that plan
        self._unread: dict[Sequence, frozenset[int]] = {}  # the ids that end an answer whose other tokens nothing reads

    def plan(self, scheduler: Scheduler) -> StepPlan:
        """Return what scheduler.schedule() would. The rows of a plan that goes on are the same object."""
        last, running, manager = self._last, scheduler.running, scheduler.block_manager
        if last is None or running != self._sequences or (scheduler.waiting and scheduler.has_place()):
            return self._scheduled(scheduler)
        block_size, begun = manager.block_size, []
        for seq in self._sequences:
            if seq.num_tokens >= seq.max_num_tokens:  # its last token is in flight
                return self._scheduled(scheduler)
            if seq.num_computed_tokens == len(seq.block_table) * block_size:
                begun.append(seq)
        if len(begun) > manager.num_free_blocks:
            return self._scheduled(scheduler)
        scheduler.observer.scheduling_begun()
        for seq in begun:
            manager.allocate(seq, 1)
        plan = StepPlan(last.scheduled, last.rows)
        scheduler.observer.step_scheduled(plan, scheduler)
        return plan

    def _scheduled(self, scheduler: Scheduler) -> StepPlan:
        """Let the scheduler decide. Its plan may go on if it is one token of each running sequence, by the rules known here."""
        plan, kinds = scheduler.schedule(), (type(scheduler), type(scheduler.block_manager))
        is_known = kinds[0].schedule is Scheduler.schedule and kinds[1].next_slots is BlockManager.next_slots
        goes_on = is_known and has_one_token_each(plan)
        self._last, self._sequences = (plan, [seq for seq, _ in plan.rows]) if goes_on else (None, [])
        return plan

    def append_unread(
        self, outputs: list[SequenceOutput], requests: Mapping[str, Request], observer: Observer
    ) -> list[SequenceOutput]:
        """Append as Request.advance does. Its sequences have no drafts."""
        if getattr(observer.token_appended, "__func__", None) is not Observer.token_appended:
            return outputs
        left, unread = [], self._unread
        for output in outputs:
            seq = output.sequence
            if (ending_ids := unread.get(seq)) is None or output.error:
                left.append(output)
                continue
            token_ids, [token_id] = seq.token_ids, output.token_ids
            if token_id in ending_ids or len(token_ids) + 1 >= seq.max_num_tokens:
                left.append(output)
            else:
                token_ids.append(token_id)
        for seq in [output.sequence for output in left if output.sequence.status is not SequenceStatus.FINISHED]:
            ending_ids = requests[seq.request_id].answers[seq.index].ending_ids
            if ending_ids is not None:
                unread[seq] = ending_ids  # from its next token on
        return left

    def sequence_finished(self, seq: Sequence) -> None:
        self._unread.pop(seq, None)


def has_one_token_each(plan: StepPlan) -> bool:
    """Whether a plan computes and samples one token of each sequence, and nothing else."""
    sizes = [item.num_packed_tokens for item in plan.scheduled]
    return sizes.count(1) == len(sizes) == len(plan.rows) > 0 and not plan.block_copies and plan.sampler is None


@dataclass(frozen=True, slots=True)
class SteadyStep(LaunchedStep):
    """A step of a SteadyBatch. outputs: an object for each row, which each step of the same plan fills again."""

    outputs: list[SequenceOutput]


class SteadyExecutor(LocalExecutor):
    """Runs steps whose sequences decode by a SteadyBatch, and the others as LocalExecutor does."""

    def __init__(self, runtime: Runtime, info: ExecutorInfo, config: EngineConfig, **options: Any) -> None:
        super().__init__(runtime, info, config, **options)
        graphs = cast(StepGraphs, self.runner.graphs).table
        self.batch = SteadyBatch(self, config.max_num_rows, graphs.capture, on_first_use=graphs.on_first_use)
        self._rows: Rows | None = None  # those of the plan that the batch follows
        self._other_rows: Rows | None = None  # those of the last plan that it does not
        self._graph = NO_GRAPH
        self._outputs: list[SequenceOutput] = []
        if config.cudagraph_capture == "load":
            with torch.inference_mode(), self._in_step():
                self.batch.prepare()

    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep:
        start = time.perf_counter()
        with torch.inference_mode(), self._in_step():
            if self._late:
                self._sample_late()
            if plan.rows is self._rows:
                self.batch.begin_blocks()
            elif plan.rows is self._other_rows or not self._follow(plan, previous):
                may_follow = any(seq.params.min_tokens for seq, _ in plan.rows)  # once the answers are long enough
                self._rows, self._other_rows = None, None if may_follow else plan.rows
                return super().launch(plan, previous)
            filled = time.perf_counter()
            self._graph.replay()
            replayed = time.perf_counter()
            tokens = SampledTokens(self._graph.out[: len(plan.rows)], None, False, lambda row: NOT_FINITE)
            seconds = {"build": filled - start, "forward": replayed - filled, "sample": time.perf_counter() - replayed}
        return SteadyStep(plan, tokens, False, seconds, self._outputs)

    def collect(self, step: LaunchedStep) -> StepOutput:
        if not isinstance(step, SteadyStep):
            return super().collect(step)
        start = time.perf_counter()
        sampled = step.tokens.read()
        if sampled.errors:
            return super().collect(step)
        for output, token_id in zip(step.outputs, sampled.token_ids, strict=True):
            output.token_ids = [token_id]
        seconds = step.seconds | {"sample": step.seconds["sample"] + time.perf_counter() - start}
        return StepOutput(step.outputs, seconds)

    def capture_next(self) -> bool:
        with torch.inference_mode(), self._in_step():
            return self.batch.table.capture_next() or super().capture_next()

    def drop_graphs(self) -> None:
        super().drop_graphs()
        self.batch.table.drop()
        self._rows, self._graph = None, NO_GRAPH

    def _follow(self, plan: StepPlan, previous: LaunchedStep | None) -> bool:
        """Let the rows of the batch become those of another plan. Returns False if they cannot."""
        if not has_one_token_each(plan):
            return False
        sequences = [seq for seq, _ in plan.rows]
        if (graph := self.batch.follow(sequences, previous)) is None:
            return False
        self._rows, self._graph, self._outputs = plan.rows, graph, [*map(SequenceOutput, sequences)]
        return True


# ---- the device

Key = tuple[int, tuple[str, ...]]  # the padded number of rows, and the inputs that the draw reads (inputs_read)


class SteadyBatch:
    """The rows of a batch on the device, and the graphs that advance them by a token.

    Attributes:
        numbers: int64 [6, max_num_rows or one more], a number of each row by IDS, POSITIONS, LENGTHS, SLOTS, SEEDS and STEPS.
        tables: int32 [max_num_rows, max_blocks], the block table of each row.
        columns: the parameters of the draw by their names in INPUTS, each [max_num_rows].
        sizes: the numbers of rows to which a batch is padded. A padding row has the cache's extra block, and steps of 0.
    """

    def __init__(self, executor: LocalExecutor, max_num_rows: int, capture: Capture, *, on_first_use: bool) -> None:
        self.sizes, self._executor, self._capture, info = capture_sizes(max_num_rows), executor, capture, executor.info
        self._device, self._block_size = executor.device, info.block_size
        self._padding_block, self._padding = info.num_blocks, [0, 0, 1, info.num_blocks * info.block_size, 0, 0]
        width = max_num_rows + max_num_rows % 2  # each number's rows begin at a multiple of 16 bytes, as kernels assume
        self.numbers = torch.zeros(len(self._padding), width, dtype=torch.int64, device=self._device)
        shape = max_num_rows, -(-info.max_model_len // info.block_size)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        columns = {name: torch.full(shape[:1], off, dtype=dtype, device=self._device) for name, (dtype, off) in INPUTS.items()}
        self.columns = {name: column for name, column in columns.items() if name != "u"}  # u is computed from seed and length
        self._batches: dict[int, ForwardBatch] = {}  # the first rows as the input of the model, by their number
        self._sequences: list[Sequence] = []  # of the rows
        self._known: list[list[int]] = []  # what `tables` has of the block table of each
        self._params: list[SamplingParams] = []  # of each, whose numbers are in `columns`
        self._names: tuple[str, ...] = ()  # the inputs that their draw reads
        name = "a steady step of {0[0]} decodes".format
        self.table = CapturedGraphs[Key](self._capture_on_padding, self._step, name, itemgetter(0), on_first_use)

    def prepare(self) -> None:
        """Capture the steps of most requests."""
        self.table.capture_all((size, names) for size in self.sizes for names in PREPARED)

    # ---- a step

    def _step(self, key: Key) -> Int[Tensor, " size"]:
        """Compute the next token of each row, -1 for a row without a finite logit. This is what a graph captures.

        The advance is last, and nothing else writes what the attention reads: lengths, tables and slots.
        """
        size, names = key
        numbers, runner = self.numbers[:, :size], self._executor.runner
        hidden = runner.run(self._batch_of(size))
        rows = runner.head_rows(hidden, slice(0, size))
        columns: dict[str, Any] = {name: column[:size] for name, column in self.columns.items() if name in names}
        u = (numbers[SEEDS], numbers[LENGTHS]) if names else None  # draw.uniform of them: a new token's position is the length
        token_ids = sample_on_gpu(rows.head(rows.hidden), ParameterColumns(**columns), u)
        torch.clamp(token_ids, min=0, out=numbers[IDS])  # a row without a token ends before its next one is read
        numbers[COUNTERS].add_(numbers[STEPS])
        return token_ids

    def _batch_of(self, size: int) -> ForwardBatch:
        if size not in self._batches:
            max_len, starts, numbers = self._executor.info.max_model_len, list(range(size + 1)), self.numbers[:, :size]
            attention = AttentionMetadata(
                query_start_loc=integers_on_device([starts], self._device)[0],
                seq_lens=numbers[LENGTHS],
                block_tables=self.tables[:size],
                slot_mapping=numbers[SLOTS],
                max_query_len=1,
                max_seq_len=max_len,
                num_decodes=size,
                query_start_loc_cpu=starts,
                seq_lens_cpu=[max_len] * size,
            )
            self._batches[size] = ForwardBatch(numbers[IDS], numbers[POSITIONS], slice(0, size), attention, [])
        return self._batches[size]

    def _capture_on_padding(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture while no row has a sequence, because a step runs before it is captured, which would advance the rows."""
        self._write_rows([], len(self.tables), None)
        return self._capture(run)

    # ---- the rows

    def begin_blocks(self) -> None:
        """Write the blocks that sequences have begun since the last step, and the slots of their next keys."""
        places, blocks, rows, width = list[int](), list[int](), list[int](), self.tables.shape[1]
        for row, (seq, known) in enumerate(zip(self._sequences, self._known, strict=True)):
            if len(table := seq.block_table) != len(known):
                places.append(row * width + len(known))
                blocks.append(table[-1])
                rows.append(row)
        if not rows:
            return
        slots = [block * self._block_size for block in blocks]
        on_device = integers_on_device([places, blocks, rows, slots], self._device)
        self._write_blocks(*on_device[:2])
        self.numbers[SLOTS].index_copy_(0, *on_device[2:])
        for row, block in zip(rows, blocks, strict=True):
            self._known[row].append(block)

    def follow(self, sequences: list[Sequence], previous: LaunchedStep | None) -> CapturedGraph | None:
        """Let the rows be those of these sequences. Returns the graph of their next step. None: it is not captured.

        previous: the step that computes the newest tokens of sequences, as far as only the device knows these.
        """
        earlier = set(self._sequences)
        if len(sequences) > self.sizes[-1] or any(seq not in earlier and _reads_more(seq) for seq in sequences):
            return None
        self._write_parameters([seq.params for seq in sequences])
        size = self.sizes[bisect_left(self.sizes, len(sequences))]
        graph = self.table.find((size, self._names), (self.sizes[-1], self._names))
        if graph is not None:
            self._write_rows(sequences, size, previous)
        return graph

    def _write_parameters(self, params: list[SamplingParams]) -> None:
        """Write the parameters of the rows, unless the first rows have them."""
        if len(params) <= len(self._params) and all(map(is_, params, self._params)):
            return
        of_params = columns_and_groups(tuple(params), self._executor.info.vocab_size, self._device)
        batch = SamplingBatch(u=torch.zeros(len(params), dtype=torch.float64), **of_params)
        self._params, self._names = params, inputs_read(batch)
        for name, written in self.columns.items() if self._names else ():
            column, (_, off) = of_params[name], INPUTS[name]
            written[: len(params)] = off if column is None else column

    def _write_rows(self, sequences: list[Sequence], size: int, previous: LaunchedStep | None) -> None:
        """Write the rows of these sequences, and padding up to `size`. The block tables that the device has are moved there."""
        row_of, known = {seq: row for row, seq in enumerate(self._sequences)}, self._known
        self._sequences, self._known = [], []  # if this raises, they are written again
        sources, places, blocks, rows = [row_of.get(seq, 0) for seq in sequences], list[int](), list[int](), list[list[int]]()
        for row, seq in enumerate(sequences):
            table, has = seq.block_table, known[row_of[seq]] if seq in row_of else []
            first = len(has) if table[: len(has)] == has else 0
            places += range(row * self.tables.shape[1] + first, row * self.tables.shape[1] + len(table))
            blocks += table[first:]
            position = seq.num_computed_tokens
            slot = table[position // self._block_size] * self._block_size + position % self._block_size
            newest = seq.token_ids[position] if position < len(seq.token_ids) else 0  # 0: see in_flight
            rows.append([newest, position, position + 1, slot, seq.seed - 2**64 * (seq.seed >= 2**63), 1])
        padding = range(len(sequences), size)
        places += [row * self.tables.shape[1] for row in padding]
        blocks += [self._padding_block] * len(padding)
        rows += [self._padding] * len(padding)
        in_flight = [row for row, seq in enumerate(sequences) if seq.num_tokens > len(seq.token_ids)]
        row_before = {} if previous is None else {seq: row for row, (seq, _) in enumerate(previous.plan.rows)}
        before = [row_before[sequences[row]] for row in in_flight]
        numbers = list(chain.from_iterable(zip(*rows, strict=True)))
        written = integers_on_device([numbers, places, blocks, sources, in_flight, before], self._device)
        if sources != list(range(len(sources))):
            self.tables[: len(sources)] = self.tables[written[3]]
        self._write_blocks(*written[1:3])
        self.numbers[:, :size] = written[0].view(len(self._padding), size)
        if previous is not None and in_flight:
            self.numbers[IDS].index_copy_(0, written[4], previous.tokens.token_ids[written[5]].clamp(min=0))
        self._sequences, self._known = sequences, [list(seq.block_table) for seq in sequences]

    def _write_blocks(self, places: Int[Tensor, " num"], blocks: Int[Tensor, " num"]) -> None:
        """Write entries of the tables, by their places in all tables one after the other."""
        self.tables.view(-1).index_copy_(0, places, blocks.view(torch.int32)[::2])  # the low half of each, without a kernel


def _reads_more(seq: Sequence) -> bool:
    """Whether more of a sequence's next step is read than its token, or more than its parameters decides it."""
    num_output = seq.num_tokens - len(seq.prompt_token_ids)
    return bool(is_stateful_row(seq, num_output) or seq.params.reports or seq.extras or (seq.reader and seq.needs_all_rows))


def supports_steady_steps(runtime: Runtime, config: EngineConfig) -> bool:
    """Whether SteadyExecutor may run captured steps: a single device, and nothing of a user or of drafts in them."""
    has_graphs = any(isinstance(route, SamplerGraphs) for route in runtime.routes)
    is_plain = {*runtime.wrappers} <= {InvariantRunner} and runtime.sizes.windows == (None,)  # which changes prompts alone
    has_others = config.stages or config.logits_processors or config.tracer or config.speculative
    return has_graphs and is_plain and not has_others
