"""What one request may specify: values checked when they are made or assigned, before any work is done.

In: keyword arguments with vLLM's names. Out: a SamplingParams or BeamSearchParams that every later stage can trust, so that no
later stage checks it again. Both know nothing of any model: what needs the vocabulary (lists of token ids) is checked where a
request enters the engine. The engine keeps a copy, so an assignment never changes a request that has been submitted.
"""

import copy
import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Self

from nanoinfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_flag,
    check_integer,
    check_number,
    is_one_of,
    out_of_range,
    shown,
)
from nanoinfer.structured.parameters import StructuredOutputsParams as StructuredOutputsParams
from nanoinfer.vllm_compat import named_arguments

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = object  # typing.get_type_hints needs a value, and this file imports no torch

# (prompt ids, output ids, logits [vocab]) -> logits [vocab], or vLLM's form without the prompt ids
LogitsProcessor = Callable[[list[int], list[int], Tensor], Tensor] | Callable[[list[int], Tensor], Tensor]

_FORMS = "(prompt_ids, output_ids, logits) -> logits or (output_ids, logits) -> logits"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

MAX_ANSWERS = 16384  # of one request, as in vLLM

GuidedDecodingParams = StructuredOutputsParams  # its earlier name in vLLM


class RequestOutputKind(StrEnum):
    """What the outputs of a request hold while it runs: everything so far, only what is new, or nothing before the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass
class _CheckedParams:
    """Parameters that stay valid: an assignment is checked as the constructor checks its arguments."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ or name not in self.__dataclass_fields__:  # else the constructor sets it
            checked = replace(self, **{name: value})
            self.__dict__.update(checked.__dict__)
        else:
            object.__setattr__(self, name, value)

    def clone(self) -> Self:
        """Return a copy."""
        return copy.copy(self)


@named_arguments
@dataclass(kw_only=True)
class SamplingParams(_CheckedParams):
    """How to choose each next token of one prompt, and when to stop.

    The parameters that change the logits apply in this order: allowed_token_ids, structured_outputs, bad_words, min_tokens,
    logit_bias, repetition_penalty, frequency_penalty, presence_penalty, no_repeat_ngram_size, logits_processors, temperature,
    min_p, top_k, top_p. Greedy rows skip the last four.

    A parameter may be assigned later, `params.max_tokens = 20`, and is checked then. Requests that were submitted before keep
    the old value. vLLM's further parameters, such as flat_logprobs, are accepted with the value that changes nothing.

    Args:
        temperature: Divides the logits. Finite and >= 0. 0 is greedy: the largest logit, ties to the lowest id.
        top_k: Keep the k largest logits. Ties with the k-th stay. >= 1, or 0 or -1 to turn it off.
        top_p: Keep the smallest set whose probabilities reach top_p. The token that crosses it stays. In (0, 1]. 1 is off.
        min_p: Drop tokens less probable than min_p times the most probable one. In [0, 1]. 0 is off.
        seed: The same seed and the same logits give the same tokens, in any batch. 0 .. 2**64 - 1. None or -1 draws one.
        max_tokens: Maximum length of the output in tokens. >= 1. None is up to the model's length.
        min_tokens: EOS and stop_token_ids cannot be drawn before the output has this many tokens. A stop string must complete
            in the text after them. >= 0.
        stop: A string or several. The text ends before the one that completes first, or after it with
            include_stop_str_in_output. A string that is a special token is found by its id too, since skip_special_tokens
            leaves its text out. A special token with other text around it is found only with skip_special_tokens=False.
        stop_token_ids: Ids that end the output as EOS does. The id stays in token_ids. Its text is dropped, except with
            include_stop_str_in_output.
        include_stop_str_in_output: Keep the stop string, or the text of the stop id, in the text. A stop string that completes
            in the text of a stop id or of EOS cuts that text, and is the stop_reason.
        ignore_eos: EOS does not stop. stop and stop_token_ids still do.
        skip_special_tokens: Leave special tokens out of the text.
        detokenize: False returns token ids only, without text.
        n: Number of answers to the prompt. The i-th is drawn with seed + i. 1 .. 16384.
        repetition_penalty: Logits of ids in prompt or output are divided by it if positive, else multiplied. > 0. 1 is off.
        presence_penalty: Subtracted once for every id that is in the output. -2 .. 2. 0 is off.
        frequency_penalty: Subtracted once for each time an id is in the output. -2 .. 2. 0 is off.
        no_repeat_ngram_size: No run of this many tokens occurs twice in prompt + output. >= 1. 0 is off.
        logit_bias: {token id: -100 .. 100}, added to the logits.
        allowed_token_ids: Only these ids can be drawn. At least one.
        bad_words: Strings, or lists of token ids, that cannot occur in the output. The last token is masked when the output
            ends with the tokens before it. A string applies in every form in which the tokenizer writes it at a word boundary:
            at the start of a text, after a space and after a line break. A list of ids applies as it is.
        logprobs: Report the log-probabilities of the k most likely ids and of the drawn one, for each output token. k >= 0.
            -1 is all ids. None is off.
        prompt_logprobs: The same for the tokens of the prompt.
        return_sampling_mask: Report for each output token which ids could be drawn: those that every stage has left, from
            allowed_token_ids to top_p. A trainer renormalises over them. All stages then run, one after the other.
        logits_processors: Your own functions (prompt_ids, output_ids, logits [vocab]) -> logits [vocab], called in order. Those
            that require two arguments are called with (output_ids, logits [vocab]).
        timeout: Seconds after which the request ends with finish_reason "timeout", whether it waits or runs. Its text so far
            stays. Counted from its arrival in the engine. > 0. None is no limit.
        extra_args: A dict for LLM(logits_processors=...) and stages of your own, which decide what it means.
        structured_outputs: The form that the answer must have. EOS and stop_token_ids cannot be drawn before the answer has it.
            When no token can follow, EOS comes next, also before min_tokens, or the answer ends there if there is no EOS. It
            may still be cut by max_tokens and stop.
        output_kind: What each output of AsyncLLM.generate and LLMEngine.step holds. "cumulative": everything so far. "delta":
            what is new. "final_only": there is one output, the finished one, as LLM always returns.

    Raises:
        InvalidValueError: A value out of its range, or two that contradict each other.
        InvalidTypeError: A value of the wrong type, or an argument that does not exist.

    >>> SamplingParams(temperature=0.0, max_tokens=3).is_greedy
    True
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    nanoinfer.errors.InvalidValueError: top_p must be in (0, 1], got 1.5; use 1.0 to turn it off
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None  # kept as a tuple of strings
    stop_token_ids: Sequence[int] | None = None  # kept as a tuple of ids
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None  # kept as a copy
    allowed_token_ids: Sequence[int] | None = None  # kept as a tuple of ids
    bad_words: Sequence[str | Sequence[int]] | None = None  # kept as a tuple of strings and tuples of ids
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_sampling_mask: bool = False
    logits_processors: Sequence[LogitsProcessor] | None = None  # kept as a tuple
    timeout: float | None = None
    extra_args: Mapping[str, object] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind | Literal["cumulative", "delta", "final_only"] = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, math.inf, "finite and >= 0; 0 is greedy")
        check_number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]; use 1.0 to turn it off")
        check_number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]; use 0 to turn it off")
        check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "finite and > 0; use 1.0 to turn it off")
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "in [-2, 2]; use 0 to turn it off")
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "in [-2, 2]; use 0 to turn it off")
        check_integer("top_k", self.top_k, -1, None, ">= 1, or 0 or -1 to turn it off")
        check_integer("min_tokens", self.min_tokens, 0, None, ">= 0")
        check_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, None, ">= 1, or 0 to turn it off")
        check_integer("n", self.n, 1, MAX_ANSWERS, f"in 1 .. {MAX_ANSWERS}")
        for name in ("logprobs", "prompt_logprobs"):
            check_integer(name, getattr(self, name), -1, None, ">= 0, -1 for all, or None to turn it off", or_none=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "return_sampling_mask"):
            check_flag(name, getattr(self, name))
        if self.top_p == 0:  # the range is open at 0
            raise out_of_range("top_p", self.top_p, "in (0, 1]; use temperature=0 for greedy, 1.0 to turn it off")
        if self.repetition_penalty == 0:
            raise out_of_range("repetition_penalty", self.repetition_penalty, "finite and > 0; use 1.0 to turn it off")
        if self.n > 1 and self.temperature == 0:
            raise InvalidValueError(
                f"n must be 1 at temperature 0, got {self.n}: all answers would be the same; raise temperature"
            )
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, None, ">= 1, or None for the model's length")
            if self.min_tokens > self.max_tokens:
                raise InvalidValueError(
                    f"min_tokens must not pass max_tokens, got min_tokens={self.min_tokens} and "
                    f"max_tokens={self.max_tokens}; raise max_tokens or lower min_tokens"
                )
        if self.seed is not None:
            check_integer("seed", self.seed, -1, 2**64 - 1, "in 0 .. 2**64 - 1, or None or -1 to draw one")
        # Normalise once: plain numbers instead of numpy's, None and 0 for their different spellings, tuples. (An assignment
        # with `=` would be checked again.)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in (
            "top_k", "min_tokens", "max_tokens", "seed", "n", "no_repeat_ngram_size", "logprobs", "prompt_logprobs"
        ):  # fmt: skip
            object.__setattr__(self, name, None if getattr(self, name) is None else int(getattr(self, name)))
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidValueError("allowed_token_ids must hold at least one id, got []; leave it out to allow all")
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logits_processors", _logits_processors(self.logits_processors))
        if self.stop and not self.detokenize:
            raise InvalidValueError(f"stop={self.stop!r} needs text, but detokenize=False; use stop_token_ids instead")
        if not is_one_of(self.output_kind, tuple(RequestOutputKind)):
            raise out_of_range("output_kind", self.output_kind, f"one of {', '.join(RequestOutputKind)}")
        object.__setattr__(self, "output_kind", RequestOutputKind(self.output_kind))
        if self.structured_outputs is not None:
            self._check_structured_outputs()
        self._check_timeout_and_extra_args()

    def _check_timeout_and_extra_args(self) -> None:
        if self.timeout is not None:
            check_number("timeout", self.timeout, math.ulp(0.0), math.inf, "> 0 seconds; leave it out for no limit")
        if not isinstance(self.extra_args, Mapping | None):
            raise InvalidTypeError(f"extra_args must be a dict, got {shown(self.extra_args)}")
        object.__setattr__(self, "extra_args", self.extra_args or None)

    def _check_structured_outputs(self) -> None:
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise InvalidTypeError(f"structured_outputs must be StructuredOutputsParams, got {shown(self.structured_outputs)}")
        if self.ignore_eos:
            raise InvalidValueError("ignore_eos cannot be used with structured_outputs: the answer ends when it is complete")
        if self.allowed_token_ids is not None:
            raise InvalidValueError(
                "allowed_token_ids cannot be used with structured_outputs, which decides what is allowed; use one of them"
            )

    def clone(self) -> Self:
        """Return a copy. Only logit_bias is checked again, because a dict may be changed without an assignment."""
        clone = super().clone()
        object.__setattr__(clone, "logit_bias", _logit_bias(self.logit_bias))
        return clone

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit is taken, without a draw."""
        return self.temperature == 0

    def differing(self) -> dict[str, object]:
        """Return the parameters that differ from their defaults, for the tracer. Lists and functions are shortened reprs.

        >>> SamplingParams(temperature=0.5, stop="END").differing()
        {'temperature': 0.5, 'stop': "('END',)"}
        """
        default = SamplingParams()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value if isinstance(value, int | float | str | None) else reprlib.repr(value)
            for name, value in values.items()
            if value != getattr(default, name)
        }

    @property
    def needs_state(self) -> bool:
        """Whether a stage reads this sequence's history, or a list of ids."""
        has_list = self.allowed_token_ids is not None or self.logit_bias is not None
        return self.has_penalty or has_list or self.no_repeat_ngram_size > 0

    @property
    def has_penalty(self) -> bool:
        """Whether a penalty on repeated ids is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@named_arguments
@dataclass(kw_only=True)
class BeamSearchParams(_CheckedParams):
    """How LLM.beam_search finds the most likely answers to a prompt.

    Args:
        beam_width: Number of beams kept at each step, and of answers returned. >= 1. More than max_num_seqs run in turns.
        max_tokens: Maximum length of an answer in tokens. >= 1.
        length_penalty: A beam's score is its summed log-probability / number of generated tokens ** length_penalty, EOS
            counted. Above 0 it favours long answers, since the sums are negative. -10 .. 10.
        early_stopping: When a prompt is done. True: as soon as beam_width answers have ended. False: when no running beam would
            end with a better score at its present length. "never": when none could at any length up to max_tokens.
        ignore_eos: No answer ends before max_tokens.

    Raises:
        InvalidValueError: A value out of its range.
        InvalidTypeError: A value of the wrong type, or an argument that does not exist.

    The results are those of transformers' generate(num_beams=...).
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, None, ">= 1")
        check_integer("max_tokens", self.max_tokens, 1, None, ">= 1")
        check_number("length_penalty", self.length_penalty, -10.0, 10.0, "in [-10, 10]; 0 compares plain sums")
        check_flag("ignore_eos", self.ignore_eos)
        if not isinstance(self.early_stopping, bool | str):
            raise InvalidTypeError(f"early_stopping must be True, False or 'never', got {shown(self.early_stopping)}")
        if self.early_stopping not in (True, False, "never"):
            raise out_of_range("early_stopping", self.early_stopping, "True, False or 'never'")
        for name, plain in (("beam_width", int), ("max_tokens", int), ("length_penalty", float)):
            object.__setattr__(self, name, plain(getattr(self, name)))


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise InvalidTypeError(f"stop must be a string or a list of strings, got {shown(stop)}")
    if "" in strings:
        raise InvalidValueError(f"stop must not hold an empty string, got {shown(stop)}; leave stop out to turn it off")
    return tuple(strings)


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    ids = () if ids is None else ids
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise InvalidTypeError(f"{name} must be a list of token ids, got {shown(ids)}")
    for token_id in ids:
        check_integer(f"each of {name}", token_id, 0, None, ">= 0")
    return tuple(int(token_id) for token_id in ids)


def _logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidTypeError(f"logit_bias must be a dict of token ids and numbers, got {shown(bias)}")
    for token_id, value in bias.items():
        check_integer("each id of logit_bias", token_id, 0, None, ">= 0")
        allowed = "in [-100, 100]; allowed_token_ids and bad_words can forbid a token"
        check_number(f"logit_bias[{shown(token_id)}]", value, -100.0, 100.0, allowed)
    return {int(token_id): float(value) for token_id, value in bias.items()} or None


def _bad_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    words = () if words is None else words
    if not isinstance(words, Sequence) or isinstance(words, str | bytes):
        raise InvalidTypeError(f"bad_words must be a list of strings and lists of token ids, got {shown(words)}")
    if any(word is None for word in words):
        raise InvalidTypeError("each of bad_words must be a list of token ids or a string, got None")
    checked = tuple(word if isinstance(word, str) else _token_ids("bad_words", word) for word in words)
    for word in checked:
        if not (word.strip() if isinstance(word, str) else word):
            raise InvalidValueError(f"bad_words must not hold an empty word, got {shown(word)}; leave it out")
    return checked


@dataclass(frozen=True)
class _WithoutPrompt:
    """A logits processor (output_ids, logits) -> logits, called as the others are."""

    processor: Callable[[list[int], Tensor], Tensor]

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
        return self.processor(output_ids, logits)


def _logits_processors(processors: object) -> tuple[LogitsProcessor, ...]:
    """The processors, each with three arguments."""
    processors = () if processors is None else processors
    if not isinstance(processors, Sequence) or not all(callable(processor) for processor in processors):
        raise InvalidTypeError(f"logits_processors must be a list of functions {_FORMS}, got {shown(processors)}")
    return tuple(_WithoutPrompt(one) if _num_arguments(one) == 2 else one for one in processors)


def _num_arguments(processor: LogitsProcessor) -> int:
    """Two if a processor requires exactly two arguments, else three."""
    try:
        signature = inspect.signature(processor)
        required = [one for one in signature.parameters.values() if one.default is one.empty and one.kind in _POSITIONAL]
        num_arguments = 2 if len(required) == 2 else 3
        signature.bind(*range(num_arguments))
    except (TypeError, ValueError) as error:  # ValueError: some functions in C have no signature
        raise InvalidTypeError(
            f"each of logits_processors must be a function {_FORMS}, got {shown(processor)} ({error}); wrap it in a lambda"
        ) from None
    return num_arguments
