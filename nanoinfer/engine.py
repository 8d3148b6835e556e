"""LLMEngine.step(): the whole story in a few lines. Everything below it is a station; this file is the route.

In: token ids and SamplingParams. Out: Requests, whose outputs fill as step() is called. It knows no prompt text formats, chat
or progress bars: those are the front door's, llm.py.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from typing import Any

import torch

from nanoinfer import linear, models
from nanoinfer.attention.base import select_backend
from nanoinfer.block_manager import BlockManager
from nanoinfer.checkpoint import Checkpoint, locate
from nanoinfer.config import EngineConfig
from nanoinfer.errors import CheckpointNotFoundError, InvalidPromptError, InvalidTypeError, InvalidValueError, NanoinferError
from nanoinfer.forward_batch import ForwardBatch
from nanoinfer.kv_cache import KVCache, blocks_that_fit, bytes_per_block
from nanoinfer.model_runner import CUDACapture, DecodeGraphs, ModelRunner
from nanoinfer.outputs import LogprobsOnePosition
from nanoinfer.request import Request, named_logprobs
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.logprobs import TokenLogprobs, token_logprobs
from nanoinfer.sampling.sampler import STAGES, Sampler
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduler import PromptRows, Scheduler, SchedulerPlan
from nanoinfer.sequence import Sequence
from nanoinfer.stopping import Stop
from nanoinfer.tokenizer import Tokenizer
from nanoinfer.tracing import RequestFinished, StepTimed

logger = logging.getLogger(__name__)

_PROMPT_LOGITS = 2**22  # logits of a prompt computed at a time, for prompt_logprobs: 16 MB


class LLMEngine:
    """Runs requests, a step at a time. One thread at a time may call it.

    A loop over it is all that generating is:

        request = engine.add_request([5, 6, 7], SamplingParams())
        while request.output is None:
            engine.step()
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer | None, config: EngineConfig, *, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        """model: a models.Model, on its device. config.model, dtype and device have been used by then: see `load`."""
        weight = next(model.parameters())
        self.device, self.tokenizer, self.tracer = weight.device, tokenizer, config.tracer
        self.model_config: models.ModelConfig = model.config
        # Some tokenizers have ids beyond the model's vocabulary: those can neither be drawn nor masked.
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i < self.model_config.vocab_size)
        self._seed = config.seed
        self._num_requests = 0
        self._requests: dict[str, Request] = {}  # the unfinished ones
        self._pid = os.getpid()
        self._is_stepping = False
        self._aborts_owed: list[str] = []

        backend_name, backend = select_backend(
            config.attention_backend,
            self.device,
            weight.dtype,
            self.model_config.head_dim,
            block_size=config.cache.block_size,
            enforce_eager=config.enforce_eager,
        )
        block_size = config.cache.block_size or backend.default_block_size
        asked_len = _checked_model_len(config.max_model_len, self.model_config.max_position_embeddings)
        block_bytes = bytes_per_block(
            num_layers=self.model_config.num_hidden_layers,
            block_size=block_size,
            num_kv_heads=self.model_config.num_key_value_heads,
            head_dim=self.model_config.head_dim,
            dtype=weight.dtype,
        )
        num_blocks = blocks_that_fit(config, block_bytes, block_size, asked_len, self.device)
        self.max_model_len = min(asked_len, num_blocks * block_size)
        logger.info(
            "%s on %s, attention %s, KV cache of %d blocks of %d tokens (%.0f MiB), max_model_len %d",
            str(weight.dtype).removeprefix("torch."), self.device, backend_name, num_blocks, block_size,
            num_blocks * block_bytes / 2**20, self.max_model_len,
        )  # fmt: skip
        if config.max_model_len is not None and self.max_model_len < config.max_model_len:
            logger.warning(
                "max_model_len is %d, not %d: the KV cache holds no more; raise kv_cache_memory",
                self.max_model_len, config.max_model_len,
            )  # fmt: skip

        self.block_manager = BlockManager(num_blocks, block_size, config.cache.enable_prefix_caching)
        self.scheduler = Scheduler(config.scheduler, self.block_manager, config.tracer)
        graphs = None
        if self.device.type == "cuda" and backend.can_be_recorded and not config.enforce_eager:
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
        self.sampler = Sampler(
            STAGES if config.stages is None else config.stages, processed_logprobs=config.logprobs_mode == "processed"
        )
        self._last_asked: SamplingBatch | None = None  # of the step before, whose columns may serve again

    @classmethod
    def load(cls, config: EngineConfig) -> tuple["LLMEngine", Checkpoint]:
        """An engine for a checkpoint, and the checkpoint, for its generation_config."""
        device = models.resolve_device(config.device)
        if config.quantization and device.type != "cpu":
            raise UnsupportedError(f"quantization='int8' runs on a CPU only, got device {str(device)!r}; leave it out")
        checkpoint = Checkpoint.open(config.model, config.revision)
        model = models.load(checkpoint, "bfloat16" if config.quantization else config.dtype, device)
        if config.quantization:
            linear.quantize(model)
        if device.type == "cuda" and not config.enforce_eager:
            models.fuse(model)
        is_invariant = device.type == "cpu" and linear.pack(model)
        if config.scheduler.batch_invariant and not is_invariant:
            raise UnsupportedError("batch_invariant needs a CPU on which torch can pack linear layers; leave it out")
        tokenizer_path = locate(config.tokenizer, with_weights=False) if config.tokenizer is not None else checkpoint.path
        tokenizer = Tokenizer.load(tokenizer_path)
        if config.tokenizer is not None and tokenizer is None:
            raise CheckpointNotFoundError(f"{tokenizer_path} holds no tokenizer files, such as tokenizer.json")
        eos_token_ids = checkpoint.eos_token_ids
        if not eos_token_ids and tokenizer is not None and tokenizer.hf.eos_token_id is not None:
            eos_token_ids = frozenset([tokenizer.hf.eos_token_id])
        return cls(model, tokenizer, config, eos_token_ids=eos_token_ids), checkpoint

    # ---- requests

    def check_request(self, prompt_token_ids: Ids[int], params: SamplingParams) -> None:
        """Refuse what can be seen to be wrong before any work. Too long is not wrong: it becomes an error result.

        Raises: InvalidPromptError, InvalidTypeError, InvalidValueError.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidTypeError(f"sampling_params must be SamplingParams, got {params!r}")
        if not prompt_token_ids:
            raise InvalidPromptError("the prompt has no tokens; give at least one, such as the model's BOS")
        vocab_size = self.model_config.vocab_size
        for name, ids in (
            ("the prompt", prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", tuple(params.logit_bias or ())),
            *(("bad_words", word) for word in params.bad_words or () if not isinstance(word, str)),
        ):
            # max and min in C: a loop over a prompt of 100,000 ids would be felt
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                bad = next(i for i in ids if not 0 <= i < vocab_size)
                error = f"{name} has the token id {bad}; this model's ids are 0 .. {vocab_size - 1}"
                raise InvalidPromptError(error) if ids is prompt_token_ids else InvalidValueError(error)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise InvalidValueError(
                    f"{name} must be at most the vocabulary's {vocab_size}, got {getattr(params, name)}; use -1 for all"
                )
        self._bad_word_ids(params)  # raises for what cannot be one
        if params.detokenize and self.tokenizer is None:
            raise InvalidValueError(
                "this checkpoint has no tokenizer, so there can be no text; pass SamplingParams(detokenize=False), "
                "or LLM(tokenizer=...)"
            )

    def add_request(
        self, prompt_token_ids: list[int], params: SamplingParams, *, prompt: str | None = None, streaming: bool = False
    ) -> Request:
        """Queue a prompt. The Request it returns fills as step() is called; one that can never fit has ended already."""
        arrival_time = time.perf_counter()
        self.check_request(prompt_token_ids, params)
        num_prompt_tokens = len(prompt_token_ids)
        seed = params.seed if params.seed is not None else _distinct_seed(self._seed, self._num_requests)
        bad_words = self._bad_word_ids(params)
        first, *others = (
            Sequence(
                request_id=str(self._num_requests),
                prompt_token_ids=prompt_token_ids,
                params=params,
                seed=(seed + index) % 2**64,
                max_num_tokens=min(num_prompt_tokens + (params.max_tokens or self.max_model_len), self.max_model_len),
                eos_token_ids=self.eos_token_ids,
                bad_words=bad_words,
                index=index,
            )
            for index in range(params.n)
        )
        first.forks = others
        self._num_requests += 1
        request = Request([first, *others], prompt, self.tokenizer, arrival_time=arrival_time, streaming=streaming)
        if num_prompt_tokens >= self.max_model_len:
            self._end([request], Stop("error", error=self.too_long(num_prompt_tokens)))
        else:
            self._requests[request.request_id] = request
            self.scheduler.add(first)
        return request

    def abort(self, *request_ids: str) -> None:
        """End unfinished requests with finish_reason "abort" and free their blocks. Finished ones are left as they are.

        Called during a step (by a tracer, or by a stream that is collected just then), it takes effect when the step is over.
        """
        if self._is_stepping:
            self._aborts_owed += request_ids
        else:
            self._end([self._requests[i] for i in request_ids if i in self._requests], Stop("abort"))

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    # ---- the story

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one step for whoever is scheduled. Returns the requests that ended in it.

        Whatever is raised in it, by a user's stage or for want of memory, leaves every request as it was, to be computed again.
        """
        with self._undivided(), self._restarting():
            start = time.perf_counter()
            plan = self.scheduler.schedule()  # who runs, how many tokens of each
            if not plan.scheduled:
                return []
            scheduled = time.perf_counter()
            batch = ForwardBatch.build(plan, self.block_manager.block_size, self.device)  # sequences -> tensors
            built = time.perf_counter()
            hidden = self.runner.forward(batch)  # the model
            logits = self.runner.compute_logits(hidden[batch.logits_indices])  # the LM head, on the wanted rows
            forwarded = time.perf_counter()
            sequences = [seq for seq, _ in plan.rows]
            asked = SamplingBatch.build(sequences, self.model_config.vocab_size, self.device, self._last_asked)
            sampled, self._last_asked = self.sampler(logits, asked), asked
            told = {i: self._named(seq, sampled.logprobs[i]) for i, seq in enumerate(sequences) if i in sampled.logprobs}
            prompts_told = [(part, self._prompt_logprobs(part, hidden)) for part in plan.prompt_rows]
            drawn = time.perf_counter()
            # From here to the last row no user's code runs: what is committed must also be advanced.
            self.scheduler.commit(plan)  # these tokens are now in the cache
            for part, logprobs in prompts_told:
                self._requests[part.sequence.request_id].add_prompt_logprobs(part.position + 1, logprobs)
            ended = []
            for row, (seq, token_id) in enumerate(zip(sequences, sampled.token_ids, strict=True)):
                request = self._requests[seq.request_id]
                stop: Stop | None
                if error := sampled.errors.get(row):
                    request.end(stop := Stop("error", error=error), seq)
                else:
                    stop = request.advance(seq, token_id, told.get(row))  # stop ids -> detokenize -> stop strings -> output
                if stop:
                    self.scheduler.finish(seq)
                if request.output:
                    self._retire(request)
                    ended.append(request)
            advanced = time.perf_counter()
            self._trace_ends(ended)
            if self.tracer is not None:
                self.tracer.emit(
                    StepTimed(
                        schedule=scheduled - start,
                        build=built - scheduled,
                        forward=forwarded - built,
                        sample=drawn - forwarded,
                        advance=advanced - drawn,
                    )
                )
            return ended

    @torch.inference_mode()
    def compute(self, plan: SchedulerPlan) -> torch.Tensor:
        """Logits [num_rows, vocab] of a plan that is not the scheduler's: beam search makes its own."""
        with self._undivided():
            batch = ForwardBatch.build(plan, self.block_manager.block_size, self.device)
            return self.runner.compute_logits(self.runner.forward(batch)[batch.logits_indices])

    def too_long(self, num_prompt_tokens: int) -> str:
        """What to say about a prompt that leaves no room for an answer."""
        error = f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {self.max_model_len}, answer included; "
        error += "shorten the prompt"
        if self.max_model_len < self.model_config.max_position_embeddings:
            most = self.model_config.max_position_embeddings
            error += f", or raise max_model_len (this model: up to {most}) and kv_cache_memory"
        return error

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
            yield
        finally:
            self._is_stepping = False
            owed, self._aborts_owed = self._aborts_owed, []
            self.abort(*owed)

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        """If a step fails, block tables may be ahead of the cache (copies are owed that nobody will make): all start again."""
        try:
            yield
        except BaseException:
            self.scheduler.restart()
            raise

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """params.bad_words as ids. Some tokenizers have ids that the model lacks: what needs one cannot come out anyway."""
        words: list[tuple[int, ...]] = []
        for word in params.bad_words or ():
            if isinstance(word, str):
                if self.tokenizer is None:
                    raise InvalidValueError(f"bad_words has {word!r}, but there is no tokenizer; give lists of token ids")
                words += self.tokenizer.word_forms(word)
            else:
                words.append(tuple(word))
        return tuple(ids for ids in words if max(ids) < self.model_config.vocab_size)

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
        self._trace_ends(requests)  # last, because a tracer may raise

    def _retire(self, request: Request) -> None:
        """A request has its output: its blocks go back, and the engine forgets it."""
        if self._requests.pop(request.request_id, None):
            for seq in request.sequences:
                self.scheduler.finish(seq)

    def _trace_ends(self, requests: list[Request]) -> None:
        if self.tracer is None:
            return
        for request in requests:
            assert request.output is not None
            finish_reason = request.output.outputs[0].finish_reason
            assert finish_reason is not None
            self.tracer.emit(RequestFinished(request.request_id, finish_reason, request.output.metrics.num_output_tokens))


def _checked_model_len(asked: int | None, model_len: int) -> int:
    if asked is not None and asked > model_len:
        raise InvalidValueError(f"max_model_len must be <= {model_len}, the positions this model knows, got {asked}")
    return asked or model_len


def _distinct_seed(engine_seed: int, num_requests: int) -> int:
    """64 bits that differ for every request of an engine, and for the same request of engines with other seeds."""
    digest = hashlib.blake2b(f"{engine_seed}:{num_requests}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
