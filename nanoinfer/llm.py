"""LLM, the class with which users begin. Its names and types are vLLM's.

In: prompts, chat messages. Out: RequestOutputs, or Deltas while generating. Malformed input is refused before any work is done.
"""

import gc
import logging
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, Self, cast

import torch
from torch import Tensor
from tqdm import tqdm

import nanoinfer
from nanoinfer.arguments import arguments_of, check_argument_names
from nanoinfer.config import EngineArgs
from nanoinfer.engine.guards import CLOSED, interrupt_deferred, interrupt_handler
from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.prompts import PromptType, TokensPrompt
from nanoinfer.engine.request import Request
from nanoinfer.errors import InvalidValueError, NanoinferError, check_flag
from nanoinfer.load import load_engine
from nanoinfer.outputs import Delta, Metric, RequestOutput
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanoinfer.execution.executor import ExecutorInfo
    from nanoinfer.features.adapters.request import LoRARequest
    from nanoinfer.features.chat.messages import Message
    from nanoinfer.features.chat.tools import Tool, ToolChoice
    from nanoinfer.features.embedding.pooling import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput
    from nanoinfer.features.training.rollouts import Tag

logger = logging.getLogger(__name__)


class LLM:
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

    @check_argument_names("generate()")
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None" = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to all prompts in one batch, and return the outputs in the order of the prompts.

        A prompt that is too long for the engine gets finish_reason "error", with the reason in outputs[0].error.

        Args:
            prompts: a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
            sampling_params: the parameters of all prompts, or a list with those of each. None: get_default_sampling_params().
            use_tqdm: whether to show a progress bar.
            lora_request: the adapter of all prompts, or a list with an adapter or None for each, with LLM(enable_lora=True).
            priority: an integer per prompt, with LLM(scheduling_policy="priority"). Lower runs first. None: 0 for all.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: for a prompt, with its index, before anything runs.
        """
        check_flag("use_tqdm", use_tqdm)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        prepared = self.engine.inputs.prepare_all(prompts, params, priority=priority, lora_request=lora_request)
        return [cast(RequestOutput, request.output) for request in self._complete(prepared, use_tqdm)]

    @check_argument_names("stream()")
    def stream(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: "LoRARequest | None" = None,
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

    @check_argument_names("chat()")
    def chat(
        self,
        messages: "Sequence[Message] | Sequence[Sequence[Message]]",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: "Sequence[Tool] | None" = None,
        tool_choice: "ToolChoice" = "auto",
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None" = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of conversations, through the checkpoint's chat template.

        Args:
            messages: [{"role": "user", "content": "Hello"}, ...], or a list of such lists. content may also be a list of text
                parts, [{"type": "text", "text": "Hello"}, ...], which are joined by newlines as in vLLM, or None for no text.
            sampling_params: as in generate. A structured output follows the reasoning that the template has begun, if any.
                parse_chat_answer(text, output.prompt) separates them.
            use_tqdm: whether to show a progress bar.
            chat_template: a Jinja template. None: the checkpoint's.
            add_generation_prompt: whether the rendered text ends with the beginning of an answer.
            continue_final_message: whether the rendered text ends inside the last message, which the answer continues. Requires
                add_generation_prompt=False.
            chat_template_kwargs: variables for the template, such as {"enable_thinking": False} for Qwen3. None: no variables.
            tools: functions with type hints and a Google style docstring, or {"type": "function", "function": {"name": ...,
                "parameters": JSON schema}}. The answer is text, which nanoinfer.parse_chat_answer parses. gpt-oss's
                needs SamplingParams(skip_special_tokens=False).
            tool_choice: "auto", "none" (the tools are left out), or "required" and {"type": "function", "function": {"name":
                ...}}: the answer is a call that satisfies the schema, and no structured output. With "auto", this is so
                for each call if a tool has "strict": True. Both require nanoinfer[structured].
            lora_request: as in generate.
            priority: as in generate.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: as in generate.
            UnsupportedError: the template has no place for tools.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        from nanoinfer.features.chat.messages import render_chats

        prompts, constrained = render_chats(
            self.engine.inputs,
            messages,
            params,
            tools=tools,
            tool_choice=tool_choice,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, constrained, use_tqdm, lora_request=lora_request, priority=priority)

    def render_chat(
        self,
        messages: "Sequence[Message]",
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: "Sequence[Tool] | None" = None,
    ) -> TokensPrompt:
        """Render a conversation as a prompt for generate() or stream(). The arguments are those of chat()."""
        return self.engine.inputs.render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )

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
        from nanoinfer.features.beam_search.search import BeamSearch

        return BeamSearch(self.engine, prompts, params).run()

    @property
    def batch_independent(self) -> bool:
        """Whether a prompt's logits have the same bits in any batch on this machine.

        It is tested when the model is loaded, with every number of threads up to torch's. If True, a seed gives the same tokens
        in any batch. Prefix hits and preemptions may still change the last bits, unless batch_invariant=True. It is False on a
        GPU.
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

    # ---- embeddings and scores

    @check_argument_names("embed()")
    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        use_tqdm: bool = True,
        *,
        pooling_params: "PoolingParams | None" = None,
        truncate_prompt_tokens: int | None = None,
    ) -> "list[EmbeddingRequestOutput]":
        """Compute the embedding of each text, and return them in the order of the texts.

        Args:
            prompts: Texts as for generate(), of at most max_model_len tokens each. As in sentence-transformers, checkpoints may
                have a default prompt, which comes before each text, and a max_seq_length, at which texts are cut, unless
                truncate_prompt_tokens is given. Other instructions before a query are a part of the text. Ids have no prompt.
            use_tqdm: Whether to show a progress bar.
            pooling_params: None is PoolingParams().
            truncate_prompt_tokens: The field of pooling_params, as an argument of its own, as in vLLM.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: As generate does, and for texts that are too long.
            UnsupportedError: The checkpoint says that something else is to be computed.
        """
        from nanoinfer.features.embedding import pooling

        params = pooling.PoolingParams.of(pooling_params, truncate_prompt_tokens)
        return pooling.embed(self, prompts, params, use_tqdm)

    @check_argument_names("score()")
    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        pooling_params: "PoolingParams | None" = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> "list[ScoringRequestOutput]":
        """Compute how well each document fits its query. There is one query for all documents, or a query for each.

        A checkpoint whose modules.json has Pooling is an embedding model, which reads each text alone. Any other checkpoint
        is a reranker, which reads each pair.

        Args:
            use_tqdm: as in embed.
            pooling_params: as in embed.
            truncate_prompt_tokens: as in embed.
            instruction: The criterion by which a reranker judges. None: INSTRUCTION of features/embedding/pooling.py.

        Raises: As embed does.
        """
        from nanoinfer.features.embedding import pooling

        params = pooling.PoolingParams.of(pooling_params, truncate_prompt_tokens)
        return pooling.score(self, queries, documents, params, instruction, use_tqdm)

    # ---- for those who train with it: new weights in place, pauses, memory given back, log-probabilities

    def update_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> int:
        """Replace weights in place, all or some of them, and forget the cached prefixes.

        Everything is checked before anything changes, so a refused call leaves the LLM as it was. If reading or copying a
        tensor fails after that, requests are refused until all weights are given.

        Args:
            pairs: The checkpoint's name of each tensor, as in model.named_parameters() of transformers, and the tensor, in any
                float dtype and on any device. Names and shapes must be those that LLM() loads.

        Returns:
            The new weights_version.

        Raises:
            WeightsError: An unknown name, a wrong shape, a dtype that is not a float, or a tied head without its embedding.
            NanoinferError: Requests run. pause() ends them.
            UnsupportedError: The weights are rounded, or have adapters merged into them.
        """
        from nanoinfer.features.training import rollouts

        return rollouts.update_weights(self.engine, pairs)

    def update_weights_from_path(self, path: str) -> int:
        """Replace weights in place by those in files, of which each rank reads its part.

        Args:
            path: The folder, on this machine, of a checkpoint of the same model with the files that LLM(model) reads, or a
                .safetensors file with all or some of the tensors.

        Returns, Raises: As update_weights, and as LLM() does for missing and corrupted files.
        """
        from nanoinfer.features.training import rollouts

        return rollouts.update_weights_from_path(self.engine, path)

    def pause(self, mode: Literal["wait", "abort"] = "wait") -> None:
        """Accept no further requests until resume(), and end those that run.

        Args:
            mode: What happens to running requests. "wait" completes their answers, which open streams then yield. "abort" ends
                them with finish_reason "abort".
        """
        from nanoinfer.features.training import rollouts

        rollouts.refuse_requests(self.engine, mode)
        while self.engine.num_unfinished:
            self.engine.step()

    def resume(self) -> None:
        """Accept requests again after pause()."""
        self.engine.refusals.pop("pause", None)

    def sleep(self, level: int = 1) -> None:
        """Give memory back to the system until wake_up(). It requires Linux, a model on a CPU, and that no request runs.

        Args:
            level: What is freed. 1: the KV cache with the cached prefixes. 2: the weights as well, all of which must then come
                from update_weights or update_weights_from_path after wake_up().

        Raises:
            NanoinferError: Requests run. pause() ends them.
            UnsupportedError: The system is not Linux, the model is on a GPU, or its weights cannot be replaced.
        """
        from nanoinfer.features.training import rollouts

        rollouts.sleep(self.engine, level)

    def wake_up(self, tags: "Sequence[Tag] | None" = None) -> None:
        """End sleep(). Linux provides the memory when it is first written.

        Args:
            tags: What to bring back: ["weights"] or ["kv_cache"], so that a later call brings back the other. None: both.
        """
        from nanoinfer.features.training import rollouts

        rollouts.wake_up(self.engine, tags)

    def is_sleeping(self) -> bool:
        """Whether sleep() has freed memory that wake_up() has not taken back."""
        from nanoinfer.features.training import rollouts

        return rollouts.is_sleeping(self.engine)

    @check_argument_names("compute_logprobs()")
    def compute_logprobs(self, prompts: PromptType | Sequence[PromptType], temperature: float = 1.0) -> list[list[float]]:
        """Compute the log-probability of every token after the first, as the sampler would have reported it.

        If batch_independent holds and the LLM was made with batch_invariant=True, the results are the very log-probabilities
        that SamplingParams(logprobs=0) returned when the same tokens were sampled. With another temperature, compare with a
        request to LLM(logprobs_mode="processed") that sets nothing but this temperature. Without both, a prefill rounds
        differently than a decode: results differ by some 1e-6 in float32, and by up to 0.1 in bfloat16.

        Args:
            prompts: Prompts with their answers, in the forms of generate(), of at most max_model_len tokens each.
            temperature: The divisor of the logits, > 0.

        Returns:
            For each prompt, the natural logarithm of the probability of every token but the first, given the tokens before that
            token.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: As generate does, and for a prompt with too many tokens.
            NanoinferError: The model's numbers are not finite.
        """
        from nanoinfer.features.training import rollouts

        return rollouts.compute_logprobs(self, prompts, temperature)

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
