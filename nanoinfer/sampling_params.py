"""What one prompt may ask for. A frozen value, checked when it is made, before any work is done for it.

In: keyword arguments with vLLM's names. Out: a SamplingParams that every later station can trust. It knows nothing of any
model: what needs the vocabulary (stop_token_ids) is checked where a request enters the engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.checks import check_flag, check_integer, check_number, out_of_range
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError, unknown_argument


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose each next token of one prompt, and when to stop.

    Choosing (applied in this order; greedy rows skip all but min_tokens):

    - min_tokens (>= 0): EOS and stop_token_ids cannot be drawn until so many tokens are out, and a stop string must complete
      in text after them.
    - temperature (finite, >= 0): divides the logits. 0 is greedy: the largest logit, ties to the lowest id.
    - min_p ([0, 1], 0 is off): drop tokens less probable than min_p times the most probable one.
    - top_k (>= 1; 0 or -1 is off): keep the k largest; ties with the k-th stay.
    - top_p ((0, 1], 1 is off): keep the smallest set whose probabilities reach top_p; the token that crosses it stays.
    - seed (0 to 2**64 - 1; None or -1 draws one): the same seed and the same logits give the same tokens, in any batch.

    Stopping:

    - max_tokens (>= 1; None: up to the model's length): the output's length in tokens.
    - stop: a string or several; the text ends before the one that completes first (after it, with
      include_stop_str_in_output).
    - stop_token_ids: ids that end the output as EOS does. The id stays in token_ids, its text is dropped unless
      include_stop_str_in_output.
    - ignore_eos: EOS does not stop; stop and stop_token_ids still do.

    Text: skip_special_tokens leaves special tokens out of the text; detokenize=False gives token ids only.

    The remaining fields are known names that are refused, unless they are off, until they are built: see `_NOT_BUILT`.

    >>> SamplingParams(temperature=0.0, max_tokens=3).is_greedy
    True
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
    nanoinfer.errors.InvalidValueError: top_p must be in (0, 1], got 1.5; use 1.0 to turn it off

    Raises: InvalidValueError, InvalidTypeError, UnsupportedError.
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
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Any = None

    def __new__(cls, *args: Any, **given: Any) -> "SamplingParams":
        """Before Python's own bare TypeError: an argument that does not exist is named, with the one that was meant."""
        if args:
            raise InvalidTypeError(f"SamplingParams takes keyword arguments only, got {args!r}; write temperature={args[0]!r}")
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise unknown_argument("SamplingParams", name, list(cls.__dataclass_fields__))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, off_values in _NOT_BUILT.items():
            value, off = getattr(self, name), getattr(SamplingParams, name)
            if not _is_off(value, off_values):
                raise UnsupportedError(f"{name}={value!r} is not built yet; leave it out (it acts as {off!r})")
        check_number("temperature", self.temperature, 0.0, math.inf, "finite and >= 0; 0 is greedy")
        check_number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]; use 1.0 to turn it off")
        check_number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]; use 0 to turn it off")
        check_integer("top_k", self.top_k, -1, None, ">= 1, or 0 or -1 to turn it off")
        check_integer("min_tokens", self.min_tokens, 0, None, ">= 0")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            check_flag(name, getattr(self, name))
        if self.top_p == 0:  # the range is open at 0
            raise out_of_range("top_p", self.top_p, "in (0, 1]; use temperature=0 for greedy, 1.0 to turn it off")
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, None, ">= 1, or None for the model's length")
            if self.min_tokens > self.max_tokens:
                raise InvalidValueError(
                    f"min_tokens must not pass max_tokens, got min_tokens={self.min_tokens} and "
                    f"max_tokens={self.max_tokens}; raise max_tokens or lower min_tokens"
                )
        if self.seed is not None:
            check_integer("seed", self.seed, -1, 2**64 - 1, "in 0 .. 2**64 - 1, or None or -1 to draw one")
        # Normalised here once: plain numbers instead of numpy's, None and 0 for their other spellings, tuples.
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("top_k", "min_tokens", "max_tokens", "seed"):
            object.__setattr__(self, name, None if getattr(self, name) is None else int(getattr(self, name)))
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise InvalidValueError(f"stop={self.stop!r} needs text, but detokenize=False; use stop_token_ids instead")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


# name -> the values that mean "off". A value that is not here would be ignored, so it is refused.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logits_processors": (None, []),
}


def _is_off(value: Any, off_values: tuple[Any, ...]) -> bool:
    """Only plain values can be off: an array would not say whether it equals one."""
    if isinstance(value, bool) or not isinstance(value, int | float | list | tuple | dict | None):
        return False
    return (list(value) if isinstance(value, tuple) else value) in off_values


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise InvalidTypeError(f"stop must be a string or a list of strings, got {stop!r}")
    if "" in strings:
        raise InvalidValueError(f"stop must not hold an empty string, got {stop!r}; leave stop out to turn it off")
    return tuple(strings)


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    ids = () if ids is None else ids
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise InvalidTypeError(f"{name} must be a list of token ids, got {ids!r}")
    for token_id in ids:
        check_integer(f"each of {name}", token_id, 0, None, ">= 0")
    return tuple(int(token_id) for token_id in ids)
