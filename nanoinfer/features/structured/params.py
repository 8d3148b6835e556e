"""The values of SamplingParams(structured_outputs=...) and SamplingParams(repetition_detection=...)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from annotated_types import Ge
from typing_extensions import Doc

from nanoinfer.arguments import Allowed, declared, read_fields
from nanoinfer.errors import InvalidTypeError, InvalidValueError, shown
from nanoinfer.sampling_params import SamplingParams

_FORMATS = ("json", "regex", "choice", "grammar", "json_object")


@declared
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The value of SamplingParams(structured_outputs=...). Exactly one of the first five arguments is given.

    Args: as declared below.

    Raises: InvalidValueError (also for no format, several formats, or text that is not JSON), InvalidTypeError.
    """

    # fmt: off
    json: Annotated[str | Mapping[str, object] | None,
        Doc("A JSON schema, as a dict or as text. A keyword that cannot be enforced is refused.")] = None  # kept as text
    regex: Annotated[str | None,
        Doc("A regular expression that the whole answer matches. Neither lookaround nor back-references.")] = None
    choice: Annotated[Sequence[str] | None, Doc("The answer is one of these strings.")] = None  # kept as a tuple
    grammar: Annotated[str | None, Doc("A context-free grammar, in Lark's or in llama.cpp's notation (GBNF).")] = None
    json_object: Annotated[bool | None, Doc("True: any JSON object.")] = None
    disable_any_whitespace: Annotated[bool,
        Doc("Write JSON without white space between its parts. vLLM's default is False.")] = True
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self)
        given = self._given()
        if len(given) != 1:
            raise InvalidValueError(
                f"structured_outputs needs exactly one of {', '.join(_FORMATS)}, got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        """Check params.structured_outputs, which is not None, and what cannot be used with it."""
        if not isinstance(given := params.structured_outputs, cls):
            raise InvalidTypeError(f"structured_outputs must be StructuredOutputsParams, got {shown(given)}")
        if params.ignore_eos:
            raise InvalidValueError("ignore_eos cannot be used with structured_outputs: the answer ends when it is complete")
        if params.allowed_token_ids is not None:
            raise InvalidValueError(
                "allowed_token_ids cannot be used with structured_outputs, which decides what is allowed; use one of them"
            )

    @property
    def kind(self) -> str:
        """The name of the argument that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in _FORMATS if getattr(self, name) not in (None, False)]


def _schema_text(schema: object) -> str:
    """Return a JSON schema as JSON text, so that a later change of the user's dict changes no request."""
    if not isinstance(schema, str | Mapping):
        raise InvalidTypeError(
            f"json must be a JSON schema, as a dict or as text, got {type(schema).__name__}; "
            "of a pydantic model, pass Model.model_json_schema()"
        )
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidValueError(f"json is not a JSON schema ({error})") from error
    if not isinstance(parsed, Mapping):
        raise InvalidValueError(f"json must be an object such as {{'type': 'object'}}, got {text[:100]}")
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not all(isinstance(text, str) for text in choices):
        raise InvalidTypeError(f"choice must be a list of strings, got {choices!r}")
    if not choices or "" in choices:
        raise InvalidValueError(f"choice must hold at least one string, and no empty one, got {list(choices)!r}")
    return tuple(choices)


GuidedDecodingParams = StructuredOutputsParams  # its earlier name in vLLM


@declared
@dataclass(frozen=True)
class RepetitionDetectionParams:
    """The value of SamplingParams(repetition_detection=...).

    Args: as declared below.

    Raises: InvalidValueError, InvalidTypeError.
    """

    # fmt: off
    max_pattern_size: Annotated[int, Ge(0), Allowed(">= 1, or 0 to turn it off"),
        Doc("The most tokens of a pattern.")] = 0
    min_pattern_size: Annotated[int, Ge(0), Doc("The fewest tokens of a pattern. 0 is 1.")] = 0
    min_count: Annotated[int, Ge(0), Doc("The number of times in a row, from 2, at which a pattern ends the answer.")] = 0
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self)
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidValueError(
                f"min_pattern_size must be at most max_pattern_size, got {self.min_pattern_size} and {self.max_pattern_size}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidValueError(f"min_count must be >= 2 with max_pattern_size, got {self.min_count}")

    @classmethod
    def of(cls, given: object) -> Self | None:
        """Check the repetition_detection of SamplingParams. Returns None if it is turned off."""
        if isinstance(given, Mapping):
            given = cls(**{str(name): value for name, value in given.items()})
        if not isinstance(given, cls):
            raise InvalidTypeError(f"repetition_detection must be RepetitionDetectionParams or a dict, got {shown(given)}")
        return given if given.max_pattern_size else None

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether the last tokens are a pattern of an allowed size, min_count times in a row.

        >>> RepetitionDetectionParams(max_pattern_size=2, min_count=2).ends([1, 5, 6, 5, 6])
        True
        """
        for size in range(max(self.min_pattern_size, 1), self.max_pattern_size + 1):
            num = size * self.min_count
            if num > len(token_ids):
                return False
            if token_ids[-1] == token_ids[-1 - size] and token_ids[-num:-size] == token_ids[size - num :]:
                return True
        return False
