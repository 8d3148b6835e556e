"""What one request may specify: values checked when they are made or assigned, before any work is done.

In: keyword arguments with vLLM's names, each declared by a field: type, range, meaning (arguments.py). Out: a SamplingParams
that every later stage can trust, so that no later stage checks it again. It knows nothing of any model: what needs the
vocabulary (lists of token ids, grammars) is checked where a request enters the engine. What a feature reads is checked by the
feature. The engine keeps a copy, so an assignment never changes a request that has been submitted.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_types import Ge, Interval
from typing_extensions import Doc

import nanoinfer
from nanoinfer.arguments import Allowed, Hint, Option, declared, read_fields
from nanoinfer.errors import InvalidTypeError, InvalidValueError, check_integer, check_number, is_one_of, out_of_range, shown

if TYPE_CHECKING:
    from torch import Tensor

    BeamSearchParams = nanoinfer.BeamSearchParams
    RepetitionDetectionParams = nanoinfer.RepetitionDetectionParams
    StructuredOutputsParams = nanoinfer.StructuredOutputsParams
    GuidedDecodingParams = nanoinfer.StructuredOutputsParams
else:
    Tensor = object  # typing.get_type_hints needs a value, and this file imports no torch

# (prompt ids, output ids, logits [vocab]) -> logits [vocab], or vLLM's signature without the prompt ids
LogitsProcessor = Callable[[list[int], list[int], Tensor], Tensor] | Callable[[list[int], Tensor], Tensor]

MAX_ANSWERS = 16384  # of one request, as in vLLM


class RequestOutputKind(StrEnum):
    """What the outputs of a request hold while it runs: everything so far, only what is new, or nothing before the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass
class CheckedParams:
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


PARAMETERS_OF_FEATURES = (  # which an engine that was made without features refuses (engine/inputs.py)
    *("logprobs", "return_sampling_mask", "prompt_logprobs", "bad_words", "no_repeat_ngram_size", "repetition_detection"),
    *("thinking_token_budget", "structured_outputs"),
)


@declared
@dataclass(kw_only=True)
class SamplingParams(CheckedParams):
    """How to choose each next token of one prompt, and when to stop.

    The parameters that change the logits apply in this order: allowed_token_ids, structured_outputs, thinking_token_budget,
    bad_words, min_tokens, logit_bias, repetition_penalty, frequency_penalty, presence_penalty, no_repeat_ngram_size,
    logits_processors, temperature, min_p, top_k, top_p. Greedy rows skip the last four.

    A parameter may be assigned later, `params.max_tokens = 20`, and is checked then. Requests that were submitted before keep
    the old value. vLLM's further parameters, such as flat_logprobs, are accepted with the value that changes nothing.

    Args: as declared below.

    Raises: InvalidValueError, InvalidTypeError.

    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    nanoinfer.errors.InvalidValueError: top_p must be in (0, 1], got 1.5; use 1.0 to turn it off
    """

    # fmt: off
    temperature: Annotated[float, Ge(0), Hint("0 is greedy"), Option("-t"),
        Doc("Divides the logits. The largest logit is then taken, ties to the lowest id.")] = 1.0
    top_k: Annotated[int, Ge(-1), Allowed(">= 1, or 0 or -1 to turn it off"), Option(),
        Doc("Keep the k largest logits. Ties with the k-th stay.")] = 0
    top_p: Annotated[float, Interval(gt=0, le=1), Hint("use 1.0 to turn it off"), Option(),
        Doc("Keep the smallest set whose probabilities reach top_p. The token that crosses it stays.")] = 1.0
    min_p: Annotated[float, Interval(ge=0, le=1), Hint("use 0 to turn it off"), Option(),
        Doc("Drop tokens less probable than min_p times the most probable one.")] = 0.0
    seed: Annotated[int | None, Interval(ge=-1, le=2**64 - 1), Option(),
        Allowed("in 0 .. 2**64 - 1, or None or -1 to draw one"),
        Doc("The same seed and the same logits give the same tokens, in any batch.")] = None
    max_tokens: Annotated[int | None, Ge(1), Allowed(">= 1, or None for the model's length"), Option("-n"),
        Doc("Maximum length of the output in tokens.")] = 16
    min_tokens: Annotated[int, Ge(0), Option(), Doc(
        "EOS and stop_token_ids cannot be drawn before the output has this many tokens. A stop string must complete in the "
        "text after them.")] = 0
    thinking_token_budget: Annotated[int | None, Ge(-1), Option(),
        Allowed(">= 0, or None or -1 for no limit"), Doc(
        "The most tokens of the reasoning at the beginning of an answer, between the tags of reasoning. The end tag follows, "
        "unless allowed_token_ids or structured_outputs forbid it. The prompt may have begun the reasoning. With a budget a "
        "structured output of chat() follows the reasoning.")] = None
    repetition_detection: Annotated["nanoinfer.RepetitionDetectionParams | Mapping[str, int] | None", Doc(
        'Ends an answer with finish_reason "repetition", after min_tokens, when its last tokens are a pattern min_count times '
        "in a row. A RepetitionDetectionParams, or a dict of its arguments.")] = None
    stop: Annotated[str | Sequence[str] | None, Option(), Doc(
        "A string or several, of which the first to complete ends the text. The text ends before it, or after it with "
        "include_stop_str_in_output. A string that is a special token is found by its id too, since skip_special_tokens leaves "
        "its text out. A special token with other text around it is found only with skip_special_tokens=False."
    )] = None  # kept as a tuple of strings
    stop_token_ids: Annotated[Sequence[int] | None, Option(), Doc(
        "Ids that end the output as EOS does. The id stays in token_ids. Its text is dropped, except with "
        "include_stop_str_in_output.")] = None  # kept as a tuple of ids
    include_stop_str_in_output: Annotated[bool, Option(), Doc(
        "Keep the stop string, or the text of the stop id, in the text. A stop string that completes in the text of a stop id "
        "or of EOS cuts that text, and is the stop_reason.")] = False
    ignore_eos: Annotated[bool, Option(), Doc("EOS does not stop. stop and stop_token_ids still do.")] = False
    skip_special_tokens: Annotated[bool, Option(), Doc("Leave special tokens out of the text.")] = True
    detokenize: Annotated[bool, Doc("False returns token ids only, without text.")] = True
    n: Annotated[int, Interval(ge=1, le=MAX_ANSWERS),
        Doc("Number of answers to the prompt. The i-th is drawn with seed + i.")] = 1
    repetition_penalty: Annotated[float, Interval(gt=0), Hint("use 1.0 to turn it off"), Option(),
        Doc("Logits of ids in prompt or output are divided by it if positive, else multiplied.")] = 1.0
    presence_penalty: Annotated[float, Interval(ge=-2, le=2), Hint("use 0 to turn it off"), Option(),
        Doc("Subtracted once for every id that is in the output.")] = 0.0
    frequency_penalty: Annotated[float, Interval(ge=-2, le=2), Hint("use 0 to turn it off"), Option(),
        Doc("Subtracted once for each time an id is in the output.")] = 0.0
    no_repeat_ngram_size: Annotated[int, Ge(0), Allowed(">= 1, or 0 to turn it off"), Option(),
        Doc("No run of this many tokens occurs twice in prompt + output.")] = 0
    logit_bias: Annotated[Mapping[int, float] | None, Option(),
        Doc("{token id: -100 to 100}, added to the logits.")] = None  # kept as a copy
    allowed_token_ids: Annotated[Sequence[int] | None, Option(),
        Doc("Only these ids can be drawn. At least one.")] = None  # kept as a tuple of ids
    bad_words: Annotated[Sequence[str | Sequence[int]] | None, Option(), Doc(
        "Strings that cannot occur in the output. The last token is masked when the output ends with the tokens before it. A "
        "string applies in every spelling that the tokenizer has for it at a word boundary: at the start of a text, after a "
        "space and after a line break. In Python, an entry may also be a list of token ids, which applies as it is."
    )] = None  # kept as a tuple of strings and tuples of ids
    logprobs: Annotated[int | None, Ge(-1), Allowed(">= 0, -1 for all, or None to turn it off"), Doc(
        "Report the log-probabilities of this many most likely ids and of the drawn one, for each output token. True is 1, and "
        "False None.")] = None
    logprob_token_ids: Annotated[Sequence[int] | None, Doc(
        "Report the log-probabilities of these ids instead of the most likely ones, and of the drawn one, for each output "
        "token. logprobs may be left out. As in vLLM it may also be the number of ids.")] = None  # kept as a tuple of ids
    prompt_logprobs: Annotated[int | None, Ge(-1), Allowed(">= 0, -1 for all, or None to turn it off"),
        Doc("The same for the tokens of the prompt.")] = None
    return_sampling_mask: Annotated[bool, Doc(
        "Report for each output token which ids could be drawn: those that every stage has left, from allowed_token_ids to "
        "top_p. A trainer renormalises over them. All stages then run, one after the other.")] = False
    logits_processors: Annotated[Sequence[LogitsProcessor] | None, Doc(
        "Your own functions (prompt_ids, output_ids, logits [vocab]) -> logits [vocab], called in order. Those that require "
        "two arguments are called with (output_ids, logits [vocab]).")] = None  # kept as a tuple
    timeout: Annotated[float | None, Interval(gt=0), Allowed("> 0 seconds; leave it out for no limit"), Doc(
        'Seconds after which the request ends with finish_reason "timeout", whether it waits or runs. Its text so far stays. '
        "Counted from its arrival in the engine.")] = None
    extra_args: Annotated[Mapping[str, object] | None,
        Doc("A dict for LLM(logits_processors=...) and stages of your own, which decide what it means.")] = None
    structured_outputs: Annotated["nanoinfer.StructuredOutputsParams | None", Doc(
        "The format that the answer must have. EOS and stop_token_ids cannot be drawn before the answer has it. When no token "
        "can follow, EOS comes next, also before min_tokens, or the answer ends there if there is no EOS. It may still be cut "
        "by max_tokens and stop.")] = None
    output_kind: Annotated[RequestOutputKind | Literal["cumulative", "delta", "final_only"], Doc(
        'What each output of AsyncLLM.generate and LLMEngine.step holds. "cumulative": everything so far. "delta": what is '
        'new. "final_only": there is one output, the finished one, as LLM always returns.')] = RequestOutputKind.CUMULATIVE
    # fmt: on

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(given := getattr(self, name), bool):  # as vLLM reads them
                object.__setattr__(self, name, 1 if given else None)
        if is_one_of(self.top_p, (0,)) and self.top_p is not False:
            raise out_of_range("top_p", self.top_p, "in (0, 1]; use temperature=0 for greedy, 1.0 to turn it off")
        read_fields(self)
        if self.n > 1 and self.temperature == 0:
            raise InvalidValueError(
                f"n must be 1 at temperature 0, got {self.n}: all answers would be the same; raise temperature"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidValueError(
                f"min_tokens must not pass max_tokens, got min_tokens={self.min_tokens} and "
                f"max_tokens={self.max_tokens}; raise max_tokens or lower min_tokens"
            )
        if not isinstance(self.extra_args, Mapping | None):
            raise InvalidTypeError(f"extra_args must be a dict, got {shown(self.extra_args)}")
        if not is_one_of(self.output_kind, tuple(RequestOutputKind)):
            raise out_of_range("output_kind", self.output_kind, f"one of {', '.join(RequestOutputKind)}")
        detection, own = self.repetition_detection, self.logits_processors
        # One spelling of each value: None and 0 for what is off, tuples. (An assignment with `=` would be checked again.)
        for name, value in (
            ("seed", None if self.seed == -1 else self.seed),
            ("thinking_token_budget", None if self.thinking_token_budget == -1 else self.thinking_token_budget),
            ("top_k", max(self.top_k, 0)),
            ("stop", _stop_strings(self.stop)),
            ("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids)),
            ("logit_bias", _logit_bias(self.logit_bias)),
            ("allowed_token_ids", _allowed_token_ids(self.allowed_token_ids)),
            ("bad_words", _bad_words(self.bad_words)),
            ("logprob_token_ids", _token_ids("logprob_token_ids", self.logprob_token_ids)),
            ("repetition_detection", nanoinfer.RepetitionDetectionParams.of(detection) if detection is not None else None),
            ("logits_processors", () if is_one_of(own, (None, ())) else nanoinfer.processor_functions(own)),
            ("extra_args", self.extra_args or None),
            ("output_kind", RequestOutputKind(self.output_kind)),
        ):
            object.__setattr__(self, name, value)
        if num_ids := len(self.logprob_token_ids or ()):
            if self.logprobs not in (None, 0, num_ids):
                raise InvalidValueError(
                    f"logprobs must be {num_ids}, the number of logprob_token_ids, got {self.logprobs}; leave one of them out"
                )
            object.__setattr__(self, "logprobs", 0)
        if self.stop and not self.detokenize:
            raise InvalidValueError(f"stop={self.stop!r} needs text, but detokenize=False; use stop_token_ids instead")
        if self.structured_outputs is not None:
            nanoinfer.StructuredOutputsParams.check(self)

    def clone(self) -> Self:
        """Return a copy. Only logit_bias is checked again, because a dict may be changed without an assignment."""
        clone = super().clone()
        object.__setattr__(clone, "logit_bias", _logit_bias(self.logit_bias))
        return clone

    @property
    def reports(self) -> tuple[str, ...]:
        """The fields of CompletionOutput that the request asks for, which have an entry for each token."""
        return ("logprobs",) * (self.logprobs is not None) + ("sampling_mask",) * self.return_sampling_mask

    @property
    def needs_sampling_state(self) -> bool:
        """Whether a stage reads this sequence's history, or a list of ids."""
        return self.has_penalty or self.allowed_token_ids is not None or self.logit_bias is not None

    @property
    def has_penalty(self) -> bool:
        """Whether a penalty on repeated ids is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def over_default(default: SamplingParams, **given: object) -> SamplingParams:
    """Return a checkpoint's default with a request's parameters. The request's max_tokens wins over the default min_tokens."""
    if isinstance(most := given.get("max_tokens"), int):
        given.setdefault("min_tokens", min(default.min_tokens, most))
    if given.get("structured_outputs") is not None:
        given.setdefault("no_repeat_ngram_size", 0)  # it would forbid what the structure needs
    return replace(default, **given)  # type: ignore[arg-type]


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


def _allowed_token_ids(ids: object) -> tuple[int, ...] | None:
    checked = None if ids is None else _token_ids("allowed_token_ids", ids)
    if checked == ():
        raise InvalidValueError("allowed_token_ids must hold at least one id, got []; leave it out to allow all")
    return checked


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
    for word in words:
        if not isinstance(word, Sequence) or isinstance(word, bytes):
            raise InvalidTypeError(f"each of bad_words must be a string or a list of token ids, got {shown(word)}")
    checked = tuple(word if isinstance(word, str) else _token_ids("bad_words", word) for word in words)
    for word in checked:
        if not (word.strip() if isinstance(word, str) else word):
            raise InvalidValueError(f"bad_words must not hold an empty word, got {shown(word)}; leave it out")
    return checked


if not TYPE_CHECKING:
    __getattr__ = nanoinfer.__getattr__  # the parameters of features
