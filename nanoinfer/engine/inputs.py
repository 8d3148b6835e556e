"""Turn prompts, as users write them, into checked requests.

In: strings, token ids, vLLM's dicts, with SamplingParams. Out: PreparedRequests. A prompt is parsed, rendered,
tokenised and checked once, before it reaches the engine. InputProcessor knows the model's sizes and the tokenizer, but neither
the queue nor the cache, so any thread may call it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Protocol

import nanoinfer
from nanoinfer.config import READ_IF, EngineConfig
from nanoinfer.errors import InvalidPromptError, InvalidTypeError, InvalidValueError, NanoinferError, check_integer, shown
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.sampling_params import PARAMETERS_OF_FEATURES, SamplingParams
from nanoinfer.scheduling.sequence import Constraint
from nanoinfer.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_NOTHING = SamplingParams()


@dataclass(frozen=True, slots=True)
class TooLong:
    """A prompt that does not fit into the model's context."""

    message: str  # what is wrong, and a hint
    num_tokens: int  # of the prompt, or of its beginning if Tokenizer.encode encoded no more of it
    max_tokens: int  # the model's context length


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that the engine accepts."""

    prompt: str | None  # its text. None: only token ids were given
    prompt_token_ids: list[int]
    params: SamplingParams
    error: TooLong | None = None  # why the request ends at once, with finish_reason "error". None: the prompt fits
    priority: int = 0  # for schedulers that read priorities. Lower runs first
    constraints: tuple[Constraint, ...] = ()  # what limits the tokens of each answer, at the answer's beginning
    compile: Callable[[], Constraint] | None = None  # makes a further constraint, which may take seconds
    check: Callable[[], None] = lambda: None  # raises InvalidValueError if `compile` was too expensive lately
    cache_salt: str | None = None  # only requests with the same salt share cached prefixes
    reader: Any = None  # reads the prompt's hidden rows
    is_answered: bool = True  # False: the prompt is read instead of answered (features/logprobs/reading.py)
    eos_token_ids: frozenset[int] = frozenset()  # besides the engine's
    extras: Mapping[str, object] = field(default_factory=dict)  # what features give its sequences, by name


class RequestFeature(Protocol):
    """What a feature (features/) makes of each request. build.py lists those of an engine, in their order."""

    limits: Mapping[str, int] = {}  # for the scheduler, which explains them

    def prepare(self, prepared: PreparedRequest, options: dict[str, object]) -> PreparedRequest:
        """Check the parameters and the options that the feature reads, and return the request with what it adds to it.

        options: the feature takes out what it reads. An option that no feature takes out is refused.
        Raises: InvalidValueError, InvalidTypeError, UnsupportedError.
        """


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
        self._info, self.vocab_size, self.max_model_len = info, info.vocab_size, info.max_model_len
        self._config, self.tokenizer, self.features = config, tokenizer, features
        self._accepts_priority, self._warnings = accepts_priority, set[str]()

    def prepare(self, prompt: object, params: SamplingParams, **options: object) -> PreparedRequest:
        """Parse, tokenise and check one prompt, and compile what it needs. Raises: the errors of prepare_prompt and compile."""
        return self.compile(self.prepare_prompt(prompt, params, **options))

    def prepare_prompt(self, prompt: object, params: SamplingParams, **options: object) -> PreparedRequest:
        """Parse, tokenise and check one prompt. A prompt that is too long is not refused: PreparedRequest.error says so.

        Raises: InvalidPromptError, InvalidTypeError, InvalidValueError, and the errors of the features.
        """
        text, token_ids = self._parse(prompt)
        check_params(params)
        priority: Any = options.pop("priority", None)
        check_integer("priority", priority, -(2**63), None, ">= -2**63", or_none=True)
        if priority and not self._accepts_priority:
            raise unread("priority", priority)
        params = params.clone()  # the caller may change its own object while the request runs
        self._check(token_ids, params)
        error, num_left = None, self.max_model_len - len(token_ids)
        if num_left < 1:
            error = self._too_long(len(token_ids), text)
        elif (params.max_tokens or 0) > num_left:
            self._warn_once(
                "max_tokens=%d is more than the %d tokens that max_model_len=%d leaves after the prompt; the answer ends there",
                *(params.max_tokens, num_left, self.max_model_len),
            )
        given = prompt if isinstance(prompt, dict) else {}
        salt = f"/{given['cache_salt']}" if given.get("cache_salt") else None  # the user's salt
        # render_chat gives the tokenizer's EOS, for which the model may lack a row.
        given_ends = _token_ids(given.get("eos_token_ids", []), "eos_token_ids of a prompt")
        ends = frozenset(i for i in given_ends if 0 <= i < self._info.vocab_size)
        prepared = PreparedRequest(text, token_ids, params, error, int(priority or 0), cache_salt=salt, eos_token_ids=ends)
        for feature in self.features:
            prepared = feature.prepare(prepared, options)
        for name, option in options.items():
            if option is not None:
                raise unread(name, option)
        for name in () if self.features else PARAMETERS_OF_FEATURES:
            if (value := getattr(params, name)) != getattr(_NOTHING, name):
                raise unread(name, value)
        return prepared

    def compile(self, prepared: PreparedRequest) -> PreparedRequest:
        """Add the constraint that must be compiled, if there is one, once. Raises: the errors of its compiler."""
        if prepared.compile is None:
            return prepared
        return replace(prepared, constraints=(*prepared.constraints, prepared.compile()), compile=None)

    def prepare_all(
        self, prompts: object, params: SamplingParams | Sequence[SamplingParams], **options: object
    ) -> list[PreparedRequest]:
        """Prepare one prompt or a list of them, with the same SamplingParams for all or a list with each prompt's.

        options: what a request is given besides, for all or a list with a value per prompt. Errors name the prompt's index.
        """
        prompts, prepared = as_list(prompts), []
        of_each = [one_per_prompt(given, len(prompts), name, object) for name, given in options.items()]
        each = zip(prompts, one_per_prompt(params, len(prompts)), *of_each, strict=True)
        for index, (prompt, its_params, *its_options) in enumerate(each):
            with with_prompt_index(index):
                prepared.append(self.prepare(prompt, its_params, **dict(zip(options, its_options, strict=True))))
        return prepared

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
            if len(ids) > 1 and ids[0] == ids[1] and ids[:1] == self.tokenizer.encode("")[:1]:
                text = (
                    "a prompt begins with %s twice, since the tokenizer adds it to a text that has it; call chat(), or give ids"
                )
                self._warn_once(text, self.tokenizer.token_text(ids[0]))
            return prompt, ids
        return None, _token_ids(prompt)

    def _warn_once(self, text: str, *args: object) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            logger.warning(text, *args)

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        """Refuse what this model cannot serve."""
        if not token_ids:
            raise InvalidPromptError("the prompt has no tokens; give at least one, such as the model's BOS")
        vocab_size = self.vocab_size
        check_ids("the prompt", token_ids, vocab_size, InvalidPromptError)
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", tuple(params.logit_bias or ())),
            ("logprob_token_ids", params.logprob_token_ids or ()),
        ):
            check_ids(name, ids, vocab_size)
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
        if params.detokenize and self.tokenizer is None:
            raise InvalidValueError(
                "no tokenizer is loaded, so there can be no text; set detokenize=False, or load the model with a tokenizer"
            )

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
    return InvalidValueError(f"{name}={shown(given)} {READ_IF.get(name, 'is read by nothing; leave it out')}")


def check_ids(name: str, ids: Sequence[int], vocab_size: int, error: type[NanoinferError] = InvalidValueError) -> None:
    """Refuse ids that the model lacks. name: what has the ids. Raises: error."""
    # min and max run in C. A loop over a prompt of 100,000 ids would be noticeable.
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise error(f"{name} has the token id {shown(bad)}; this model's ids are 0 .. {vocab_size - 1}")


def check_params(params: object) -> None:
    """Check the type of one prompt's parameters. Raises: InvalidTypeError."""
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
