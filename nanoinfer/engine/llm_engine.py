"""LLMEngine.step(): the whole story in a few lines. Everything below it is a station; this file is the route.

In: token ids and SamplingParams. Out: Requests, whose outputs fill as step() is called. It knows no prompt text formats, chat
or progress bars: those are the front door's, llm.py.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from nanoinfer.attention.base import select_backend
from nanoinfer.attention.kv_cache import KVCache, bytes_per_block
from nanoinfer.config import EngineConfig
from nanoinfer.devices import openmp
from nanoinfer.devices.cuda_graphs import CUDACapture
from nanoinfer.engine.admission import Admission, checked_model_len
from nanoinfer.engine.request import Request, named_logprobs
from nanoinfer.engine.stopping import Stop
from nanoinfer.errors import NanoinferError
from nanoinfer.execution.batch_independence import cannot_be_invariant, is_batch_independent
from nanoinfer.execution.decode_graphs import DecodeGraphs
from nanoinfer.execution.forward_batch import ForwardBatch, LastDrawn
from nanoinfer.execution.memory import num_blocks_for, peak_step_bytes
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.models.checkpoint import DEFAULT_MODEL, Checkpoint
from nanoinfer.models.loader import load
from nanoinfer.models.registry import ModelConfig
from nanoinfer.outputs import LogprobsOnePosition
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from nanoinfer.sampling.sampler import STAGES, Drawn, Sampler
from nanoinfer.sampling.stage_trace import StageTracer
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import PromptRows, Scheduler, SchedulerPlan
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.tokenization.tokenizer import Tokenizer
from nanoinfer.tracing import EngineStarted, EventBuffer, RequestAdded, RequestFinished, StepTimed

logger = logging.getLogger(__name__)

_PROMPT_LOGITS = 2**22  # logits of a prompt computed at a time, for prompt_logprobs: 16 MB


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose tokens have been drawn, and not yet read. must_sync: the next step cannot be launched without them."""

    plan: SchedulerPlan
    drawn: Drawn
    prompts_told: list[tuple[PromptRows, list[LogprobsOnePosition]]]
    must_sync: bool
    times: dict[str, float]


class LLMEngine:
    """Runs requests, a step at a time. One thread at a time may call it.

    To generate is to loop over it:

        request = engine.add_request([5, 6, 7], SamplingParams())
        while request.output is None:
            engine.step()
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer | None, config: EngineConfig, *, eos_token_ids: frozenset[int] = frozenset(),
        has_independent_rows: bool = False,
    ) -> None:  # fmt: skip
        """model: a models.Model, on its device. config.model, dtype and device have been used by then: see `load`.

        has_independent_rows: what linear.py found of the model's linear layers.
        """
        weight = next(model.parameters())
        self.device, self.tokenizer = weight.device, tokenizer
        self.tracer = None if config.tracer is None else EventBuffer(config.tracer)
        self._wants_stages = bool(getattr(config.tracer, "wants_stages", False))
        self.model_config: ModelConfig = model.config
        # Some tokenizers have ids beyond the model's vocabulary: those can neither be drawn nor masked.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i < self.model_config.vocab_size)
        self._requests: dict[str, Request] = {}  # the unfinished ones
        self._pid = os.getpid()
        self._is_stepping = False
        self._pending_aborts: list[str] = []

        self.attention_backend, backend = select_backend(
            config.attention_backend,
            self.device,
            weight.dtype,
            self.model_config.head_dim,
            block_size=config.cache.block_size,
            enforce_eager=config.enforce_eager,
        )
        block_size = config.cache.block_size or backend.default_block_size
        asked_len = checked_model_len(config.max_model_len, self.model_config.max_position_embeddings)
        block_bytes = bytes_per_block(
            num_layers=self.model_config.num_hidden_layers,
            block_size=block_size,
            num_kv_heads=self.model_config.num_key_value_heads,
            head_dim=self.model_config.head_dim,
            dtype=weight.dtype,
        )
        step_bytes = 0
        if self.device.type == "cuda":
            step_bytes = peak_step_bytes(model, config.scheduler, self.device)
        num_blocks = num_blocks_for(config, block_bytes, block_size, asked_len, self.device, step_bytes=step_bytes)
        self.max_model_len = min(asked_len, num_blocks * block_size)
        self.admission = Admission(
            self.model_config, tokenizer, self.max_model_len, eos_token_ids=self.eos_token_ids, seed=config.seed
        )
        logger.info(
            "%s on %s, attention %s, KV cache of %d blocks of %d tokens (%.0f MiB), max_model_len %d",
            str(weight.dtype).removeprefix("torch."), self.device, self.attention_backend, num_blocks, block_size,
            num_blocks * block_bytes / 2**20, self.max_model_len,
        )  # fmt: skip
        if config.max_model_len is not None and self.max_model_len < config.max_model_len:
            logger.warning(
                "max_model_len is %d, not %d: the KV cache holds no more; raise kv_cache_memory",
                self.max_model_len, config.max_model_len,
            )  # fmt: skip

        self.block_manager = BlockManager(num_blocks, block_size, config.cache.enable_prefix_caching, self.tracer)
        self.scheduler = Scheduler(config.scheduler, self.block_manager, self.tracer)
        graphs = None
        if self.device.type == "cuda" and backend.supports_cuda_graph and not config.enforce_eager:
            graphs = DecodeGraphs(
                max_num_seqs=config.scheduler.max_num_seqs,
                max_model_len=self.max_model_len,
                block_size=block_size,
                padding_block=num_blocks,
                capture=CUDACapture(),
            )
        cache = KVCache(
            num_layers=self.model_config.num_hidden_layers,
            num_blocks=num_blocks + (graphs is not None),
            block_size=block_size,
            num_kv_heads=self.model_config.num_key_value_heads,
            head_dim=self.model_config.head_dim,
            dtype=weight.dtype,
            device=self.device,
            layout=backend.layout,
        )
        self.runner = ModelRunner(model, cache, backend, graphs)
        self._checked_with = torch.get_num_threads()
        self._is_batch_independent = has_independent_rows and is_batch_independent(model, backend, block_size, weight.dtype)
        if config.scheduler.batch_invariant and not self.batch_independent:
            raise cannot_be_invariant(weight.dtype, self.device)
        stages = STAGES if config.stages is None else config.stages
        self._has_own_stages = stages != STAGES  # those may look at what they like
        draws = SamplerGraphs(config.scheduler.max_num_seqs, CUDACapture()) if graphs else None
        self.sampler = Sampler(stages, processed_logprobs=config.logprobs_mode == "processed", graphs=draws)
        self._previous_sampling_batch: SamplingBatch | None = None  # of the step before, whose columns may serve again
        self._in_flight: _Launched | None = None  # the step that has been launched, and not collected
        asked = config.async_scheduling
        self.async_scheduling = self.device.type == "cuda" if asked is None else asked

    @classmethod
    def load(cls, config: EngineConfig) -> tuple["LLMEngine", Checkpoint]:
        """An engine for a checkpoint, and the checkpoint, for its generation_config."""
        loaded = load(config)
        model = config.model or DEFAULT_MODEL
        engine = cls(
            loaded.model, loaded.tokenizer, config, eos_token_ids=loaded.eos_token_ids,
            has_independent_rows=loaded.has_independent_rows,
        )  # fmt: skip
        if engine.tracer is not None:
            engine.tracer.emit(
                EngineStarted(
                    model=os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model,
                    num_parameters=loaded.num_parameters,
                    device=str(engine.device),
                    dtype=str(engine.runner.cache.layer(0)[0].dtype).removeprefix("torch."),
                    attention_backend=engine.attention_backend,
                    vocab_size=engine.model_config.vocab_size,
                    num_blocks=engine.block_manager.num_blocks,
                    block_size=engine.block_manager.block_size,
                    max_num_seqs=config.scheduler.max_num_seqs,
                    max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
                    max_model_len=engine.max_model_len,
                )
            )
            engine.tell()
        return engine, loaded.checkpoint

    # ---- requests

    def add_request(
        self, prompt_token_ids: list[int], params: SamplingParams, *, prompt: str | None = None, streaming: bool = False
    ) -> Request:
        """Queue a prompt. The Request it returns fills as step() is called; one that can never fit has ended already."""
        arrival_time = time.perf_counter()
        self.admission.check(prompt_token_ids, params)
        num_prompt_tokens = len(prompt_token_ids)
        first, *others = self.admission.admit(prompt_token_ids, params)
        first.forks = others
        request = Request([first, *others], prompt, self.tokenizer, arrival_time=arrival_time, streaming=streaming)
        if self.tracer is not None:
            text = self.tokenizer.decode(prompt_token_ids, skip_special_tokens=False) if self.tokenizer else ""
            tokens = tuple(map(self.tokenizer.token_text, prompt_token_ids)) if self.tokenizer else ()
            self.tracer.emit(RequestAdded(request.request_id, text, tuple(prompt_token_ids), tokens, params.differing()))
        if num_prompt_tokens >= self.max_model_len:
            self._end([request], Stop("error", error=self.admission.too_long(num_prompt_tokens)))
        else:
            self._requests[request.request_id] = request
            self.scheduler.add(first)
        return request

    def abort(self, *request_ids: str) -> None:
        """End unfinished requests with finish_reason "abort" and free their blocks. Finished ones are left as they are.

        Called during a step (by a tracer, or by a stream that is collected just then), it takes effect when the step is over.
        """
        if self._is_stepping:
            self._pending_aborts += request_ids
        else:
            self._end([self._requests[i] for i in request_ids if i in self._requests], Stop("abort"))

    @property
    def batch_independent(self) -> bool:
        """See LLM.batch_independent."""
        return self._is_batch_independent and torch.get_num_threads() == self._checked_with

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    # ---- the story

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Launch one step for whoever is scheduled, and collect what was drawn. Returns the requests that ended.

        With async_scheduling, what is collected is the step before: while a GPU runs a step, the next is prepared and the last
        one's tokens become text. A sequence that turns out to have ended has then one token too many under way; it is dropped.

        Whatever is raised in it, by a user's stage or for want of memory, leaves every request as it was, to be computed again.
        """
        if self.device.type == "cpu":
            openmp.observe()
        with self._undivided(), self._restarting():
            previous, self._in_flight = self._in_flight, None
            launched = self._launch(previous)
            ended = self._collect(previous) if previous else []
            if launched and self.async_scheduling and not launched.must_sync:
                self._in_flight = launched
            elif launched:
                ended += self._collect(launched)
            return ended

    def _launch(self, previous: "_Launched | None") -> "_Launched | None":
        """From the queue to the drawn tokens, without reading them. None if nobody can run."""
        start = time.perf_counter()
        plan = self.scheduler.schedule()  # who runs, how many tokens of each
        if not plan.scheduled:
            return None
        scheduled = time.perf_counter()
        last_drawn = None
        if previous:
            last_drawn = LastDrawn(previous.drawn.token_ids, {seq: row for row, (seq, _) in enumerate(previous.plan.rows)})
        batch = ForwardBatch.build(plan, self.block_manager.block_size, self.device, last_drawn, self.tracer)  # to tensors
        built = time.perf_counter()
        hidden = self.runner.forward(batch)  # the model
        logits = self.runner.compute_logits(hidden[batch.logits_indices])  # the LM head, on the wanted rows
        forwarded = time.perf_counter()
        sequences = [seq for seq, _ in plan.rows]
        asked = SamplingBatch.build(sequences, self.model_config.vocab_size, self.device, self._previous_sampling_batch)
        watch = StageTracer(self.tracer, sequences, self.tokenizer) if self.tracer and self._wants_stages else None
        drawn, self._previous_sampling_batch = self.sampler(logits, asked, watch), asked
        prompts_told = [(part, self._prompt_logprobs(part, hidden)) for part in plan.prompt_rows]
        self.scheduler.commit(plan)  # these tokens are now in the cache
        for seq in sequences:
            seq.num_pending_tokens += 1
        must_sync = self._has_own_stages or bool(prompts_told) or any(map(_wants_its_token, sequences))
        times = {"schedule": scheduled - start, "build": built - scheduled, "forward": forwarded - built}
        return _Launched(plan, drawn, prompts_told, must_sync, times | {"sample": time.perf_counter() - forwarded})

    def _collect(self, launched: "_Launched") -> list[Request]:
        """Read what a step drew, and take every sequence a token on. Returns the requests that ended."""
        start = time.perf_counter()
        sampled = launched.drawn.read()
        drawn = time.perf_counter()
        rows = [(row, seq) for row, (seq, _) in enumerate(launched.plan.rows) if seq.status is not SequenceStatus.FINISHED]
        told = {row: self._named(seq, sampled.logprobs[row]) for row, seq in rows if row in sampled.logprobs}
        # From here to the last row no user's code runs: what is pending must also be advanced.
        for part, logprobs in launched.prompts_told:
            if request := self._requests.get(part.sequence.request_id):
                request.add_prompt_logprobs(part.position + 1, logprobs)
        ended = []
        for row, seq in rows:
            seq.num_pending_tokens -= 1
            request = self._requests[seq.request_id]
            stop: Stop | None
            if error := sampled.errors.get(row):
                request.end(stop := Stop("error", error=error), seq)
            else:  # stop ids -> detokenize -> stop strings -> output
                stop = request.advance(seq, sampled.token_ids[row], told.get(row))
                if self.tracer is not None:
                    self.tracer.emit(request.newest(seq))
            if stop:
                self.scheduler.finish(seq, has_failed=row in sampled.errors)
            if request.output:
                self._retire(request)
                ended.append(request)
        if self.tracer is not None:
            times = launched.times | {"sample": launched.times["sample"] + drawn - start}
            self.tracer.emit(StepTimed(launched.plan.step, **times, advance=time.perf_counter() - drawn))
        return ended

    @torch.inference_mode()
    def compute(self, plan: SchedulerPlan) -> torch.Tensor:
        """Logits [num_rows, vocab] of a plan that is not the scheduler's: beam search makes its own."""
        with self._undivided():
            batch = ForwardBatch.build(plan, self.block_manager.block_size, self.device, tracer=self.tracer)
            return self.runner.compute_logits(self.runner.forward(batch)[batch.logits_indices])

    # ---- inside

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Inside, no request can be taken away and no other step begun; aborts that were asked for follow at the end."""
        if os.getpid() != self._pid:
            raise NanoinferError(
                "this LLM was made in another process, and torch's threads do not survive a fork; make it in the child, or "
                "start the child with multiprocessing's 'spawn'"
            )
        if self._is_stepping:
            raise NanoinferError(
                "step() was called during a step: one thread at a time may use an LLM, and a tracer may not step it. "
                "Use a lock, or give all prompts to one generate()"
            )
        self._is_stepping = True
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():  # of several, this one
                yield
        finally:
            try:
                self.tell()
            finally:
                self._is_stepping = False
                owed, self._pending_aborts = self._pending_aborts, []
                self.abort(*owed)

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        """If a step fails, block tables may be ahead of the cache (copies are owed that nobody will make): all start again."""
        try:
            yield
        except BaseException:
            self._in_flight = None
            for request in self._requests.values():
                for seq in request.sequences:
                    seq.num_pending_tokens = 0  # they are drawn again, and come out the same
            self.scheduler.restart()
            raise

    def _named(self, seq: Sequence, told: TokenLogprobs) -> LogprobsOnePosition:
        return named_logprobs(told.ids, told.values, told.ranks, self.tokenizer if seq.params.detokenize else None)

    def _prompt_logprobs(self, part: PromptRows, hidden: torch.Tensor) -> list[LogprobsOnePosition]:
        """Head the prompt's rows, some at a time, and look up the tokens that follow them."""
        num_at_a_time = max(_PROMPT_LOGITS // self.model_config.vocab_size, 1)
        seq, told = part.sequence, []
        asked = seq.params.prompt_logprobs
        num_top = self.model_config.vocab_size if asked is None or asked == -1 else asked
        for start in range(part.start, part.stop, num_at_a_time):
            logits = self.runner.compute_logits(hidden[start : min(start + num_at_a_time, part.stop)])
            first = part.position + 1 + start - part.start
            token_ids = seq.prompt_token_ids[first : first + len(logits)]
            told += [self._named(seq, one) for one in token_logprobs(logits, token_ids, [num_top] * len(logits))]
        return told

    def _end(self, requests: list[Request], stop: Stop) -> None:
        for request in requests:
            request.end(stop)
            self._retire(request)
        self.tell()

    def _retire(self, request: Request) -> None:
        """A request has its output: its blocks go back, and the engine forgets it."""
        if self._requests.pop(request.request_id, None):
            for seq in request.sequences:
                self.scheduler.finish(seq)
        if self.tracer is not None and request.output is not None:
            reasons = tuple(str(answer.finish_reason) for answer in request.output.outputs)
            self.tracer.emit(RequestFinished(request.request_id, reasons, request.output.metrics.num_output_tokens))

    def tell(self) -> None:
        """Hand the user's tracer what has happened. Last of all, because it may raise."""
        if self.tracer is not None:
            self.tracer.flush()


def _wants_its_token(seq: Sequence) -> bool:
    """Must the sequence's newest token be known before the next can be drawn, or its log-probability told?"""
    params = seq.params
    return bool(params.needs_state or seq.bad_words or params.logits_processors) or params.logprobs is not None
