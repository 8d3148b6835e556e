"""The Executor that runs the model in this process, on one device.

In: a finished runtime (runtime.py) and StepPlans. Out: StepOutputs.
"""

import logging
import time
from dataclasses import dataclass
from weakref import ref

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.config import EngineConfig
from nanoinfer.execution.executor import ExecutorInfo, SequenceOutput, StepOutput
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import Replayer
from nanoinfer.execution.runtime import Runtime, make_runner, make_sampler
from nanoinfer.sampling.batch import PendingTokens, SamplingBatch, reads_pending, sampled_positions
from nanoinfer.sampling.routes import Route
from nanoinfer.sampling.sampler import HeadRows, LateTokens, SampledTokens, SamplerOutput
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import StepPlan, accepted_rows, prompt_rows_of
from nanoinfer.system.transfer import integers_on_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens are being sampled on the device."""

    plan: StepPlan
    tokens: SampledTokens | LateTokens
    must_sync: bool
    seconds: dict[str, float]


class LocalExecutor:
    """Runs steps on the device of the model. One thread at a time may call it."""

    def __init__(self, runtime: Runtime, info: ExecutorInfo, config: EngineConfig, *, cache: KVCache | None = None) -> None:
        """Allocate the KV cache that `info` describes, unless `cache` is that of another executor."""
        self.runner, self.sampler, self.info = make_runner(runtime, info, cache), make_sampler(runtime, config), info
        self.device, self.batch_independent = torch.device(info.device), runtime.is_batch_independent
        self._in_step = runtime.in_step
        owners = self.runner.graphs, *runtime.routes
        self.graph_owners: list[Replayer | Route | LocalExecutor] = [one for one in owners if one is not None]  # may grow
        self._previous_sampling_batch: SamplingBatch | None = None  # its columns are reused if the rows stay the same
        self._late: ref[LateTokens] | None = None  # the tokens of the last step, if they are chosen later
        if config.cudagraph_capture == "load" and self.runner.graphs is not None:
            self._capture_all(self.runner.graphs, runtime.routes)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep:
        """Launch the plan, up to the sampled tokens on the device. See Executor.launch."""
        with self._in_step():
            start = time.perf_counter()
            if self._late:
                self._sample_late()
            batch = ForwardBatch.build(plan, self.info.block_size, self.device)
            if previous is not None:
                fill_in(batch.input_ids, plan, previous.plan, previous.tokens.token_ids)
            built = time.perf_counter()
            hidden = self.runner.forward(batch)
            forwarded = time.perf_counter()
            rows = self.runner.head_rows(hidden, batch.logits_indices)
            reads_prompts = self._read_prompts(plan, hidden, rows)  # before the sampler writes into the logits
            tokens = self._sample(plan, previous, rows)
            sampled = time.perf_counter() - forwarded
        must_sync = tokens.must_sync or reads_prompts
        seconds = {"build": built - start, "forward": forwarded - built, "sample": sampled}
        return LaunchedStep(plan, tokens, must_sync, seconds)

    @torch.inference_mode()
    def collect(self, step: LaunchedStep) -> StepOutput:
        """Wait for the tokens of a step. See Executor.collect."""
        start = time.perf_counter()
        with self._in_step():
            sampled = step.tokens.read()
        if step.plan.has_further_rows or sampled.errors or sampled.reports:
            outputs = _outputs_of(step.plan, sampled)
        else:
            outputs = [SequenceOutput(seq, [id_]) for (seq, _), id_ in zip(step.plan.rows, sampled.token_ids, strict=True)]
        seconds = step.seconds | {"sample": step.seconds["sample"] + time.perf_counter() - start}
        return StepOutput(outputs, seconds)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one CUDA graph that earlier steps lacked. See Executor.capture_next."""
        with self._in_step():
            return any(owner.capture_next() for owner in self.graph_owners)

    def drop_graphs(self) -> None:
        """Free all CUDA graphs, which keep the addresses of weights and of the cache."""
        for owner in self.graph_owners:
            owner.drop_graphs()

    # ---- internals

    @torch.inference_mode()
    def _capture_all(self, graphs: Replayer, routes: tuple[Route, ...]) -> None:
        """Capture the graphs of all steps and of most draws. Logs what those of steps take of the memory kept for them."""
        gpu, start = torch.get_device_module(self.device), time.perf_counter()
        with self._in_step():
            free, _ = gpu.mem_get_info(self.device)
            hidden = graphs.prepare(self.runner.run)
            gpu.empty_cache()
            taken, kept = free - gpu.mem_get_info(self.device)[0], self.info.num_graph_bytes
            if hidden is not None:
                for route in routes:
                    route.prepare(self.runner.head_rows(hidden, slice(0, 1)))
        logger.log(
            logging.WARNING if taken > kept else logging.INFO,
            "CUDA graphs of steps with up to %d prompt tokens take %.1f of %.1f MiB that were kept free; captured in %.1f s",
            self.info.num_graph_tokens, taken / 2**20, kept / 2**20, time.perf_counter() - start,
        )  # fmt: skip

    def _sample(self, plan: StepPlan, previous: LaunchedStep | None, rows: HeadRows) -> SampledTokens | LateTokens:
        """Launch the choice of the tokens, unless it reads a token of the previous step, which the host does not know yet."""
        sequences = [seq for seq, _ in plan.rows]
        positions = tuple(sampled_positions(sequences))

        def sample(pending: PendingTokens | None = None) -> SampledTokens:
            last, size = self._previous_sampling_batch, self.info.vocab_size
            batch = SamplingBatch.build(sequences, size, self.device, last, positions, pending)
            self._previous_sampling_batch = batch
            tokens: SampledTokens = (plan.sampler or self.sampler)(rows, batch)
            return tokens

        if not previous:
            return sample()
        if not plan.sampler and self.sampler.may_be_late and any(map(reads_pending, sequences)):
            late = LateTokens(sample, must_sync=any(seq.params.logits_processors for seq in sequences))
            self._late = ref(late)  # a step that the engine drops is not sampled
            return late
        return sample(pending_of(sequences, previous) if any(seq.params.has_penalty for seq in sequences) else None)

    def _sample_late(self) -> None:
        """Choose the tokens of the step before, if they were not. Its rows are valid until the next forward pass."""
        late, self._late = self._late and self._late(), None
        if late:
            late.sample()

    def _read_prompts(self, plan: StepPlan, hidden: Float[Tensor, "num_tokens hidden"], ends: HeadRows) -> bool:
        """Give rows of prompts to their readers. Returns whether one is answered: then its reader has waited for the device."""
        if not (prompt_rows := prompt_rows_of(plan.scheduled)):
            return False
        row_of = {seq: row for row, (seq, _) in enumerate(plan.rows)}
        for chunk in prompt_rows:
            seq = chunk.sequence
            assert seq.reader is not None, "it wants its rows"
            seq.reader.read(self, hidden, chunk, ends, row_of.get(seq))
        return any(chunk.sequence.is_answered for chunk in prompt_rows)


def fill_in(
    input_ids: Int[Tensor, " num_tokens"], plan: StepPlan, previous: StepPlan, token_ids: Int[Tensor, " num_rows"]
) -> None:
    """Write the tokens that the previous step has sampled, and that only the device knows, into the plan's input."""
    row_of = {seq: row for row, (seq, _) in enumerate(previous.rows)}
    in_flight = [(seq, index) for seq, index in plan.rows if seq.num_tokens > len(seq.token_ids)]
    indices, rows = [index for _, index in in_flight], [row_of[seq] for seq, _ in in_flight]
    if len(indices) == len(input_ids) == len(token_ids) and rows == indices == [*range(len(rows))]:
        torch.clamp(token_ids, min=0, out=input_ids)  # -1 is no token, and its row is dropped later
    elif indices:
        places, sources = integers_on_device([indices, rows], input_ids.device)
        input_ids[places] = token_ids[sources].clamp(min=0)


def pending_of(sequences: list[Sequence], previous: LaunchedStep) -> PendingTokens | None:
    """Return the newest tokens of rows that the previous step samples, if any. sequences: the sequence of each row."""
    rows = [row for row, seq in enumerate(sequences) if seq.num_tokens > len(seq.token_ids)]
    if not rows:
        return None
    row_of = {seq: row for row, (seq, _) in enumerate(previous.plan.rows)}
    [sources] = integers_on_device([[row_of[sequences[row]] for row in rows]], previous.tokens.token_ids.device)
    return PendingTokens(rows, previous.tokens.token_ids[sources])


def _outputs_of(plan: StepPlan, sampled: SamplerOutput) -> list[SequenceOutput]:
    """Return the result of each sequence."""
    outputs = []
    for seq, accepted in accepted_rows(plan, sampled.token_ids):
        if error := sampled.errors.get(accepted.start):
            outputs.append(SequenceOutput(seq, error=error))
            continue
        # A later row that has failed is computed again, alone.
        rows = [row for row in accepted if row not in sampled.errors]
        reports = [sampled.reports[row] for row in rows if row in sampled.reports]
        outputs.append(SequenceOutput(seq, [sampled.token_ids[row] for row in rows], reports))
    return outputs
