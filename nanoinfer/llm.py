"""LLM, the class that users begin with. Its names and shapes are vLLM's.

In: prompts, chat messages. Out: RequestOutputs, or Deltas while generating. Malformed input is refused before any work is done.
"""

import logging
import os
import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from tqdm import tqdm

from nanoinfer.config import NEUTRAL_VALUES, CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig, lora_adapters
from nanoinfer.engine.beam_search import BeamSearch
from nanoinfer.engine.chat_messages import Message
from nanoinfer.engine.factory import load_engine
from nanoinfer.engine.guards import interrupt_deferred
from nanoinfer.engine.inputs import PreparedRequest, PromptType, TokensPrompt
from nanoinfer.engine.metrics import Metric
from nanoinfer.engine.request import Request
from nanoinfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    NanoinferError,
    check_argument_names,
    check_flag,
    shown,
)
from nanoinfer.outputs import BeamSearchOutput, Delta, RequestOutput
from nanoinfer.sampling.sampler import Stage
from nanoinfer.sampling_params import BeamSearchParams, SamplingParams
from nanoinfer.tokenization.tools import Tool, ToolChoice
from nanoinfer.tracing import Tracer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LLM:
    """A loaded model: `LLM("Qwen/Qwen3-0.6B").generate(["Hello"], SamplingParams(max_tokens=20))`.

    One thread at a time may use it, in the process that made it. generate() inside a stream() loop works.
    """

    @check_argument_names("LLM()", NEUTRAL_VALUES["LLM()"])
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype = "auto",
        quantization: str | None = None,
        lora: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, float] | None = None,
        device: str = "auto",
        tensor_parallel_size: int = 1,
        block_size: int | None = None,
        max_num_seqs: int | None = SchedulerConfig.max_num_seqs,
        max_num_batched_tokens: int | None = SchedulerConfig.max_num_batched_tokens,
        chunk_size: int = SchedulerConfig.chunk_size,
        max_model_len: int | None = None,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization,
        enable_prefix_caching: bool | None = CacheConfig.enable_prefix_caching,
        batch_invariant: bool = SchedulerConfig.batch_invariant,
        attention_backend: str = "auto",
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        speculative_config: Mapping[str, object] | None = None,
        seed: int | None = None,
        stages: Sequence[Stage] | None = None,
        logprobs_mode: str = "raw",
        tracer: Tracer | None = None,
    ) -> None:
        """Load a model.

        Args:
            model: A folder with config.json and safetensors, a .gguf file, a hub name, or a bundled model ("tiny-qwen3",
                "tiny-gpt2"). None is tiny-qwen3. GPT-2, Llama, Mistral, Qwen2, Qwen2.5, Qwen3 and Qwen's MoE are supported.
            tokenizer: Folder or hub name of a different tokenizer. A model without one takes token ids, detokenize=False.
            revision: Branch, tag or commit of a hub model.
            dtype: "auto" (the checkpoint's own, or float32 on a CPU that is slow at it), "float32"/"float", "bfloat16",
                "float16"/"half", or torch's own.
            quantization: "int8" or "int4" keeps the linear layers in 8 or 4 bits, on a CPU. The rest is in bfloat16.
            lora: LoRA adapters in peft's format, merged into the weights for all requests: a folder or hub name, a list, or a
                dict of strengths, such as {"adapter": 0.5}. docs/checkpoints.md says what is supported.
            device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N".
            tensor_parallel_size: Number of processes, or GPUs, among which the model is split (docs/scaling.md).
            block_size: Tokens per cache block. None is the attention backend's own.
            max_num_seqs: Maximum number of running sequences. None is the default.
            max_num_batched_tokens: Maximum number of prompt tokens per step. Every running sequence adds one. None: default.
            chunk_size: Longer prompts are computed in chunks, cut at multiples of this.
            max_model_len: Maximum number of tokens of prompt and answer. None is the model's own. Lowered to what the cache
                holds.
            kv_cache_memory: Bytes for each rank's KV cache. None is, on a GPU, what gpu_memory_utilization leaves beside the
                weights, and on a CPU half of the free memory, at most 4 GiB. Never more than max_num_seqs sequences can use.
            gpu_memory_utilization: Share of the GPU's memory for weights and cache, in (0, 1]. No effect on a CPU.
            enable_prefix_caching: Compute common prefixes of prompts once. None is the default.
            batch_invariant: Require that a token's logits have the same bits wherever its sequence's tokens are computed: in
                any batch, as prompt or as answer, after a prefix hit and after a preemption. So `logprobs` of an answer equal
                `prompt_logprobs` of the same text. The attention then computes one query at a time. A prompt of 1,024 tokens
                takes 1.1 to 1.3 times as long, and 7 times and more without the C++ kernel (enforce_eager). Checked when the
                model is loaded, and refused where it cannot be kept. Without batch_invariant, `batch_independent` says
                whether the bits are the same in any batch, prefix hits and preemptions aside.
            attention_backend: "auto" (the best one that is installed and supports the model, which the log explains), "cpu",
                "flash", "triton", "torch" or "reference".
            enforce_eager: Capture no CUDA graphs. On a CPU, compute the attention in Python, without its C++ kernels.
            async_scheduling: Prepare a step while the one before it runs. The tokens are the same. None is True on a GPU only.
            speculative_config: Speculative decoding: guess tokens, and check several in one step. {"method": "ngram"} repeats
                earlier text. {"method": "draft_model", "model": name} asks a smaller model with the same vocabulary. More keys:
                nanoinfer.config.SpeculativeConfig. The tokens are those of plain decoding (see `batch_independent`).
            seed: For requests without their own seed, 0 .. 2**64 - 1. The same seed and the same calls give the same answers.
                None draws a seed from the operating system and logs it at level INFO.
            stages: The sampler's stages in their order. `[*STAGES, mine]`, from nanoinfer.sampling.sampler, adds your own.
            logprobs_mode: "raw" (or "raw_logprobs") returns the model's own log-probabilities, "processed" (or
                "processed_logprobs") those after all stages.
            tracer: Receives the engine's events, see nanoinfer.Recorder.

        Raises:
            InvalidValueError, InvalidTypeError: An argument out of its range, of the wrong type or unknown.
            UnsupportedError: A model or a setting that is not supported. vLLM's further arguments are accepted with the values
                that change nothing here, such as pipeline_parallel_size=1 (see config.NEUTRAL_VALUES).
            CheckpointNotFoundError, CheckpointError, WeightsError: Missing or damaged files. EngineDeadError: A rank has ended.
        """
        config = EngineConfig(
            model=None if model is None else _path_string("model", model),
            tokenizer=None if tokenizer is None else _path_string("tokenizer", tokenizer),
            revision=revision,
            dtype=str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype,
            quantization=quantization,
            lora=lora_adapters(lora),
            device=device,
            tensor_parallel_size=tensor_parallel_size,
            max_model_len=max_model_len,
            attention_backend=attention_backend,
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            speculative=SpeculativeConfig.of(speculative_config),
            seed=seed,
            stages=tuple(stages) if isinstance(stages, list) else cast(tuple[Stage, ...] | None, stages),
            logprobs_mode=logprobs_mode,
            tracer=tracer,
            cache=CacheConfig(
                block_size=block_size,
                kv_cache_memory=kv_cache_memory,
                gpu_memory_utilization=gpu_memory_utilization,
                enable_prefix_caching=_or_default(enable_prefix_caching, CacheConfig.enable_prefix_caching),
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=_or_default(max_num_seqs, SchedulerConfig.max_num_seqs),
                max_num_batched_tokens=_or_default(max_num_batched_tokens, SchedulerConfig.max_num_batched_tokens),
                chunk_size=chunk_size,
                batch_invariant=batch_invariant,
            ),
        )
        self.engine, checkpoint = load_engine(config)
        self._generation_config = checkpoint.generation_config
        self._has_logged_defaults = False
        self._name = config.model or checkpoint.path.name

    def __repr__(self) -> str:
        info = self.engine.executor.info
        return (
            f"LLM({self._name!r}, dtype={info.dtype!r}, device={info.device!r}, attention_backend={info.attention_backend!r}, "
            f"max_model_len={info.max_model_len}, seed={self.engine.seed})"
        )

    @check_argument_names("generate()", NEUTRAL_VALUES["generate()"])
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate answers to prompts, all in one batch, and return the outputs in the order of the prompts.

        A prompt that is too long for the engine gets finish_reason "error" and the reason in outputs[0].error. The others are
        answered.

        Args:
            prompts: A string, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
            sampling_params: One for all prompts, or one per prompt. None is get_default_sampling_params().
            use_tqdm: Show a progress bar.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: With the prompt's index. Nothing has run then.
        """
        check_flag("use_tqdm", use_tqdm)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        prepared = self.engine.inputs.prepare_all(prompts, params)
        requests: list[Request] = []
        try:
            with interrupt_deferred():
                for one in prepared:
                    requests.append(self.engine.submit(one))
            self._run(requests, use_tqdm)
        finally:  # after an error or Ctrl-C, nothing of this call remains
            self.engine.abort(*(request.request_id for request in requests))
        return [cast(RequestOutput, request.output) for request in requests]

    @check_argument_names("stream()")
    def stream(self, prompt: PromptType, sampling_params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Answer one prompt, and yield a Delta for every sampled token. The last one carries the whole RequestOutput.

        The joined texts are the output's text: yielded text is never taken back. With n > 1, Delta.index says to which answer a
        text belongs. Leaving the loop early aborts the request.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: When it is called, not at the first token.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._stream(self.engine.inputs.prepare(prompt, params))

    @check_argument_names("chat()", NEUTRAL_VALUES["chat()"])
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them, through the checkpoint's chat template.

        Args:
            messages: [{"role": "user", "content": "Hello"}, ...], or a list of such lists. content may also be a list of text
                parts, [{"type": "text", "text": "Hello"}, ...], which are joined by newlines as in vLLM, or None for no text.
            sampling_params: As for generate.
            use_tqdm: Show a progress bar.
            chat_template: A Jinja template instead of the checkpoint's.
            add_generation_prompt: End the rendered text with the beginning of an answer.
            chat_template_kwargs: Passed to the template, such as {"enable_thinking": False} for Qwen3.
            tools: Functions with type hints and a Google style docstring, or {"type": "function", "function": {"name": ...,
                "parameters": JSON schema}}. The answer is text, which nanoinfer.parse_chat_answer parses.
            tool_choice: "auto", "none" (the tools are left out), or "required" and {"type": "function", "function": {"name":
                ...}}: the answer is a call that satisfies the schema, in the format of Qwen3 (hermes). With "auto", this is so
                for each call if a tool has "strict": True. Both require nanoinfer[structured].

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: As generate does.
            UnsupportedError: The template has no place for tools.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        prompts, constrained = self.engine.inputs.render_chats(
            messages,
            params,
            tools=tools,
            tool_choice=tool_choice,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, constrained, use_tqdm)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> TokensPrompt:
        """Render one conversation as a prompt for generate() or stream(). The arguments are those of chat()."""
        return self.engine.inputs.render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )

    @check_argument_names("beam_search()", NEUTRAL_VALUES["beam_search()"])
    def beam_search(self, prompts: PromptType | Sequence[PromptType], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Find the most likely answers to each prompt, and return them with their scores, in the order of the prompts.

        The prompts run together as far as the KV cache allows. The beams of one prompt share their blocks.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: As generate does.
            NanoinferError: The beams of one prompt do not fit into the KV cache.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidTypeError(f"params must be BeamSearchParams, got {shown(params)}")
        search = BeamSearch(self.engine, prompts, params.clone())
        try:
            while search.num_unfinished:
                search.step()
        finally:
            search.close()
        return search.outputs

    @property
    def batch_independent(self) -> bool:
        """Whether a prompt's logits have the same bits in any batch on this machine. Measured when the model is loaded.

        If True, a seed gives the same tokens in any batch. Prefix hits and preemptions may still change the last bits, unless
        batch_invariant=True. Always False on a GPU, and while torch uses a different number of threads than at loading.
        """
        return self.engine.batch_independent

    def abort(self, request_id: str) -> None:
        """End a running request. Its stream ends with finish_reason "abort". Unknown and finished ids are ignored."""
        self.engine.abort(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, so that the next prompts are computed in full. Running requests keep their blocks.

        Returns:
            True, as in vLLM after a reset. (vLLM returns False while requests run. Here a reset is possible then, too.)
        """
        self.engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics under vLLM's names. Beam search counts only in the use of the KV cache."""
        return self.engine.get_metrics()

    def get_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return transformers' tokenizer of this model.

        Raises:
            InvalidValueError: The checkpoint has none.
        """
        if self.engine.tokenizer is None:
            raise InvalidValueError("this checkpoint has no tokenizer; pass LLM(tokenizer=...)")
        return self.engine.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what generate() uses without params: the checkpoint's generation_config.json over SamplingParams()."""
        names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        names["max_new_tokens"] = "max_tokens"
        given: dict[str, Any] = {ours: self._generation_config.get(theirs) for theirs, ours in names.items()}
        given = {name: value for name, value in given.items() if value is not None}
        try:
            params = SamplingParams(**given, detokenize=self.engine.tokenizer is not None)
        except NanoinferError as error:
            raise type(error)(f"in the checkpoint's generation_config.json: {error}; or pass SamplingParams(...)") from error
        if given and not self._has_logged_defaults:
            defaults = ", ".join(f"{name}={value}" for name, value in given.items())
            logger.info("sampling defaults from the checkpoint's generation_config.json: %s", defaults)
            self._has_logged_defaults = True
        return params

    # ---- running

    def _stream(self, prepared: PreparedRequest) -> Generator[Delta, None, None]:
        requests: list[Request] = []
        try:
            with interrupt_deferred():
                request = self.engine.submit(prepared, streaming=True)
                requests.append(request)
            while request.output is None or request.deltas:
                if not request.deltas:
                    self.engine.step()
                while request.deltas:
                    yield request.deltas.popleft()
        finally:
            self.engine.abort(*(request.request_id for request in requests))

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Step until all of these have ended. Requests of open streams advance as well."""
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
                    sequences = [seq for request in requests for seq in request.sequences]
                    num_input = sum(len(seq.prompt_token_ids) for seq in sequences if seq.num_output_tokens and seq.index == 0)
                    num_output = sum(seq.num_output_tokens for seq in sequences)
                    seconds = now - start
                    speed = f"input {num_input / seconds:.1f} tok/s, output {num_output / seconds:.1f} tok/s"
                    bar.set_postfix_str(speed, refresh=num_pending == len(pending))
                bar.update(num_pending - len(pending))


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value


def _path_string(name: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise InvalidTypeError(f"{name} must be a string or a path, got {shown(value)}")
    return os.fspath(value)
