"""The format that an answer must have: a JSON schema, a regular expression, a list of strings or a grammar.

In: keyword arguments with vLLM's names. Out: StructuredOutputsParams, checked as far as no tokenizer is needed. The grammar
itself is checked in structured/grammar.py, before the request enters the engine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from typing_extensions import Doc

from nanoinfer.arguments import Neutral, declared, read_fields
from nanoinfer.errors import InvalidTypeError, InvalidValueError

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


# vLLM's further arguments: the values that change nothing, and the way out of all others.
NEUTRAL: Neutral = {
    "backend": ((None, "auto", "guidance"), "llguidance is the one backend of structured outputs; leave it out"),
    "disable_fallback": ((False, True), ""),
    "disable_additional_properties": ((False,), ""),
    "whitespace_pattern": ((None,), ""),
    "structural_tag": ((None,), ""),
}


@declared(NEUTRAL)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The value of SamplingParams(structured_outputs=...). Exactly one of the first five arguments is given.

    Args: as declared below.

    Raises:
        InvalidValueError: no format, several formats, or text that is not JSON.
        InvalidTypeError: a value of the wrong type, or an argument that does not exist.
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
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> str:
        """The name of the argument that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in _KINDS if getattr(self, name) not in (None, False)]


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
