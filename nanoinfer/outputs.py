"""Results with vLLM's names and fields, as plain data that a user may keep, print and compare.

No result holds a tensor or the engine.
"""

from dataclasses import Field, dataclass, field, fields
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Literal, NoReturn

import nanoinfer
from nanoinfer.errors import InvalidTypeError, shown

if TYPE_CHECKING:
    from nanoinfer.tokenization.detokenizer import Detokenizer

    BeamSearchOutput = nanoinfer.BeamSearchOutput
    BeamSearchSequence = nanoinfer.BeamSearchSequence

FinishReason = Literal["stop", "length", "repetition", "abort", "timeout", "error"]


def _shown(value: object, max_items: int = 6) -> str:
    """Return a repr with at most max_items items of each list and dict.

    >>> _shown([5, 6, 7, 8], max_items=3)
    '[5, 6, 7, ... 4 in all]'
    """
    if isinstance(value, list):
        items, brackets = [_shown(item) for item in value[:max_items]], "[]"
    elif isinstance(value, dict):
        items, brackets = [f"{key!r}: {_shown(item)}" for key, item in islice(value.items(), max_items)], "{}"
    else:
        return repr(value)
    if len(value) > max_items:
        items.append(f"... {len(value)} in all")
    return brackets[0] + ", ".join(items) + brackets[1]


class ShortRepr:
    """A dataclass whose repr omits fields that are None and shortens lists, such as 1,000 token ids, and a long prompt."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        texts = {name: _shown(value) for name, value in values.items() if value is not None}
        if len(prompt := values.get("prompt") or "") > 100:
            texts["prompt"] = f"{prompt[:60]!r} ... {len(prompt)} characters in all"
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in texts.items())})"


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of an id at a position.

    Attributes:
        logprob: the natural logarithm of the probability.
        rank: the number of ids at this position that are at least as likely. The most likely id has rank 1.
        decoded_token: the text of the id alone, or, for a part of a character, the text that
            it adds to the tokens before it: the character that it completes, or "". None: there is no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


LogprobsOnePosition = dict[int, Logprob]  # the token itself first, then those that were asked for


def sum_of_logprobs(token_ids: list[int], logprobs: list[LogprobsOnePosition] | None) -> float | None:
    """Return the sum of the log-probabilities of token_ids. None: there are no logprobs."""
    if logprobs is None:
        return None
    return sum(position[token_id].logprob for position, token_id in zip(logprobs, token_ids, strict=True))


class TokenReport:
    """What a sampler reports of a token, besides its id (features/logprobs)."""

    def fields(self, detokenizer: "Detokenizer") -> dict[str, object]:
        """Return entries for lists of CompletionOutput and Delta, by name. detokenizer: has the text before the token."""
        return {}


@dataclass(slots=True, repr=False)
class CompletionOutput(ShortRepr):
    """An answer to a prompt.

    Attributes:
        index: the index of the answer among the n answers.
        text: the text of the tokens after the rules of SamplingParams, without an incomplete character at the end.
        token_ids: every sampled id, EOS included.
        cumulative_logprob: the sum of the log-probabilities of token_ids. None: `logprobs` is None.
        logprobs: a dict for every id of token_ids. None: SamplingParams.logprobs is None.
        sampling_mask: for every id of token_ids, the ids that could be drawn, itself included, in
            rising order. None: the request did not set return_sampling_mask.
        finish_reason: "stop" (EOS, a stop id or a stop string), "length" (max_tokens, or the model's length), "repetition"
            (SamplingParams.repetition_detection), "abort", "timeout" (SamplingParams.timeout has passed), or "error".
        stop_reason: the stop string or stop id that ended the answer. None: EOS or another reason ended it.
        error: what went wrong and what to do, for finish_reason "error" or "timeout". With "abort", it names the pause that
            came before the request had begun.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsOnePosition] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    sampling_mask: list[list[int]] | None = None


@dataclass(slots=True)
class RequestMetrics:
    """The times at which a request arrived, ran and ended, in seconds on the clock of time.perf_counter."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when the request first ran
    num_preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """The time to first token, in seconds from arrival."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """The time per output token after the first, in seconds. None: there are fewer than two tokens."""
        if self.first_token_time is None or self.finished_time is None or self.num_output_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_output_tokens - 1)


@dataclass(slots=True, repr=False)
class RequestOutput(ShortRepr):
    """A prompt with its n answers. prompt: None if the prompt was given as token ids.

    Attributes:
        weights_version: how often LLM.update_weights had replaced the weights before they answered.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[LogprobsOnePosition | None] | None = None  # an entry for every prompt token, None for the first
    weights_version: int = 0

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens that were found in the prefix cache."""
        return self.metrics.num_cached_tokens

    if not TYPE_CHECKING:

        def __getitem__(self, name: object) -> NoReturn:  # nano-vllm returns dicts
            answer = "use output.outputs[0].text and output.outputs[0].token_ids"
            raise InvalidTypeError(f"'RequestOutput' object is not subscriptable, got [{shown(name)}]; {answer}")


@dataclass(frozen=True, slots=True, repr=False)
class Delta(ShortRepr):
    """The text and ids that a step adds to an answer of a request.

    The text may be empty, because an incomplete character is held back until it is complete (and dropped if the answer ends in
    it), and the possible start of a stop string is held back until it is certain.

    Attributes:
        output: the whole RequestOutput on the last Delta of the request. None: before it.
        request_id: the id for LLM.abort.
        logprobs, sampling_mask: those of token_ids. None: not requested.
        index: the index of the answer among the n answers.
        finish_reason, stop_reason, error: as in CompletionOutput on the last Delta of an answer. None: before it.
    """

    text: str
    token_ids: list[int]
    output: RequestOutput | None = None
    request_id: str = ""
    logprobs: list[LogprobsOnePosition] | None = None
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    sampling_mask: list[list[int]] | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """A value that LLM.get_metrics() returns, under the name that vLLM gives it. labels: what tells values of a name apart."""

    name: str
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """A list of numbers that only grow."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """A distribution of values. buckets[bound] counts the values up to the bound, and "inf" all. sum: the sum of the values."""

    count: int
    sum: float
    buckets: dict[str, int]


if not TYPE_CHECKING:
    __getattr__ = nanoinfer.__getattr__  # the outputs of features, and vLLM's further names
