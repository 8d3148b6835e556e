"""Arguments, each declared once: `temperature: Annotated[float, Ge(0), Doc("Divides the logits.")] = 1.0`.

In: the fields of a dataclass with their ranges and meanings, and the arguments of a call. Out: plain values, or an error that
names the argument; the docstring's Args; and the Declarations, from which other files make the command line's options
(cli/options.py), the fields of HTTP (server/protocol.py) and the tables of docs/supported.md.
"""

import functools
import inspect
import math
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from types import NoneType
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_args, get_origin

from annotated_types import Ge, Interval
from typing_extensions import Doc

import nanoinfer
from nanoinfer.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_flag,
    check_integer,
    check_number,
    is_one_of,
    out_of_range,
    shown,
    suggest,
)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

FIELDS = "Args: as declared below."  # stands in a dataclass's docstring where `declared` inserts its fields


@dataclass(frozen=True)
class Allowed:
    """What messages say is allowed, instead of the range. If `text` has words in quotes, a string must be one of them."""

    text: str


@dataclass(frozen=True)
class Hint:
    """What messages advise, after the range."""

    text: str


@dataclass(frozen=True)
class Option:
    """An option of every command that generates, and a parameter that /set of a chat changes."""

    short_name: str | None = None


@dataclass(frozen=True)
class Bytes:
    """A number of bytes. On a command line, size_in_bytes reads it."""


@dataclass(frozen=True)
class Declaration:
    """A parameter as its class declares it. kind: the type without None. default: dataclasses.MISSING without a default."""

    name: str
    kind: object
    or_none: bool
    default: object
    markers: tuple[object, ...]  # Ge or Interval, Allowed, Hint, Option, Bytes and Doc

    def marker(self, kind: type[T]) -> T | None:
        return next((one for one in self.markers if isinstance(one, kind)), None)

    @cached_property
    def interval(self) -> Any:
        return self.marker(Interval) or Interval(ge=getattr(self.marker(Ge), "ge", None))

    @cached_property
    def allowed(self) -> str:
        """What messages say is allowed, with a hint after a semicolon. Empty without a range."""
        low, high, above = self.interval.ge, self.interval.le, self.interval.gt
        stated, hint = self.marker(Allowed), self.marker(Hint)
        least, bracket = (f">= {low}", f"[{low}") if above is None else (f"> {above}", f"({above}")
        if stated is not None or (low is None and above is None):
            text = "" if stated is None else stated.text
        elif high is None:
            text = f"finite and {least}" if self.kind is float else least
        else:
            text = f"in {low} .. {high}" if self.kind is int else f"in {bracket}, {high}]"
        return text if hint is None else f"{text}; {hint.text}"

    @cached_property
    def sentences(self) -> list[str]:
        """What the parameter does, in sentences. The first must make sense alone. The range follows it."""
        doc, has_range = self.marker(Doc), self.kind in (int, float) and self.allowed
        first, *more = re.split(r"(?<=\.) ", "" if doc is None else doc.documentation)
        allowed = [f" {one[0].upper()}{one[1:]}." for one in self.allowed.split("; ")] if has_range else []
        return ["".join([first, *allowed]), *more]

    @cached_property
    def text_type(self) -> Any:
        """The type of the value on a command line: bool, int, float, str, dict (JSON) or a list. None: text cannot give it."""
        found = re.search(r"\b(bool|int|float|str|Mapping)\b", str(self.kind))
        kind = {"bool": bool, "int": int, "float": float, "str": str, "Mapping": dict}[found[1]] if found else None
        return list[kind] if kind is not None and "Sequence" in str(self.kind) else kind

    def read(self, value: Any) -> object:
        """Check a value of a simple kind, and return it as a plain number. Values of other kinds are returned as they are."""
        low, high, above = self.interval.ge, self.interval.le, self.interval.gt
        if value is None and self.or_none:
            return None
        if self.kind is bool:
            check_flag(self.name, value)
        elif self.kind is int and low is not None:
            check_integer(self.name, value, low, high, self.allowed, or_none=self.or_none)
            return int(value)
        elif self.kind is float:
            low = math.nextafter(above, math.inf) if low is None else low
            check_number(self.name, value, low, math.inf if high is None else high, self.allowed)
            return float(value)
        elif self.kind is str:
            if (words := re.findall(r"'(\w+)'", self.allowed)) and not is_one_of(value, words):
                raise out_of_range(self.name, value, self.allowed)
            if not isinstance(value, str):
                raise InvalidTypeError(f"{self.name} must be {self.allowed or 'a string'}, got {shown(value)}")
        return value


@cache
def declarations(cls: Any, described_by: type | None = None) -> dict[str, Declaration]:
    """Return what a dataclass declares, by name. described_by: a class whose markers apply to fields without markers."""
    described = {} if described_by is None else declarations(described_by)
    found = {}
    for field in fields(cls):
        kind, *markers = get_args(field.type) if get_origin(field.type) is Annotated else (field.type,)
        if not markers and field.name in described:
            markers = [*described[field.name].markers]
        types = [one for one in get_args(kind) if one is not NoneType]
        or_none = len(types) < len(get_args(kind))
        kind = types[0] if or_none and len(types) == 1 else kind
        found[field.name] = Declaration(field.name, kind, or_none, field.default, tuple(markers))
    return found


def read_fields(instance: Any, described_by: type | None = None) -> None:
    """Check the fields of an instance, and make them plain numbers. described_by: as for declarations."""
    cls: Any = type(instance)
    for declaration in declarations(cls, described_by).values():
        object.__setattr__(instance, declaration.name, declaration.read(getattr(instance, declaration.name)))


def declared(cls: type[T]) -> type[T]:
    """Decorate a dataclass of arguments: its docstring lists them, and unknown arguments are refused by name."""
    made: Any = cls
    marked = made.__init__.__annotations__.items()  # without markers a signature is easier to read
    types = {name: get_args(one)[0] if get_origin(one) is Annotated else one for name, one in marked}
    made.__init__.__annotations__ = {name: getattr(one, "__forward_arg__", one) for name, one in types.items()}
    made.__init__ = check_argument_names(cls.__name__)(made.__init__)
    wrap = textwrap.TextWrapper(124, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)
    entries = [wrap.fill(f"{name}: {' '.join(one.sentences)}") for name, one in declarations(made).items()]
    cls.__doc__ = inspect.cleandoc(cls.__doc__ or "").replace(FIELDS, "\n".join(["Args:", *entries]))
    return cls


def arguments_of(arguments: Callable[P, T], owner: str) -> Callable[[Callable[[S, T], R]], Callable[Concatenate[S, P], R]]:
    """Decorate a method that takes a dataclass of arguments, so that it is called with the dataclass's own arguments.

    The signature becomes that of the dataclass, for type checkers and for `inspect.signature`, and is checked as
    check_argument_names does.
    """

    def decorate(method: Callable[[S, T], R]) -> Callable[Concatenate[S, P], R]:
        def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(self, arguments(*args, **kwargs))

        parameters = inspect.signature(arguments).parameters.values()
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        functools.update_wrapper(called, method)
        called.__signature__ = inspect.Signature([own, *parameters], return_annotation=None)  # type: ignore[attr-defined]
        called.__doc__ = "\n\n".join(filter(None, map(inspect.getdoc, (method, arguments))))
        return check_argument_names(owner)(called)

    return decorate


def check_argument_names(owner: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method, so that wrong arguments are refused by name before Python's own bare TypeError.

    The signature stays that of the decorated method, for type checkers and for `inspect.signature`. The method then raises
    InvalidTypeError for an argument that is unknown, missing or not given by name. vLLM's further arguments
    (compat/vllm/neutral.py) are ignored, passed on under nanoinfer's name, or refused with UnsupportedError.
    owner: the name in the messages, such as "LLM()".
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]  # without self
        known = [parameter.name for parameter in parameters]
        positional = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]

        @functools.wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if (surplus := args[1 + len(positional) :]) and len(known) > len(positional):
                after = f" after {positional[-1]}" if positional else ""
                hint = f"write {known[len(positional)]}={shown(surplus[0])}"
                raise InvalidTypeError(f"{owner} takes keyword arguments only{after}, got {shown(surplus)}; {hint}")
            for name in [name for name in kwargs if name not in known]:
                value = kwargs.pop(name)
                if (ours := nanoinfer.argument_of_vllm(owner, name, value)) is None:
                    hint = suggest(name, known)
                    if {"sampling_params", "max_model_len"} & {*known} and name in nanoinfer.SamplingParams.__annotations__:
                        hint = f"it is an argument of SamplingParams: SamplingParams({name}={shown(value)})"
                    raise InvalidTypeError(f"{owner} has no argument {name!r}; {hint}")
                if ours and value is not None:
                    if ours in kwargs or ours in positional[: len(args) - 1]:
                        raise InvalidTypeError(f"{owner} got {ours} twice: {name} is another name for it; leave one out")
                    kwargs[ours] = value
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # an argument is missing, or given twice
                raise InvalidTypeError(f"{owner}: {error}") from None
            return method(*args, **kwargs)

        return checked

    return decorate


def size_in_bytes(text: str) -> int:
    """Read a number of bytes, where K, M, G and T are powers of 1,024. Raises: InvalidValueError.

    >>> size_in_bytes("1.5G"), size_in_bytes("512MiB"), size_in_bytes("4096")
    (1610612736, 536870912, 4096)
    """
    matched = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) ?(?:([KMGT])(?:I?B)?)?", text.strip().upper())
    if matched is None:
        raise InvalidValueError(f"{text!r} is not a size; give bytes, such as 536870912, or 512M, or 1.5G")
    number, unit = matched.groups()
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))
