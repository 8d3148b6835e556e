"""The format that an answer must have: a JSON schema, a regular expression, a list of strings or a grammar.

In: keyword arguments with vLLM's names. Out: StructuredOutputsParams, checked as far as no tokenizer is needed. The grammar
itself is checked in structured/grammar.py, before the request enters the engine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanoinfer.errors import InvalidTypeError, InvalidValueError, check_flag
from nanoinfer.vllm_compat import named_arguments

_FORMS = ("json", "regex", "choice", "grammar", "json_object")


@named_arguments
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The value of SamplingParams(structured_outputs=...). Exactly one of the first five arguments is given.

    Args:
        json: a JSON schema, as a dict or as text. A keyword that cannot be enforced is refused.
        regex: a regular expression that the whole answer matches, without lookaround and back-references.
        choice: the strings that are allowed as the answer.
        grammar: a context-free grammar, in Lark's or in llama.cpp's notation (GBNF).
        json_object: True: the answer is any JSON object.
        disable_any_whitespace: whether JSON has no white space between its parts. vLLM's default is False.

    Raises:
        InvalidValueError: no format, several formats, or text that is not JSON.
        InvalidTypeError: a value of the wrong type, or an argument that does not exist.
    """

    json: str | Mapping[str, object] | None = None  # stored as text
    regex: str | None = None
    choice: Sequence[str] | None = None  # stored as a tuple
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = True

    def __post_init__(self) -> None:
        check_flag("disable_any_whitespace", self.disable_any_whitespace)
        if self.json_object is not None:
            check_flag("json_object", self.json_object)
        given = self._given()
        if len(given) != 1:
            raise InvalidValueError(
                f"structured_outputs needs exactly one of {', '.join(_FORMS)}, got {' and '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidTypeError(f"{name} must be a string, got {getattr(self, name)!r}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def form(self) -> str:
        """The name of the argument that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in _FORMS if getattr(self, name) not in (None, False)]


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
