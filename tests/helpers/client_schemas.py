"""60 schemas as clients write them: of pydantic models, which are made here, and of zod, in zod_schemas.json.

Of each: its name, the schema, and the place that is refused, or None.
"""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import uuid
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import (
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    Json,
    PostgresDsn,
    SecretStr,
    create_model,
)
from pydantic.types import UUID4, ByteSize, FilePath

from nanoinfer.features.structured.grammar import GrammarState
from tests.helpers.byte_tokenizer import EOS, TOKENS

Color = enum.Enum("Color", {"RED": "red", "GREEN": "green", "BLUE": "blue"})
Level = enum.IntEnum("Level", {"LOW": 1, "HIGH": 2})


class Point(NamedTuple):
    x: float
    y: float


class Address(BaseModel):
    """Where somebody lives."""

    street: str
    city: Annotated[str, Field(min_length=1, max_length=40)]
    zip: Annotated[str, Field(pattern=r"^\d{5}$")] | None = None


class Tagged(BaseModel):
    tags: set[str]


class Node(BaseModel):
    value: decimal.Decimal
    children: list["Node"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    breed: Color


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: pathlib.Path
    mode: Literal["r", "w"] = "r"


DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}  # of pydantic 2.11

# name -> the fields of a model, and the place that is refused
MODELS: dict[str, tuple[dict[str, Any], str | None]] = {
    "person": ({"name": str, "age": int, "email": str | None, "address": Address}, None),
    "secret": ({"user": str, "password": SecretStr, "token": SecretStr | None}, None),
    "files": ({"path": pathlib.Path, "file": FilePath, "content": bytes, "encoded": Base64Bytes}, None),
    "links": ({"home": HttpUrl, "any": AnyUrl, "database": PostgresDsn}, None),
    "identities": ({"id": uuid.UUID, "random": UUID4, "pattern": re.Pattern}, None),
    "networks": ({"ip": ipaddress.IPv4Address, "net": ipaddress.IPv4Network, "six": ipaddress.IPv6Address}, None),
    "times": ({"day": datetime.date, "at": datetime.datetime, "since": AwareDatetime, "took": datetime.timedelta}, None),
    "price": ({"amount": decimal.Decimal, "discount": decimal.Decimal | None}, None),
    "price of 2.11": ({"amount": Annotated[Any, Field(json_schema_extra=DECIMAL)]}, None),
    "tree": ({"root": Node}, None),
    "colors": ({"colors": set[Color], "levels": frozenset[Level]}, None),
    "some colors": ({"colors": Annotated[set[Color], Field(min_length=1, max_length=2)] | None}, None),
    "letters": ({"letters": set[Literal["a", "b", "c", "d", "e"]], "one": set[Literal["only"]]}, None),
    "by color": ({"counts": dict[Color, int], "by_letter": dict[Literal["a", "b"], Address]}, None),
    "by name": ({"counts": dict[str, int], "lists": dict[str, list[float]], "by_number": dict[int, str]}, None),
    "by code": ({"counts": dict[Annotated[str, Field(pattern="^[A-Z]{2}$")], int]}, None),
    "pets": ({"pet": Annotated[Cat | Dog, Field(discriminator="kind")], "others": list[Cat | Dog]}, None),
    "tuples": ({"pair": tuple[int, str], "many": tuple[bool, ...], "point": Point}, None),
    "limits": ({"a": Annotated[int, Field(gt=0, lt=100)], "b": Annotated[float, Field(ge=0, le=1)], "c": ByteSize}, None),
    "texts": ({"a": Annotated[str, Field(max_length=3)], "b": Annotated[str, Field(pattern="^(x|y)+$")]}, None),
    "lists": ({"a": Annotated[list[int], Field(min_length=1, max_length=3)], "b": list[list[bool]]}, None),
    "anything": ({"a": Any, "b": dict, "c": list, "d": None}, None),
    "literals": ({"a": Literal["x", 1, None, True], "b": Level, "c": Literal["only"]}, None),
    "json": ({"a": Json, "b": Json[list[int]]}, None),
    "strict": ({"opened": Strict, "more": list[Strict]}, None),
    "fallback": ({"value": set[str] | Color}, None),
    "tags": ({"tags": set[str]}, "json.properties.tags"),
    "tags of an address": ({"owner": Tagged, "name": str}, "json.$defs.Tagged.properties.tags"),
    "perhaps tags": ({"tags": set[str] | None}, "json.properties.tags.anyOf[0]"),
    "words": ({"items": list[Annotated[str, Field(pattern=r"\bword\b")]]}, "json.properties.items.items"),
}


def pydantic_schemas() -> list[tuple[str, dict[str, Any], str | None]]:
    """The schemas of the models."""
    made = []
    for name, (fields, refused) in MODELS.items():
        model = create_model("Model", **{field: (kind, ...) for field, kind in fields.items()})
        made.append((f"pydantic {name}", model.model_json_schema(), refused))
    return made


def zod_schemas() -> list[tuple[str, dict[str, Any], str | None]]:
    """The schemas that zod has written."""
    written = json.loads(pathlib.Path(__file__).with_name("zod_schemas.json").read_text())
    return [(f"zod {name}", one["schema"], one.get("refused")) for name, one in written.items()]


def random_answer(state: GrammarState, vocab_size: int, seed: int) -> str | None:
    """Follow a grammar at random, and end where it may end. None: the answer became too long."""
    state, rng, answer = state.copy(), random.Random(seed), b""
    forbidden = np.empty(vocab_size, dtype=np.uint8)
    for _ in range(3000):
        state.write_forbidden(forbidden, [EOS])
        assert state.error is None
        allowed = np.flatnonzero(forbidden == 0).tolist()
        if not allowed or EOS in allowed:
            return answer.decode()
        likely = [token for token in allowed if TOKENS[token] in (b'"', b"]", b"}")] if rng.random() < 0.3 else []
        token = rng.choice(likely or allowed)
        state.advance(token)
        answer += TOKENS[token]
    return None
