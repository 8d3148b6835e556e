"""The Executor that runs the model in this process, on one device.

In: a loaded model and StepPlans. Out: StepOutputs. It owns everything that holds tensors: KV cache, attention backend, CUDA
graphs, model runner and sampler.
"""

import logging
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from nanoinfer.attention.base import select_backend
from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.attention.kv_cache import KVCache, bytes_per_block_of
from nanoinfer.config import LOGPROBS_MODES, EngineConfig
from nanoinfer.devices import openmp
from nanoinfer.devices.cuda_graphs import CUDACapture
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.execution.batch_independence import cannot_be_invariant, is_batch_independent
from nanoinfer.execution.decode_graphs import DecodeGraphs
from nanoinfer.execution.executor import ExecutorInfo, PromptLogprobs, SequenceOutput, StepOutput
from nanoinfer.execution.forward_batch import ForwardBatch, LastDrawn
from nanoinfer.execution.memory import num_blocks_for, peak_step_bytes
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.models.parallel_layers import Communicator
from nanoinfer.models.registry import Model
from nanoinfer.outputs import TokenLogprobs
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.sampling.greedy import GreedyKernel
from nanoinfer.sampling.logprobs import token_logprobs
from nanoinfer.sampling.sampler import NOT_FINITE, STAGES, Drawn, Sampler
from nanoinfer.sampling.stage_trace import StageTracer
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import PromptRows, StepPlan
from nanoinfer.tokenization.tokenizer import Tokenizer
from nanoinfer.tracing import EventBuffer

logger = logging.getLogger(__name__)

PROMPT_LOGITS = 2**22  # logits of a prompt that are computed at a time for prompt_logprobs: 16 MB


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens are sampled on the device. drawn is None for a plan with num_top_logprobs."""

    plan: StepPlan
    drawn: Drawn | None
    prompt_logprobs: list[PromptLogprobs]
    top_logprobs: list[SequenceOutput]
    must_sync: bool
    seconds: dict[str, float]


class UniProcExecutor:
    """Runs steps on the device of the model it is given. One thread at a time may call it."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        tracer: EventBuffer | None = None,
        has_independent_rows: bool = False,
        draft_model: Model | None = None,
        num_blocks: int | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        """Choose the attention backend, allocate the KV cache, check row invariance, and make the sampler.

        model: on its device. The model, dtype and device fields of the config have been used by then.
        tokenizer: for the token texts in the tracer's events.
        has_independent_rows: what models/cpu_linear.py measured about the model's linear layers.
        draft_model: its cache, of as many blocks, must fit into the memory as well. It is not run here.
        num_blocks: of the cache. None: what fits.
        communicator: of the ranks that share the model, each with an executor. One of them runs steps (distributed/).
        """
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._tokenizer, self._tracer = tokenizer, tracer
        name, backend = select_backend(
            config.attention_backend,
            self.device,
            self.dtype,
            model.config.head_dim,
            block_size=config.cache.block_size,
            enforce_eager=config.enforce_eager,
        )
        block_size = config.cache.block_size or backend.default_block_size
        self.info = self._size_cache(model, config, name, block_size, draft_model, num_blocks, communicator)
        graphs, sampler_graphs = None, None
        if self.device.type == "cuda" and backend.supports_cuda_graph and not config.enforce_eager:
            if getattr(model, "supports_cuda_graph", True):
                graphs = DecodeGraphs(
                    max_num_seqs=config.max_num_rows,
                    max_model_len=self.info.max_model_len,
                    block_size=self.info.block_size,
                    padding_block=self.info.num_blocks,
                    capture=CUDACapture(),
                )
            sampler_graphs = SamplerGraphs(config.max_num_rows, CUDACapture())
        cache = KVCache(
            num_layers=model.config.num_hidden_layers,
            num_blocks=self.info.num_blocks + (graphs is not None),
            block_size=self.info.block_size,
            num_kv_heads=model.config.num_key_value_heads,
            head_dim=model.config.head_dim,
            dtype=self.dtype,
            device=self.device,
            layout=backend.layout,
        )
        if isinstance(backend, CPUBackend):
            backend.warm_up(cache, model.config.num_attention_heads)
        greedy = None
        if self.device.type == "cpu" and not config.enforce_eager:
            with suppress(UnsupportedError):
                greedy = GreedyKernel(self.dtype, model.config.vocab_size)
        self.runner = ModelRunner(model, cache, backend, graphs, greedy)
        self._num_threads = torch.get_num_threads()
        self._batch_invariant = config.scheduler.batch_invariant
        self._is_batch_independent = has_independent_rows and is_batch_independent(
            model,
            backend,
            self.info.block_size,
            self.dtype,
            has_single_queries=self._batch_invariant,
            communicator=communicator,
        )
        if self._batch_invariant and not self.batch_independent:
            raise cannot_be_invariant(self.dtype, self.device)
        stages = STAGES if config.stages is None else config.stages
        self.sampler = Sampler(
            stages, processed_logprobs=LOGPROBS_MODES[config.logprobs_mode] == "processed", graphs=sampler_graphs
        )
        self._has_user_stages = self.sampler.has_user_stages  # they need full rows of logits
        self._previous_sampling_batch: SamplingBatch | None = None  # its columns are reused while the rows stay the same

    @property
    def batch_independent(self) -> bool:
        """See LLM.batch_independent."""
        return self._is_batch_independent and torch.get_num_threads() == self._num_threads

    @torch.inference_mode()
    def launch(self, plan: StepPlan, previous: LaunchedStep | None) -> LaunchedStep:
        """From the plan to the sampled tokens on the device. See Executor.launch."""
        if self.device.type == "cpu":
            openmp.observe()
        with self._on_device():
            start = time.perf_counter()
            last_drawn = None
            if previous is not None and previous.drawn is not None:
                rows = {seq: row for row, (seq, _) in enumerate(previous.plan.rows)}
                last_drawn = LastDrawn(previous.drawn.token_ids, rows)
            batch = ForwardBatch.build(
                plan, self.info.block_size, self.device, last_drawn, self._tracer, has_single_queries=self._batch_invariant
            )
            built = time.perf_counter()
            hidden = self.runner.forward(batch)
            sequences = [seq for seq, _ in plan.rows]
            top_logprobs = stage_tracer = token_ids = drawn = None
            if self._tracer is not None and self._tracer.wants_stages:
                stage_tracer = StageTracer(self._tracer, sequences, self._tokenizer)
            sampling_batch = None if plan.num_top_logprobs else self._sampling_batch(sequences)
            if sampling_batch is not None and stage_tracer is None and not self._has_user_stages:
                token_ids = self.runner.sample(hidden, batch.logits_indices, sampling_batch)
            if token_ids is None:
                logits = self.runner.compute_logits(hidden, batch.logits_indices)  # of the rows that need logits
            forwarded = time.perf_counter()
            if sampling_batch is None:
                top_logprobs = _top_logprobs(logits, sequences, plan.num_top_logprobs)
            else:
                drawn = (
                    self.sampler(logits, sampling_batch, stage_tracer) if token_ids is None else self.sampler.drawn(token_ids)
                )
            prompt_logprobs = [self._prompt_logprobs(part, hidden) for part in plan.prompt_rows]
            must_sync = self._has_user_stages or bool(prompt_logprobs) or any(map(_must_sync, sequences))
            traced = stage_tracer.seconds if stage_tracer else 0.0
            sampled = time.perf_counter() - forwarded - traced
            seconds = {"build": built - start, "forward": forwarded - built, "sample": sampled, "trace": traced}
            return LaunchedStep(plan, drawn, prompt_logprobs, top_logprobs or [], must_sync, seconds)

    @torch.inference_mode()
    def collect(self, step: LaunchedStep) -> StepOutput:
        """Wait for the sampled tokens of a step. See Executor.collect."""
        if step.drawn is None:
            return StepOutput(step.top_logprobs)
        start = time.perf_counter()
        with self._on_device():
            sampled = step.drawn.read()
        drafting = {item.sequence: item for item in step.plan.scheduled if item.draft_token_ids}
        outputs, end = [], 0  # end: of the rows of the sequence before
        for first, (seq, _) in enumerate(step.plan.rows):
            if first < end:
                continue  # the row of a draft
            item = drafting.get(seq)
            end = first + 1 + (len(item.draft_token_ids) if item else 0)
            if error := sampled.errors.get(first):
                outputs.append(SequenceOutput(seq, error=error))
                continue
            num_accepted = item.num_accepted(sampled.token_ids[first:end]) if item else 0
            # A draft's row that failed is computed again, alone.
            rows = [row for row in range(first, first + 1 + num_accepted) if row not in sampled.errors]
            logprobs = [sampled.logprobs[row] for row in rows if row in sampled.logprobs]
            outputs.append(SequenceOutput(seq, [sampled.token_ids[row] for row in rows], logprobs))
        seconds = step.seconds | {"sample": step.seconds["sample"] + time.perf_counter() - start}
        return StepOutput(outputs, step.prompt_logprobs, seconds)

    # ---- internals

    def _size_cache(
        self,
        model: Model,
        config: EngineConfig,
        backend_name: str,
        block_size: int,
        draft_model: Model | None,
        num_blocks: int | None,
        communicator: Communicator | None,
    ) -> ExecutorInfo:
        """Decide how many blocks the KV cache gets, and the longest sequence that this allows."""
        limit = model.config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > limit:
            raise InvalidValueError(
                f"max_model_len must be <= {limit}, the positions this model knows, got {config.max_model_len}"
            )
        requested_len = config.max_model_len or limit
        block_bytes = _block_bytes(model, block_size)
        if num_blocks is None:
            step_bytes = peak_step_bytes(model, config, self.device) if self.device.type == "cuda" else 0
            all_bytes = block_bytes + (0 if draft_model is None else _block_bytes(draft_model, block_size))
            num_blocks = num_blocks_for(
                config, all_bytes, block_size, requested_len, self.device, step_bytes=step_bytes, communicator=communicator
            )
        max_model_len = min(requested_len, num_blocks * block_size)
        dtype_name = str(self.dtype).removeprefix("torch.")
        logger.info(
            "%s on %s, attention %s, KV cache of %d blocks of %d tokens (%.0f MiB), max_model_len %d",
            dtype_name, self.device, backend_name, num_blocks, block_size, num_blocks * block_bytes / 2**20, max_model_len,
        )  # fmt: skip
        if config.max_model_len is not None and max_model_len < config.max_model_len:
            logger.warning(
                "max_model_len is %d, not %d: the KV cache holds no more; raise kv_cache_memory",
                max_model_len, config.max_model_len,
            )  # fmt: skip
        return ExecutorInfo(
            vocab_size=model.config.vocab_size,
            max_position_embeddings=limit,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            num_cache_bytes=num_blocks * block_bytes,
            device=str(self.device),
            dtype=dtype_name,
            attention_backend=backend_name,
        )

    def _sampling_batch(self, sequences: list[Sequence]) -> SamplingBatch:
        batch = SamplingBatch.build(sequences, self.info.vocab_size, self.device, self._previous_sampling_batch)
        self._previous_sampling_batch = batch
        return batch

    def _prompt_logprobs(self, part: PromptRows, hidden: Float[Tensor, "num_tokens hidden"]) -> PromptLogprobs:
        """Log-probabilities of the prompt tokens that follow these rows, computed for a limited number of rows at a time."""
        rows_at_a_time = max(PROMPT_LOGITS // self.info.vocab_size, 1)
        seq, logprobs = part.sequence, []
        requested = seq.params.prompt_logprobs
        num_top = self.info.vocab_size if requested is None or requested == -1 else requested
        for start in range(part.start, part.stop, rows_at_a_time):
            logits = self.runner.compute_logits(hidden, slice(start, min(start + rows_at_a_time, part.stop)))
            first = part.position + 1 + start - part.start
            logprobs += token_logprobs(logits, seq.prompt_token_ids[first : first + len(logits)], [num_top] * len(logits))
        return PromptLogprobs(seq, part.position + 1, logprobs)

    def _on_device(self) -> AbstractContextManager[None]:
        """Make the model's GPU the current one, on which Triton kernels are launched."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def _block_bytes(model: Model, block_size: int) -> int:
    """Bytes of a cache block of a model in all layers."""
    return bytes_per_block_of(model.config, block_size, next(model.parameters()).dtype)


def _must_sync(seq: Sequence) -> bool:
    """Whether sampling the next token depends on the newest one, or its log-probabilities were requested."""
    return seq.sampling_reads_output or seq.params.logprobs is not None


def _top_logprobs(logits: Float[Tensor, "num_rows vocab"], sequences: list[Sequence], num_top: int) -> list[SequenceOutput]:
    """The num_top most likely ids of every row, in falling order."""
    num_top = min(num_top, logits.shape[-1])
    largest, likeliest = logits.max(dim=-1)
    all_logprobs: list[TokenLogprobs] = token_logprobs(logits, likeliest.tolist(), [num_top] * len(logits))
    return [
        SequenceOutput(seq, logprobs=[logprobs]) if is_finite else SequenceOutput(seq, error=NOT_FINITE)
        for seq, logprobs, is_finite in zip(sequences, all_logprobs, largest.isfinite().tolist(), strict=True)
    ]
