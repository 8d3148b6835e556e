"""LLM, the class with which users begin. Its names and types are vLLM's.

In: prompts, chat messages. Out: RequestOutputs, or Deltas while generating. Malformed input is refused before any work is done.
"""

import gc
import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, NoReturn, Self, cast

import torch
from tqdm import tqdm

import nanoinfer
from nanoinfer.arguments import arguments_of, check_argument_names
from nanoinfer.config import EngineArgs
from nanoinfer.engine.guards import CLOSED, interrupt_deferred, interrupt_handler
from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.prompts import PromptType
from nanoinfer.engine.request import Request
from nanoinfer.errors import InvalidPromptError, InvalidTypeError, InvalidValueError, NanoinferError, check_flag
from nanoinfer.features.chat.methods import ChatMethods
from nanoinfer.features.embedding.methods import EmbeddingMethods
from nanoinfer.features.training.methods import WeightMethods
from nanoinfer.load import load_engine
from nanoinfer.outputs import Delta, Metric, RequestOutput
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanoinfer.execution.executor import ExecutorInfo

logger = logging.getLogger(__name__)


class LLM(ChatMethods, EmbeddingMethods, WeightMethods):
    """A loaded model: `LLM("Qwen/Qwen3-0.6B").generate(["Hello"], SamplingParams(max_tokens=20))`.

    nanoinfer.EngineArgs explains the arguments. One thread at a time may use an LLM, in the process that made it. generate()
    inside a stream() loop works. close(), or the end of a `with LLM(...) as llm:` block, frees the memory.
    """

    @arguments_of(EngineArgs, "LLM()")
    def __init__(self, args: EngineArgs) -> None:
        """Load a model.

        Raises:
            InvalidValueError, InvalidTypeError: an argument is out of its range, of the wrong type or unknown.
            UnsupportedError: the model or a setting is not supported.
            CheckpointNotFoundError, CheckpointError, WeightsError: files are missing or corrupted.
            EngineDeadError: a rank has ended.
        """
        config = args.to_config()
        self._engine: LLMEngine | None = None
        self._engine, checkpoint = load_engine(config)
        if ignored := checkpoint.settings_not_applied():
            logger.warning("the checkpoint's generation_config.json has %s, which nanoinfer does not apply", ignored)
        self.checkpoint = checkpoint
        self._default_params: SamplingParams | None = None  # set on first use
        self._name = config.model or checkpoint.path.name

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an LLM from an EngineArgs, as LLM(...) does from its fields."""
        return cls(**{field.name: getattr(engine_args, field.name) for field in fields(EngineArgs)})

    @property
    def engine(self) -> LLMEngine:
        """The engine under this interface. Raises: NanoinferError if the LLM is closed."""
        if self._engine is None:
            raise NanoinferError(CLOSED)
        return self._engine

    @property
    def info(self) -> "ExecutorInfo":
        """The chosen device, dtype and attention backend, and the sizes of the model and of its KV cache."""
        return self.engine.executor.info

    def close(self) -> None:
        """Free the model and its KV cache, and end the processes of other ranks. A second call does nothing.

        Unfinished requests and streams end with finish_reason "abort". Later use raises NanoinferError.
        """
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            gc.collect()  # because the parts of a model may refer to each other in circles
            torch.cuda.empty_cache()  # does nothing without a GPU

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._engine is None:
            return f"{type(self).__name__}({self._name!r}, closed)"
        info = self.info
        return (
            f"{type(self).__name__}({self._name!r}, dtype={info.dtype!r}, device={info.device!r}, "
            f"attention_backend={info.attention_backend!r}, max_model_len={info.max_model_len}, seed={self.engine.seed})"
        )

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(
            "an LLM cannot be pickled or copied, because its memory and threads belong to this process; call LLM(...) in the "
            "process that uses it"
        )

    @check_argument_names("generate()")
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: "nanoinfer.LoRARequest | Sequence[nanoinfer.LoRARequest | None] | None" = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to all prompts in one batch, and return the outputs in the order of the prompts.

        A request that fails gets finish_reason "error", with the reason in outputs[0].error: its prompt is too long, or no
        token is left to draw. The logger "nanoinfer" warns once per call.

        Args:
            prompts: a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
            sampling_params: the parameters of all prompts, or a list with those of each. None: get_default_sampling_params().
            use_tqdm: whether to show a progress bar.
            lora_request: the adapter of all prompts, or a list with an adapter or None for each, with LLM(enable_lora=True).
            priority: an integer per prompt, with LLM(scheduling_policy="priority"). Lower runs first. None: 0 for all.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: for a prompt, with its index, before anything runs.
            InvalidPromptError: every prompt is too long. The error's `outputs` are what would have been returned.
        """
        check_flag("use_tqdm", use_tqdm)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        prepared = self.engine.inputs.prepare_all(prompts, params, priority=priority, lora_request=lora_request)
        outputs = [cast(RequestOutput, request.output) for request in self._complete(prepared, use_tqdm)]
        tell_failures(outputs, were_refused=all(one.error for one in prepared))
        return outputs

    @check_argument_names("stream()")
    def stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: "nanoinfer.LoRARequest | None" = None,
        priority: int = 0,
    ) -> Generator[Delta, None, None]:
        """Answer a prompt, and yield a Delta for every sampled token. The last Delta has the whole RequestOutput.

        The joined texts are the output's text: yielded text is never taken back. With n > 1, Delta.index is the answer that a
        text belongs to. Leaving the loop early aborts the request.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: raised by the call, not at the first token.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._stream(self.engine.inputs.prepare(prompt, params, priority=priority, lora_request=lora_request))

    @check_argument_names("beam_search()")
    def beam_search(
        self, prompts: PromptType | Sequence[PromptType], params: "nanoinfer.BeamSearchParams"
    ) -> "list[nanoinfer.BeamSearchOutput]":
        """Find the most likely answers to each prompt, and return them with their scores, in the order of the prompts.

        The prompts run together as far as the KV cache allows. The beams of a prompt share their blocks.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: as in generate.
            NanoinferError: the beams of a prompt do not fit into the KV cache.
            UnsupportedError: the LLM was made with stages or logits_processors, which a search does not call.
        """
        return nanoinfer.BeamSearch(self.engine, prompts, params).run()

    @property
    def batch_independent(self) -> bool:
        """Whether a prompt's logits have the same bits in any batch on this machine.

        It is tested when the model is loaded, with every number of threads up to torch's. If True, a seed gives the same tokens
        in any batch. Prefix hits and preemptions may still change the last bits, unless batch_invariant=True. On a GPU it is
        False without batch_invariant=True.
        """
        return self.engine.executor.batch_independent

    def abort(self, request_id: str) -> None:
        """End a running request. Its stream ends with finish_reason "abort". Unknown and finished ids are ignored."""
        self.engine.abort(request_id)

    @check_argument_names("reset_prefix_cache()")
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, so that the next prompts are computed in full. Running requests keep their blocks.

        Returns:
            True, as in vLLM after a reset. (vLLM returns False while requests run. Here a reset is possible even then.)
        """
        self.engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics under vLLM's names. Beam search counts only in the use of the KV cache."""
        return self.engine.get_metrics()

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer of transformers for this model. Raises: InvalidValueError if the checkpoint has none."""
        if self.engine.tokenizer is None:
            raise InvalidValueError("no tokenizer is loaded; pass LLM(tokenizer=...)")
        return self.engine.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that generate() uses by default: generation_config.json's over SamplingParams()."""
        has_tokenizer = self.engine.tokenizer is not None
        if self._default_params is not None:
            return self._default_params.clone()
        try:
            given = self.checkpoint.sampling_defaults
            if not has_tokenizer:
                given.pop("stop", None)
            params = SamplingParams(**{"max_tokens": None} | given, detokenize=has_tokenizer)
            params.max_tokens = params.max_tokens or max(params.min_tokens, 16)  # 16 is the default of SamplingParams
            if params.bad_words:
                self.engine.inputs.prepare([0], params)  # refuses ids that the model lacks
            self._default_params = params
        except NanoinferError as error:
            raise type(error)(f"in the checkpoint's generation_config.json: {error}; or pass SamplingParams(...)") from error
        if given:
            defaults = ", ".join(f"{name}={value}" for name, value in given.items())
            logger.info("sampling defaults from the checkpoint's generation_config.json: %s", defaults)
        return self._default_params.clone()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise nanoinfer.missing_attribute(self, name)

    # ---- running

    def _complete(self, prepared: list[PreparedRequest], use_tqdm: bool) -> list[Request]:
        """Run requests to their end. After an error or Ctrl-C, all are aborted."""
        engine, requests = self.engine, list[Request]()
        with interrupt_handler():
            try:
                with interrupt_deferred():
                    for request in prepared:
                        requests.append(engine.submit(request))
                self._run(requests, use_tqdm)
                engine.capture_graphs()
            finally:
                engine.abort(*(request.request_id for request in requests))
        return requests

    def _stream(self, prepared: PreparedRequest) -> Generator[Delta, None, None]:
        engine, requests = self.engine, list[Request]()
        try:
            with interrupt_deferred():
                request = engine.submit(prepared, streaming=True)
                requests.append(request)
            while request.output is None or request.deltas:
                if not request.deltas:
                    engine.step()
                while request.deltas:
                    yield request.deltas.popleft()
        finally:
            engine.abort(*(request.request_id for request in requests))

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Step until all of these requests have ended. Requests of open streams advance as well."""
        pending = [request for request in requests if request.output is None]
        start = last_shown = time.perf_counter()
        with tqdm(total=len(requests), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
            bar.update(len(requests) - len(pending))
            while pending:
                self.engine.step()
                num_pending = len(pending)
                pending = [request for request in pending if request.output is None]
                now = time.perf_counter()
                if use_tqdm and (not pending or now - last_shown > bar.mininterval):
                    last_shown = now
                    begun = [request for request in requests if request.metrics.first_token_time is not None]
                    num_input = sum(len(request.sequences[0].prompt_token_ids) for request in begun)
                    num_output = sum(request.num_output_tokens for request in begun)
                    seconds = now - start
                    speed = f"input {num_input / seconds:.1f} tok/s, output {num_output / seconds:.1f} tok/s"
                    bar.set_postfix_str(speed, refresh=num_pending == len(pending))
                bar.update(num_pending - len(pending))


def tell_failures(outputs: list[RequestOutput], *, were_refused: bool) -> None:
    """Log how many requests failed, and the first reason. Raises: InvalidPromptError if every prompt was refused."""
    all_answers = [(number, answer) for number, output in enumerate(outputs) for answer in output.outputs]
    failed = [(number, answer) for number, answer in all_answers if answer.finish_reason == "error"]
    if not failed:
        return
    (first, answer), total = failed[0], len(outputs)
    if were_refused:
        error = InvalidPromptError(f"each of {total} prompts is too long: {answer.error}" if total > 1 else answer.error)
        error.outputs = outputs
        raise error
    text, num_failed = "%d of %d requests failed: %s (see outputs[%d].outputs[%d].error)", len({number for number, _ in failed})
    logger.warning(text, num_failed, total, answer.error, first, answer.index)
