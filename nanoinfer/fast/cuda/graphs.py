"""CUDA graphs: capture a sequence of kernel launches once, and replay it with a single launch. Most steps run so.

In: a function that launches the same kernels on the same memory each time and never synchronizes with the host. Out: a
CapturedGraph. A step launches hundreds of kernels, and Python cannot launch them fast enough. Whatever changes from step to
step is copied into static input tensors before a replay. Tokens are padded to one of a few shapes, which read the first rows of
the same tensors:

    decodes, padding                 a step of decodes
    decodes, padding | the tokens of up to GRAPH_CHUNKS chunks, padding         a step with prompts

A padding token reads and writes a block of its own, which no sequence has. Chunks that a step lacks have no tokens.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.errors import first_line
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import Run
from nanoinfer.execution.runtime import GRAPH_CHUNKS
from nanoinfer.features.hybrid.groups import FurtherGroups, GroupedMetadata, further_groups
from nanoinfer.system.transfer import integers_on_device

logger = logging.getLogger(__name__)

PROMPT_SIZES = (64, 128, 256, 512, 768, 1024, 2048)  # the GPU computes more tokens for longer than Python launches them
DECODE_SIZES = (0, 16, 64, 256)  # the decodes of a step with prompts

# Captures what a function launches. Returns its replay, and the tensor that the replay fills.
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """out: the tensor that a replay fills. It is valid until another graph of the same Capture is replayed."""

    replay: Callable[[], None]
    out: Tensor


def capture_sizes(max_num_rows: int) -> list[int]:
    """Return the numbers of rows for which graphs are captured.

    >>> capture_sizes(40)
    [1, 2, 4, 8, 16, 32, 40]
    """
    return [*(size for size in (1, 2, 4, 8) if size < max_num_rows), *range(16, max_num_rows, 16), max_num_rows]


def prompt_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Return the numbers of prompt tokens for which graphs are captured. max_num_tokens: the most of a step."""
    return (*(size for size in PROMPT_SIZES[:-1] if size < max_num_tokens), min(max_num_tokens, PROMPT_SIZES[-1]))


class CUDACapture:
    """Captures CUDA graphs, which share a memory pool, since only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._gpu: Any = torch.get_device_module(device)
        self._pool: Any = None  # a handle of torch
        self._stream = self._gpu.Stream()  # shared, since every stream has its own workspace

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        gpu, current = self._gpu, self._gpu.current_stream()
        self._stream.wait_stream(current)
        try:
            with gpu.stream(self._stream):
                run()  # compiles kernels and selects algorithms, which cannot be captured
        finally:  # a run that fails has launched a part, which writes to the static inputs
            current.wait_stream(self._stream)
        graph = gpu.CUDAGraph()
        # stream: torch's graph() leaves its own stream current if the capture fails.
        # thread_local: other threads, such as a server's, may use the GPU meanwhile.
        with gpu.stream(current), gpu.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()
        return graph.replay, out


@dataclass(eq=False)
class CapturedGraphs(Generic[Key]):
    """Captures graphs by key, those with the most rows first, so that the others reuse their memory."""

    capture: Capture
    launch: Callable[[Key], Tensor]  # launches what the graph of a key replays, and returns its result
    name: Callable[[Key], str]  # the name of a key's graph in the log, such as "a step of 8 decodes"
    num_rows: Callable[[Key], int]  # returns the number of rows of a key's graph
    on_first_use: bool  # whether `find` captures what it misses. Otherwise `capture_next` does
    graphs: dict[Key, CapturedGraph | None] = field(default_factory=dict)  # key -> its graph. None: the capture failed
    wanted: set[Key] = field(default_factory=set)  # the keys to capture

    def find(self, key: Key, largest: Key) -> CapturedGraph | None:
        """Return the graph of a key. None: it is not captured. largest: the key to capture before the first."""
        if key not in self.graphs:
            self.wanted |= {key, largest} - self.graphs.keys()
            if self.on_first_use:
                self.capture_all(())
        return self.graphs.get(key)

    def drop(self) -> None:
        """Free all graphs. They are captured again as if they were new."""
        self.graphs.clear()
        self.wanted.clear()

    def capture_all(self, keys: Iterable[Key]) -> None:
        """Capture the graphs of these keys, and all that are wanted."""
        self.wanted |= set(keys)
        while self.capture_next():
            pass

    def capture_next(self) -> bool:
        """Capture the largest graph that is wanted. A failure is logged. Returns False if none is wanted."""
        if not self.wanted:
            return False
        key = max(self.wanted, key=self.num_rows)
        self.wanted.remove(key)
        try:
            self.graphs[key] = CapturedGraph(*self.capture(lambda: self.launch(key)))
        except RuntimeError as error:  # torch's, also when memory runs out
            self.graphs[key] = None
            name, why = self.name(key), first_line(error)
            logger.warning("%s could not be captured as a CUDA graph (%s); such steps run without one", name, why)
        return True


class StepSize(NamedTuple):
    """The padded number of tokens of a step: those of its chunks, 0 without any, and those of its decodes."""

    num_chunk_tokens: int
    num_decodes: int


@runtime_checkable
class RowNumbers(Protocol):
    """A number of each token that kernels read besides the batch. Padding has -1.

    static: int64 [at least the tokens of any step], where graphs read them. new: int64 [num_tokens], those of the step.
    """

    static: Tensor
    new: Tensor


class StepGraphs:
    """CUDA graphs of the forward pass of a step, by its StepSize.

    info: the sizes of the cache. The padding tokens use the block after its last, which the cache must have as well.
    max_num_rows: the most decodes of a step. on_first_use: as in CapturedGraphs.
    sizes: the numbers of prompt tokens to which steps are padded, in order. Those above info.num_graph_tokens are left out.
    num_groups: the number of KV groups, each of which has its own block tables and slots.
    max_num_decodes: the most decodes of a sequence, of which drafts make several.
    further: what kernels read besides the batch.
    """

    def __init__(
        self,
        info: ExecutorInfo,
        max_num_rows: int,
        capture: Capture,
        *,
        on_first_use: bool = True,
        sizes: Iterable[int] = (),
        num_groups: int = 1,
        max_num_decodes: int = 1,
        further: Sequence[RowNumbers] = (),
    ) -> None:
        self.sizes, self._num_groups, self._further = capture_sizes(max_num_rows), num_groups, further
        self._max_num_decodes = max_num_decodes
        self._decode_sizes = [*(size for size in DECODE_SIZES if size < max_num_rows), max_num_rows]
        self._prompt_sizes = [size for size in sizes if size <= info.num_graph_tokens]
        self.shapes = [StepSize(0, size) for size in self.sizes]
        self.shapes += [StepSize(size, num) for size in self._prompt_sizes for num in self._decode_sizes]
        self._largest = max(self.shapes, key=sum)
        self._info, self._device = info, torch.device(info.device)
        self._padding_block, self._padding_slot = info.num_blocks, info.num_blocks * info.block_size
        self._run: Run  # of the last call
        self._rows: dict[str, Tensor] = {}  # the tensors that the graphs read and write, for the largest shape
        self._inputs: dict[StepSize, ForwardBatch] = {}  # a graph's rows of these tensors
        self._constants: dict[int, Tensor] = {}  # what padding holds, for the largest shape
        name = "a step of {0.num_decodes} decodes and {0.num_chunk_tokens} prompt tokens".format
        self.table = CapturedGraphs[StepSize](capture, self._launch, name, sum, on_first_use)
        self.capture_next, self.drop_graphs = self.table.capture_next, self.table.drop

    def prepare(self, run: Run) -> Float[Tensor, "max_num_tokens hidden"] | None:
        """Capture run(batch) of each shape. Returns the tensor that the replays fill. None: no run has succeeded."""
        self._run = run
        self.table.capture_all(self.shapes)
        return self._rows.get("hidden")

    def try_replay(self, batch: ForwardBatch, run: Run) -> Float[Tensor, "num_tokens hidden"] | None:
        """Return the hidden rows of run(batch), from the graph of the smallest sufficient shape. None: there is none."""
        self._run, num_decodes, num_tokens = run, batch.attention.num_decodes, len(batch.input_ids)
        shape = self._shape_of(num_decodes, num_tokens, len(batch.attention.seq_lens_cpu))
        if shape is None or (graph := self.table.find(shape, self._largest)) is None:
            return None
        self._fill(shape, batch)
        graph.replay()
        if num_decodes in (num_tokens, shape.num_decodes):
            return graph.out[:num_tokens]
        return torch.cat((graph.out[:num_decodes], graph.out[shape.num_decodes :][: num_tokens - num_decodes]))

    def _shape_of(self, num_decodes: int, num_tokens: int, num_seqs: int) -> StepSize | None:
        """Return the smallest sufficient shape. None: there is none."""
        if num_decodes > self.sizes[-1]:
            return None
        if num_decodes == num_tokens:
            return StepSize(0, self.sizes[bisect_left(self.sizes, num_decodes)])
        size = bisect_left(self._prompt_sizes, num_tokens - num_decodes)
        if size == len(self._prompt_sizes) or num_seqs - num_decodes > GRAPH_CHUNKS:
            return None
        return StepSize(self._prompt_sizes[size], self._decode_sizes[bisect_left(self._decode_sizes, num_decodes)])

    def _launch(self, shape: StepSize) -> Float[Tensor, "num_tokens hidden"]:
        """Compute a step of this shape from its static inputs. This is what a graph captures."""
        if shape not in self._inputs:
            self._inputs[shape] = self._make_inputs(shape)
            self._fill(shape, None)
        hidden = self._run(self._inputs[shape])
        if "hidden" not in self._rows:
            self._rows["hidden"] = hidden.new_empty(sum(self._largest), hidden.shape[1])
        # Of a graph's own memory nothing is kept, so that the next graph has all of it.
        return self._rows["hidden"][: len(hidden)].copy_(hidden)

    def _make_inputs(self, shape: StepSize) -> ForwardBatch:
        """Return the first rows of the tensors that graphs read, which the first call makes."""
        num_chunks = GRAPH_CHUNKS if shape.num_chunk_tokens else 0
        num_seqs, num_tokens = shape.num_decodes + num_chunks, sum(shape)
        most = self.sizes[-1] + GRAPH_CHUNKS, sum(self._largest)

        def rows(name: str, *more: int, dtype: torch.dtype = torch.int64, of_tokens: bool = False) -> Int[Tensor, "..."]:
            if name not in self._rows:
                self._rows[name] = torch.zeros(most[of_tokens], *more, dtype=dtype, device=self._device)
            return self._rows[name][: num_tokens if of_tokens else num_seqs]

        starts = [*range(shape.num_decodes + 1), *[shape.num_decodes] * num_chunks]
        max_blocks = -(-self._info.max_model_len // self._info.block_size)
        slots = [rows(f"slots {group}", of_tokens=True) for group in range(self._num_groups)]
        attention = AttentionMetadata(
            query_start_loc=integers_on_device([starts], self._device)[0],
            seq_lens=rows("lengths"),
            block_tables=rows("tables", max_blocks, dtype=torch.int32),
            slot_mapping=slots[0],
            max_query_len=shape.num_chunk_tokens or 1,
            max_seq_len=self._info.max_model_len,
            num_decodes=shape.num_decodes,
            query_start_loc_cpu=starts,
            seq_lens_cpu=[self._info.max_model_len] * num_seqs,
            first_decodes=rows("first decodes")[: shape.num_decodes] if self._max_num_decodes > 1 else None,
            max_num_decodes=self._max_num_decodes,
        )
        if num_further := self._num_groups - 1:
            # Each group's tables begin at a multiple of 16 bytes, because Triton compiles a separate kernel for other pointers.
            tables = rows("further tables", num_further, -(-max_blocks // 4) * 4, dtype=torch.int32)
            own = {one.name: getattr(attention, one.name) for one in fields(attention)}
            attention = GroupedMetadata(**own, further=FurtherGroups(tables, tuple(slots[1:])))
        tokens = rows("ids", of_tokens=True), rows("positions", of_tokens=True)
        return ForwardBatch(*tokens, slice(0, num_tokens), attention, [])

    def _fill(self, shape: StepSize, batch: ForwardBatch | None) -> None:
        """Copy a batch into the static inputs, and make padding of the other rows. None: of all rows."""
        inputs, start = self._inputs[shape], shape.num_decodes
        num_decodes = 0 if batch is None else batch.attention.num_decodes
        num_further, of_slot, of_block = self._num_groups - 1, (self._padding_slot,) * 2, (self._padding_block,) * 2
        padding = (0, 0), (0, 0), (1, 0), of_slot, of_block, *[of_slot] * num_further, *[of_block] * bool(num_further)
        padding += ((-1, -1),) * len(self._further)
        changing = self._changing(inputs), self._changing(batch or inputs)
        changing[0].extend(one.static[: sum(shape)] for one in self._further)
        changing[1].extend(one.new for one in self._further)
        copies: list[tuple[Tensor, Tensor]] = []  # targets and sources
        for static, new, (of_decodes, of_chunks) in zip(*changing, padding, strict=True):
            if batch is None:
                new = new[:0]
            if not shape.num_chunk_tokens:
                copies += self._rows_to_put(static, new, of_decodes)
                continue
            copies += self._rows_to_put(static[:start], new[:num_decodes], of_decodes)
            copies += self._rows_to_put(static[start:], new[num_decodes:], of_chunks)
        copies += self._first_decodes_to_put(inputs.attention, batch)
        torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])  # by one kernel
        if shape.num_chunk_tokens and batch is not None:
            ends = [start - num_decodes + end for end in batch.attention.query_start_loc_cpu[num_decodes + 1 :]]
            ends += ends[-1:] * (GRAPH_CHUNKS - len(ends))
            inputs.attention.query_start_loc[start + 1 :].copy_(integers_on_device([ends], self._device)[0])

    def _changing(self, batch: ForwardBatch) -> list[Tensor]:
        """Return the tensors that change from step to step, except query_start_loc."""
        first, further = batch.attention, further_groups(batch, self._info.block_size) if self._num_groups > 1 else None
        of_others = () if further is None else (*further.slot_mappings, further.block_tables)
        return [batch.input_ids, batch.positions, first.seq_lens, first.slot_mapping, first.block_tables, *of_others]

    def _first_decodes_to_put(self, inputs: AttentionMetadata, batch: ForwardBatch | None) -> list[tuple[Tensor, Tensor]]:
        """List the copies of the batch's first decodes. Other decodes, and those that pad, are sequences of their own."""
        if (static := inputs.first_decodes) is None:
            return []
        new = static[:0] if batch is None or batch.attention.first_decodes is None else batch.attention.first_decodes
        if "own decodes" not in self._rows:
            self._rows["own decodes"] = torch.arange(self.sizes[-1], device=self._device)
        pairs = (static[: len(new)], new), (static[len(new) :], self._rows["own decodes"][len(new) : len(static)])
        return [pair for pair in pairs if len(pair[0])]

    def _rows_to_put(self, static: Tensor, new: Tensor, value: int) -> list[tuple[Tensor, Tensor]]:
        """List the copies that put `new` into the first rows and `value` into the others. Tables are put at once."""
        num_rows, num_others = new.shape[0], static.shape[0] - new.shape[0]
        if static.ndim > 1:  # of a smaller dtype, and with as many columns or more
            _put(static, new, value)
            return []
        if value not in self._constants:
            self._constants[value] = torch.full((sum(self._largest),), value, device=self._device)
        pairs = (static[:num_rows], new), (static[num_rows:], self._constants[value][:num_others])
        return [pair for pair in pairs if len(pair[0])]


def _put(static: Tensor, new: Tensor, value: int) -> None:
    """Copy `new` into the first rows, which have as many columns or more, and `value` into the others."""
    if (num_rows := new.shape[0]) < static.shape[0]:
        static[num_rows:] = value
        static = static[:num_rows]
    if num_rows:
        (static if new.ndim == 1 else static[..., : new.shape[-1]]).copy_(new)
