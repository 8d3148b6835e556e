"""Turn prompts and chat messages, as users write them, into checked requests.

In: strings, token ids, vLLM's dicts, chat messages, with SamplingParams. Out: PreparedRequests. A prompt is parsed, rendered,
tokenised and checked once, before it reaches the engine. InputProcessor knows the model's sizes and the tokenizer, but neither
the queue nor the cache, so any thread may call it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

import nanoinfer
from nanoinfer.config import EngineConfig
from nanoinfer.engine.prompts import ChatPrompt, TokensPrompt
from nanoinfer.errors import InvalidPromptError, InvalidTypeError, InvalidValueError, NanoinferError, check_integer, shown
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanoinfer.chat.tools import Tool, ToolChoice
    from nanoinfer.features.reasoning.thinking import ReasoningState
    from nanoinfer.features.structured.grammar import GrammarCompiler, GrammarState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TooLong:
    """A prompt that does not fit into the model's context.

    message: what is wrong, and a hint.
    num_tokens: the tokens of the prompt, or of its beginning if Tokenizer.encode encoded no more of it.
    max_tokens: the model's context length.
    """

    message: str
    num_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the engine accepts.

    prompt: the text of the prompt. None: only token ids were given.
    grammar: params.structured_outputs, compiled and at its start. None: the answer is free.
    reasoning: params.thinking_token_budget with the tokenizer's tags, at the answer's beginning. None: reasoning has no limit.
    error: if given, the prompt is too long, and the request ends at once with finish_reason "error". None: it fits.
    priority: the rank for schedulers that read priorities. Lower runs first.
    cache_salt: separates cached prefixes, which only requests with the same salt share.
    reader: reads the prompt's hidden rows. None: nothing reads the rows.
    is_answered: False if the prompt is read instead of answered (reading.py).
    eos_token_ids: EOS ids of this request besides the engine's.
    extras: what features give the request's sequences, by name (Sequence.extras).
    """

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    error: TooLong | None = None
    priority: int = 0
    grammar: "GrammarState | None" = None
    reasoning: "ReasoningState | None" = None
    cache_salt: str | None = None
    reader: Any = None
    is_answered: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    extras: Mapping[str, object] = field(default_factory=dict)


class RequestOptions(TypedDict, total=False):
    """What generate() and its like are given for a request besides its prompt and its parameters."""

    priority: int | None
    lora_request: object  # a LoRARequest (features/adapters)


class RequestFeature(Protocol):
    """What a feature (features/) makes of each request. engine/build.py lists those of an engine, in their order."""

    limits: Mapping[str, int] = {}  # for the scheduler, which explains them

    def prepare(self, prepared: PreparedRequest, options: RequestOptions) -> PreparedRequest:
        """Check the parameters and the options that the feature reads, and return the request with what it adds to it.

        options: the feature takes out what it reads. An option that no feature takes out is refused.
        Raises: InvalidValueError, InvalidTypeError, UnsupportedError.
        """

    def compile(self, prepared: PreparedRequest) -> PreparedRequest:
        """Add what may take seconds. An asynchronous caller runs it in a thread of its own."""
        return prepared


class InputProcessor:
    """Prepares the requests of one engine."""

    def __init__(
        self,
        info: ExecutorInfo,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        accepts_priority: bool = False,
        features: Sequence[RequestFeature] = (),
    ) -> None:
        self._info = info
        self.max_model_len = info.max_model_len
        self.tokenizer = tokenizer
        self._config = config
        self._accepts_priority = accepts_priority
        self.features = features
        self._has_warned = False

    def prepare(self, prompt: object, params: SamplingParams, **options: Unpack[RequestOptions]) -> PreparedRequest:
        """Parse, tokenise and check one prompt, and compile its grammar. Raises: the errors of the two methods below."""
        return self.compile_grammar(self.prepare_prompt(prompt, params, **options))

    def prepare_prompt(self, prompt: object, params: SamplingParams, **options: Unpack[RequestOptions]) -> PreparedRequest:
        """Parse, tokenise and check one prompt. A prompt that is too long is not refused: PreparedRequest.error says so.

        Raises: InvalidPromptError, InvalidTypeError, InvalidValueError, and the errors of the features.
        """
        text, token_ids = self._parse(prompt)
        _check_type(params)
        priority = options.pop("priority", None)
        check_integer("priority", priority, -(2**63), None, ">= -2**63", or_none=True)
        if priority and not self._accepts_priority:
            raise unread("priority", priority)
        params = params.clone()  # the caller may change its own object while the request runs
        bad_words = self._check(token_ids, params)
        error = self._too_long(len(token_ids), text) if len(token_ids) >= self.max_model_len else None
        reasoning = self._reasoning(token_ids, params)
        given = prompt if isinstance(prompt, dict) else {}
        salt = f"/{given['cache_salt']}" if given.get("cache_salt") else None  # the user's salt
        # render_chat gives the tokenizer's EOS, for which the model may lack a row.
        given_ends = _token_ids(given.get("eos_token_ids", []), "eos_token_ids of a prompt")
        ends = frozenset(i for i in given_ends if 0 <= i < self._info.vocab_size)
        prepared = PreparedRequest(
            text, token_ids, params, bad_words, error, int(priority or 0), reasoning=reasoning, cache_salt=salt,
            eos_token_ids=ends,
        )  # fmt: skip
        for feature in self.features:
            prepared = feature.prepare(prepared, options)
        for name, option in options.items():
            if option is not None:
                raise unread(name, option)
        return prepared

    def compile_grammar(self, prepared: PreparedRequest) -> PreparedRequest:
        """Compile the grammar, if the request asks for it. A new grammar may wait for seconds until others are compiled.

        Raises: InvalidValueError, UnsupportedError, QueueFullError.
        """
        for feature in self.features:
            prepared = feature.compile(prepared)
        params = prepared.params.structured_outputs
        return prepared if params is None else replace(prepared, grammar=self._grammars.compile(params))

    def check_grammar(self, params: SamplingParams) -> None:
        """Check that no answer has reached a limit of this grammar lately. Raises: InvalidValueError."""
        if params.structured_outputs is not None:
            self._grammars.check(params.structured_outputs)

    @cached_property
    def _grammars(self) -> "GrammarCompiler":
        from nanoinfer.features.structured.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self._info.vocab_size)

    def prepare_all(
        self, prompts: object, params: SamplingParams | Sequence[SamplingParams], **options: object
    ) -> list[PreparedRequest]:
        """Prepare one prompt or a list of them, with the same SamplingParams for all or a list with each prompt's.

        options: RequestOptions, a value for all or a list with a value per prompt. Errors name the prompt's index.
        """
        prompts, prepared = as_list(prompts), []
        of_each = [one_per_prompt(given, len(prompts), name, object) for name, given in options.items()]
        each = zip(prompts, one_per_prompt(params, len(prompts)), *of_each, strict=True)
        for index, (prompt, its_params, *its_options) in enumerate(each):
            with with_prompt_index(index):
                prepared.append(self.prepare(prompt, its_params, **dict(zip(options, its_options, strict=True))))
        return prepared

    def render_chat(self, messages: object, **rendering: Any) -> ChatPrompt:
        """Render one conversation as a prompt. `rendering` holds keyword arguments of chat.messages.render_chat."""
        from nanoinfer.chat.messages import render_chat

        return render_chat(self.tokenizer, messages, **{"max_tokens": self.max_model_len} | rendering)

    def render_chats(
        self,
        messages: Any,
        params: SamplingParams | Sequence[SamplingParams],
        *,
        tools: "Sequence[Tool] | None" = None,
        tool_choice: "ToolChoice" = "auto",
        **rendering: Any,
    ) -> tuple[list[ChatPrompt], list[SamplingParams]]:
        """Render one conversation or a list of them, and constrain the parameters of each to the tool calls that are required.

        A structured output follows the reasoning that the prompt has begun, or that a thinking_token_budget allows. For gpt-oss
        the prompt begins the final message. A grammar of the user's own constrains the whole answer.

        Raises: the errors of render_chat and constrain_calls, with the conversation's index.
        """
        from nanoinfer.chat.harmony import FINAL, begun_message
        from nanoinfer.chat.messages import constrain_calls
        from nanoinfer.chat.parsing import END_THINK, THINK, opens_thinking
        from nanoinfer.chat.tools import after_thinking, requires_call, tool_schemas

        is_batch = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
        chats = messages if is_batch else [messages]
        schemas, must_call = tool_schemas(tools or []), requires_call(tool_choice)
        prompts, constrained = [], []
        for index, (chat, given) in enumerate(zip(chats, one_per_prompt(params, len(chats)), strict=True)):
            with with_prompt_index(index):
                _check_type(given)
                arguments = {"tools": None if tool_choice == "none" else schemas, **rendering}
                prompt = self.render_chat(chat, **arguments)
                form = given.structured_outputs
                if must_call or (form is not None and form.grammar is not None):
                    form = None
                if form is not None and (begun := begun_message(prompt["prompt"] or "")) and not begun[1]:
                    prompt = self.render_chat(chat, **arguments, answer_begin=FINAL)
                prompts.append(prompt)
                text = prompt["prompt"] or ""
                assert self.tokenizer is not None, "it has rendered the prompt"
                template = self.tokenizer.get_chat_template(rendering.get("chat_template"), has_tools=bool(schemas))
                has_begun = opens_thinking(text)
                thinks = has_begun or THINK in template or END_THINK in template
                limited = self.limit_thinking(given, prompt) if thinks and (must_call or (has_begun and form)) else given
                if form is not None and (has_begun or (thinks and limited.thinking_token_budget is not None)):
                    limited = replace(limited, structured_outputs=after_thinking(form, text))
                constrained.append(constrain_calls(limited, text, schemas, tool_choice, self.tokenizer, thinks=thinks))
        return prompts, constrained

    def _parse(self, prompt: object) -> tuple[str | None, list[int]]:
        """Return the text or None, and the token ids. If a dict holds both, the ids are used and the text is only shown."""
        if isinstance(prompt, dict):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            others = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt", "eos_token_ids"}
            unknown = [name for name in others if nanoinfer.argument_of_vllm("a prompt", name, prompt[name]) is None]
            if unknown or not isinstance(text, str | None) or (text is None and token_ids is None):
                raise InvalidPromptError(
                    f"a prompt's dict holds prompt (a string) or prompt_token_ids (ids), got {shown(prompt)}"
                )
            if (salt := prompt.get("cache_salt")) is not None and not (isinstance(salt, str) and salt):
                raise InvalidPromptError(f"cache_salt must be a non-empty string, got {shown(salt)}; leave it out")
            return (text, _token_ids(token_ids)) if token_ids is not None else self._parse(text)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidPromptError("no tokenizer is loaded; give token ids, or load the model with a tokenizer")
            ids = self.tokenizer.encode(prompt, max_tokens=self.max_model_len)
            if len(ids) > 1 and not self._has_warned and ids[:1] == ids[1:2] == self.tokenizer.encode("")[:1]:
                self._has_warned = True
                text = (
                    "a prompt begins with %s twice, since the tokenizer adds it to a text that has it; call chat(), or give ids"
                )
                logger.warning(text, self.tokenizer.token_text(ids[0]))
            return prompt, ids
        return None, _token_ids(prompt)

    def _check(self, token_ids: list[int], params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Refuse what this model cannot serve. Returns params.bad_words as token ids."""
        if not token_ids:
            raise InvalidPromptError("the prompt has no tokens; give at least one, such as the model's BOS")
        vocab_size = self._info.vocab_size
        for name, ids in (
            ("the prompt", token_ids),
            ("stop_token_ids", params.stop_token_ids or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", tuple(params.logit_bias or ())),
            ("logprob_token_ids", params.logprob_token_ids or ()),
            *(("bad_words", word) for word in params.bad_words or () if not isinstance(word, str)),
        ):
            # min and max run in C. A loop over a prompt of 100,000 ids would be noticeable.
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                bad = next(i for i in ids if not 0 <= i < vocab_size)
                error = f"{name} has the token id {shown(bad)}; this model's ids are 0 .. {vocab_size - 1}"
                raise InvalidPromptError(error) if ids is token_ids else InvalidValueError(error)
        if (params.logprobs or 0) > vocab_size:
            raise InvalidValueError(
                f"logprobs must be at most the vocabulary's {vocab_size}, got {params.logprobs}; use -1 for all"
            )
        if params.extra_args and not self._config.logits_processors and self._config.stages is None:
            raise InvalidValueError(
                f"nothing reads extra_args={shown(params.extra_args)}; leave it out, or load the model with logits_processors "
                "or stages"
            )
        for processor in self._config.logits_processors:
            try:
                getattr(processor, "validate_params", lambda params: None)(params)
            except ValueError as error:
                raise InvalidValueError(f"{processor.__name__} refuses the parameters: {error}") from error
        bad_words = self._bad_word_ids(params)
        if params.detokenize and self.tokenizer is None:
            raise InvalidValueError(
                "no tokenizer is loaded, so there can be no text; set detokenize=False, or load the model with a tokenizer"
            )
        return bad_words

    def _reasoning(self, token_ids: list[int], params: SamplingParams) -> "ReasoningState | None":
        """Return the reasoning of the answer to a prompt. Raises: InvalidValueError if no token can end it."""
        budget, form = params.thinking_token_budget, params.structured_outputs
        if budget is None:
            return None
        from nanoinfer.chat.parsing import END_THINK, THINK, closes_thinking, opens_thinking
        from nanoinfer.features.reasoning.thinking import ReasoningState

        if self.tokenizer is None or self.end_of_reasoning is None:
            raise InvalidValueError(
                f"thinking_token_budget={budget} needs a tokenizer with the token {END_THINK}, which this model lacks; "
                "leave it out, and limit max_tokens, or set reasoning_effort to 'low' for gpt-oss, which thinks in a channel"
            )
        end = self.tokenizer.decode(token_ids[-16:], skip_special_tokens=False)  # whitespace may follow the tag
        return ReasoningState(
            THINK.encode(),
            END_THINK.encode(),
            self.end_of_reasoning,
            budget,
            begin=0 if opens_thinking(end) else None,
            is_over=closes_thinking(end) or (form is not None and form.kind != "grammar"),  # only a grammar may have reasoning
        )

    @cached_property
    def end_of_reasoning(self) -> int | None:
        """The token that ends reasoning, which thinking_token_budget needs. None: the model has none."""
        from nanoinfer.chat.parsing import END_THINK

        token_id = None if self.tokenizer is None else self.tokenizer.backend.token_to_id(END_THINK)
        return token_id if token_id is not None and token_id < self._info.vocab_size else None

    def limit_thinking(self, params: SamplingParams, prompt: TokensPrompt, share: float = 0.25) -> SamplingParams:
        """Return params with a share of the answer's tokens as thinking_token_budget, if they have none and it can be held.

        So reasoning leaves room for the call or the format that an answer must have.
        """
        if params.thinking_token_budget is not None or self.end_of_reasoning is None:
            return params
        num_tokens = params.max_tokens or self.max_model_len - len(prompt["prompt_token_ids"])
        return replace(params, thinking_token_budget=int(max(num_tokens, 0) * share))

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each bad word. A word with an id that the model lacks can never be generated, and is left out."""
        words: list[tuple[int, ...]] = []
        for word in params.bad_words or ():
            if isinstance(word, str):
                if self.tokenizer is None:
                    raise InvalidValueError(f"bad_words has {word!r}, but there is no tokenizer; give lists of token ids")
                words += self.tokenizer.spellings(word)
            else:
                words.append(tuple(word))
        return tuple(ids for ids in words if max(ids) < self._info.vocab_size)

    def _too_long(self, num_prompt_tokens: int, text: str | None) -> TooLong:
        # Client libraries recognise the first words, which are OpenAI's, and then shorten the conversation.
        message = f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt has "
        # Tokenizer.encode may have encoded only the beginning of a long text.
        at_least = "at least " if text is not None and num_prompt_tokens > 2 * self.max_model_len else ""
        message += f"{at_least}{num_prompt_tokens} tokens, and the answer needs at least one; shorten the prompt"
        if self.max_model_len < self._info.max_position_embeddings:
            message += (
                f", or load the model with max_model_len up to {self._info.max_position_embeddings} and more kv_cache_memory"
            )
        return TooLong(message, num_prompt_tokens, self.max_model_len)


def as_list(prompts: object) -> list[Any]:
    """Return one prompt, or a list of prompts, as a list. A list of plain ints is one prompt.

    >>> as_list("Hello"), as_list([5, 6]), as_list(["Hello", [5, 6]])
    (['Hello'], [[5, 6]], ['Hello', [5, 6]])
    """
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InvalidTypeError(f"prompts must be a string, token ids, a dict or a list of these, got {shown(prompts)}")
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [prompts]
    return list(prompts)


def one_per_prompt(
    given: object, num_prompts: int, name: str = "sampling_params", kind: type = SamplingParams
) -> Sequence[Any]:
    """Return the value of each prompt, given one of this kind for all prompts, or a list."""
    if not isinstance(given, list | tuple):
        if not isinstance(given, kind):
            raise InvalidTypeError(f"{name} must be {kind.__name__}, or a list of them, got {shown(given)}")
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidValueError(f"{name} must be one, or one per prompt: got {len(given)} for {num_prompts} prompts")
    return given


def unread(name: str, given: object) -> InvalidValueError:
    """Return the error of an option that no feature of the engine reads."""
    way_out = {
        "lora_request": "needs a model loaded with enable_lora=True",
        "priority": "has no effect with this scheduler; leave it out, or load the model with scheduling_policy='priority'",
    }
    return InvalidValueError(f"{name}={shown(given)} {way_out.get(name, 'is read by nothing; leave it out')}")


def _check_type(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidTypeError(f"sampling_params must be SamplingParams, got {shown(params)}")


@contextmanager
def with_prompt_index(index: int) -> Iterator[None]:
    """Put the prompt's index before the message of an error raised inside."""
    try:
        yield
    except NanoinferError as error:
        raise type(error)(f"prompt {index}: {error}") from error


def _token_ids(ids: object, name: str = "") -> list[int]:
    """Return a new list of plain ints. numpy's integers are accepted. name: what has the ids, for the error. "": a prompt."""
    if isinstance(ids, list | tuple):
        if all(type(i) is int for i in ids):
            return list(ids)
        if all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
            return [int(i) for i in ids]
    if name:
        raise InvalidTypeError(f"{name} must be a list of token ids, got {shown(ids)}; leave it out")
    raise InvalidTypeError(
        f"a prompt must be a string, a list of token ids (of an array, its .tolist()), or a dict with prompt or "
        f"prompt_token_ids, got {shown(ids)}"
    )
