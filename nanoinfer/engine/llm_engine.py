"""LLMEngine: requests in, outputs out, one step at a time. It does bookkeeping only. An Executor computes.

In: prompts and SamplingParams. Out: Requests, whose outputs grow as step() is called. This folder imports no torch.
"""

import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.engine.guards import EngineGuard
from nanoinfer.engine.inputs import InputProcessor, PreparedRequest, RequestFeature
from nanoinfer.engine.observer import NOBODY, Observer, Planner, together
from nanoinfer.engine.request import Request
from nanoinfer.engine.stopping import Stop
from nanoinfer.errors import EnginePausedError, InvalidValueError, NanoinferError
from nanoinfer.execution.executor import Executor, InFlight
from nanoinfer.outputs import Metric
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.scheduler import scheduling_classes
from nanoinfer.scheduling.sequence import Sequence, SequenceStatus
from nanoinfer.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Runs requests, a step at a time. load.load_engine makes it from an EngineConfig. guards.py says who may call it when.

    Generating is a loop over step():

        request = engine.add_request([5, 6, 7], SamplingParams())
        while request.output is None:
            engine.step()
    """

    def __init__(
        self,
        executor: Executor[Any],
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        planner: Planner | None = None,
        block_manager: BlockManager | None = None,
        observer: Observer = NOBODY,
        features: ListLike[RequestFeature] = (),
    ) -> None:
        """
        Args:
            planner: plans the steps, and observes. None: the scheduler's plans are complete.
            block_manager: manages the cache's blocks, and has the same observer. None: every layer keeps every token.
            observer: sees what happens in the engine.
            features: what features make of each request, in their order.
        """
        self.executor = executor
        self.config = config
        self.tokenizer = tokenizer
        self.planner = planner or Planner()
        self.observer = together(observer, self.planner)
        info = executor.info
        budget = config.scheduler.max_num_batched_tokens
        if not config.scheduler.enable_chunked_prefill and budget < info.max_model_len:
            raise InvalidValueError(
                f"enable_chunked_prefill=False needs max_num_batched_tokens >= max_model_len, got {budget} and "
                f"{info.max_model_len}; change one of them, or leave enable_chunked_prefill out"
            )
        # Some tokenizers have ids beyond the model's vocabulary. Such ids can neither be sampled nor masked.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i < info.vocab_size)
        self.max_model_len = info.max_model_len
        scheduler_cls, block_manager_cls = scheduling_classes(config)
        self.inputs = InputProcessor(info, tokenizer, config, accepts_priority=scheduler_cls.reads_priority, features=features)
        if block_manager is None:
            caching = config.cache.enable_prefix_caching
            block_manager = block_manager_cls(info.num_blocks, info.block_size, caching, observer)
        self.block_manager = block_manager
        self.scheduler = scheduler_cls(config.scheduler, self.block_manager, observer)
        for feature in features:
            self.scheduler.limits = {**self.scheduler.limits, **feature.limits}
        is_async = info.device != "cpu" if config.async_scheduling is None else config.async_scheduling
        self.async_scheduling = is_async and not self.planner.needs_tokens
        self.seed = secrets.randbits(64) if config.seed is None else config.seed
        if config.seed is None:
            logger.info("seed %d was drawn: LLM(seed=%d) and the same calls give the same answers", self.seed, self.seed)
        self.weights_version = 0  # how often the weights were replaced
        self.refusals: dict[str, EnginePausedError] = {}  # why requests are refused (pause, sleep) -> the error that says so
        self._num_requests = 0
        self._requests: dict[str, Request] = {}  # by id, unfinished
        self._with_deadline: dict[str, Request] = {}  # by id, unfinished and with a timeout
        self._in_flight: InFlight | None = None  # the step that was launched and not yet collected
        self.interrupted_request_ids: frozenset[str] = frozenset()  # the requests in the step that raised last
        self.guard = EngineGuard(restart=self._restart, flush=self.observer.flush, abort=self.abort)

    # ---- requests

    def add_request(self, prompt: object, params: SamplingParams) -> Request:
        """Prepare a prompt and queue it. Raises: the errors of InputProcessor.prepare."""
        return self.submit(self.inputs.prepare(prompt, params))

    def submit(
        self, prepared: PreparedRequest, *, request_id: str | None = None, streaming: bool = False, stop: Stop | None = None
    ) -> Request:
        """Queue a prepared request, and collect Deltas if `streaming`. A prompt that is too long has finished on return.

        request_id: a name that differs from those of all unfinished requests. None: the request's number.
        stop: if given, the request is not queued and ends with this reason.
        """
        arrival_time = time.perf_counter()
        if prepared.error is not None:
            stop = Stop("error", error=prepared.error.message)
        if stop is None:
            self.check_accepting()
        with self.guard.between_steps():
            number, self._num_requests = self._num_requests, self._num_requests + 1
            sequences = self._sequences_of(prepared, number, str(number) if request_id is None else request_id, arrival_time)
            request = Request(
                sequences, prepared.prompt, self.tokenizer, streaming=streaming, weights_version=self.weights_version
            )
            self.observer.request_added(request)
            if stop is not None:
                self._finish([request], stop)
            else:
                self._requests[request.request_id] = request
                if prepared.params.timeout is not None:
                    self._with_deadline[request.request_id] = request
                self.scheduler.add(sequences[0])
        return request

    def _sequences_of(self, prepared: PreparedRequest, number: int, request_id: str, arrival_time: float) -> list[Sequence]:
        """Make a sequence for each of the n answers. The first holds the others as forks.

        A request without a seed gets one made of the engine's seed and the request's number, so that no two requests share it.
        """
        params, num_prompt_tokens = prepared.params, len(prepared.prompt_token_ids)
        seed = params.seed
        if seed is None:  # 64 bits, different for every request, and for the same request in engines with other seeds
            seed = int.from_bytes(hashlib.blake2b(f"{self.seed}:{number}".encode(), digest_size=8).digest(), "little")
        first, *forks = [
            Sequence(
                request_id=request_id,
                prompt_token_ids=prepared.prompt_token_ids,
                params=params,
                seed=(seed + index) % 2**64,
                max_num_tokens=min(num_prompt_tokens + (params.max_tokens or self.max_model_len), self.max_model_len),
                eos_token_ids=self.eos_token_ids | prepared.eos_token_ids,
                constraints=tuple([constraint.copy() for constraint in prepared.constraints]),
                reader=prepared.reader,
                is_answered=prepared.is_answered,
                index=index,
                priority=prepared.priority,
                arrival_time=arrival_time,
                deadline=math.inf if params.timeout is None else arrival_time + params.timeout,
                cache_salt=prepared.cache_salt,
                extras=prepared.extras,
            )
            for index in range(params.n)
        ]
        first.forks = forks
        return [first, *forks]

    def check_accepting(self) -> None:
        """Raises: EnginePausedError if the engine is paused or asleep (features/training/methods.py)."""
        for refusal in self.refusals.values():
            raise type(refusal)(*refusal.args)  # a new exception, because each keeps its traceback

    def abort(self, *request_ids: str) -> None:
        """Finish requests with finish_reason "abort" and free their blocks. Other ids are ignored.

        During a step, for example called by a tracer, it takes effect when the step is over.
        """
        if self.guard.is_in_other_process or self.guard.is_closed:
            return  # a stream may be garbage collected in a forked child, or after close()
        with self.guard.between_steps():
            if not self.guard.defer_abort(request_ids):
                self._finish([self._requests[i] for i in request_ids if i in self._requests], Stop("abort"))

    def fail(self, error: str, *request_ids: str) -> None:
        """Finish requests with finish_reason "error" and free their blocks. Other ids are ignored."""
        with self.guard.between_steps():
            self._finish([self._requests[i] for i in request_ids if i in self._requests], Stop("error", error=error))

    def close(self) -> None:
        """Abort all requests, and drop the executor: model, KV cache and the processes of other ranks. See LLM.close."""
        if self.guard.is_closed or self.guard.is_in_other_process:
            return
        with self.guard.between_steps():
            if self.guard.is_stepping:  # called by a tracer or a stage, from inside the step
                raise NanoinferError("close() was called during a step; close an LLM when generate() has returned")
            try:
                self.abort(*self._requests)
            finally:  # also if the user's tracer raises
                self.guard.is_closed = True
                self.block_manager.close()
                self._in_flight = None
                self.observer.engine_closed()
                del self.executor

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def unfinished_request_ids(self) -> list[str]:
        return list(self._requests)

    def reset_prefix_cache(self) -> None:
        """See LLM.reset_prefix_cache."""
        with self.guard.between_steps():
            self.block_manager.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """See LLM.get_metrics."""
        metrics: list[Metric] = []
        with self.guard.between_steps():
            self.observer.metrics_read(self, metrics)
        return metrics

    # ---- steps

    def step(self) -> list[Request]:
        """Launch a step for the sequences that the scheduler selects, and collect tokens. Returns the finished requests.

        With async_scheduling, these are the previous step's tokens. While the device computes a step, the host prepares the
        next step and makes text of the previous step's tokens. A token in flight of a finished sequence is dropped.
        """
        with self.guard.step():
            finished = self._finish_late() if self._with_deadline else []
            # which sequences run, and how many tokens of each
            plan = self.planner.plan(self.scheduler)
            previous, launched = self._in_flight, None
            if plan.scheduled:
                self.observer.step_launched(plan, previous)
                launched = self.executor.launch(plan, previous)  # tensors, forward pass, sampling; does not wait
                self.scheduler.commit(plan)  # count the plan's tokens as cached
            finished += self._collect(previous) if previous else []
            self._in_flight = launched
            if launched and (launched.must_sync or not self.async_scheduling):
                self._in_flight = None
                finished += self._collect(launched)
            return finished

    def capture_graphs(self, is_over: Callable[[], object] = lambda: False) -> None:
        """Capture the CUDA graphs that steps lacked, if no request runs. is_over: whether to end after the current graph."""
        with self.guard.exclusive():
            while not self._requests and not is_over() and self.executor.capture_next():
                pass

    def _collect(self, step: InFlight) -> list[Request]:
        """Wait for a step's tokens and append them to their sequences: stop rules, text, outputs."""
        output = self.executor.collect(step)
        self.observer.step_collected(step.plan, output)
        finished = []
        for sampled in self.planner.append_unread(output.sequences, self._requests, self.observer):
            seq = sampled.sequence
            if seq.status is SequenceStatus.FINISHED:
                continue  # the request was aborted, or finished in the previous step
            request = self._requests[seq.request_id]
            stop = Stop("error", error=sampled.error) if sampled.error else None
            if stop:
                request.finish(stop, seq)
                self.block_manager.forget_cached(seq)  # its keys and values may not be finite
            for i, token_id in enumerate(sampled.token_ids):
                self.scheduler.append(seq, token_id)
                stop = request.advance(seq, token_id, sampled.reports[i] if sampled.reports else None)
                self.observer.token_appended(request, seq)
                if stop:
                    break  # tokens after a stop are dropped
            if stop:
                self._finish_sequence(seq)
            if request.output:
                self._remove(request)
                finished.append(request)
        self.observer.step_ended(step.plan, output)
        return finished

    def _restart(self) -> None:
        self._in_flight = None
        self.interrupted_request_ids = frozenset(seq.request_id for seq in self.scheduler.running)
        self.scheduler.restart()

    # ---- the end of requests

    def _finish(self, requests: list[Request], stop: Stop) -> None:
        for request in requests:
            request.finish(stop)
            self._remove(request)
        if not self.guard.is_stepping:
            self.observer.flush()

    def _finish_late(self) -> list[Request]:
        """Finish the requests whose deadline has passed, and return them."""
        now = time.perf_counter()
        late = [request for request in self._with_deadline.values() if now >= request.sequences[0].deadline]
        for request in late:
            seconds = request.sequences[0].params.timeout
            self._finish([request], Stop("timeout", error=f"the request took longer than its timeout of {seconds:g} s"))
        return late

    def _remove(self, request: Request) -> None:
        """Free the blocks of a request that has its output, and remove it."""
        self._with_deadline.pop(request.request_id, None)
        if self._requests.pop(request.request_id, None):
            for seq in request.sequences:
                self._finish_sequence(seq)
        self.observer.request_finished(request)

    def _finish_sequence(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self.observer.sequence_finished(seq)
