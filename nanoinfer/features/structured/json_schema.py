"""Rewrite a JSON schema as llguidance can enforce it. Every answer still satisfies the schema that the client wrote.

In: a schema. Out: the schema for llguidance, or an error with the place of the part that cannot be enforced.
llguidance's own option `lenient` would drop keywords in silence, so only a client that asks for it in x-guidance gets it.
"""

import json
import re
from itertools import permutations
from typing import Any
from urllib.parse import unquote

from nanoinfer.errors import InvalidValueError

MAX_STRING = 2**13  # characters of a single string in a schema
MAX_NESTING = 64  # levels of a schema
MAX_UNIQUE, MAX_ORDERS = 5, 1500  # values whose orders are written out, and orders that a schema may have
FORMATS = frozenset("date date-time duration email hostname ipv4 ipv6 time unknown uri uuid".split())  # llguidance's
_ANNOTATIONS = frozenset("title description default examples deprecated readOnly writeOnly $comment id".split())
_MAPS = ("properties", "patternProperties")
# Keywords whose value is a schema or a list of schemas.
_HOLDERS = frozenset("items prefixItems additionalItems additionalProperties propertyNames allOf oneOf anyOf".split())
_TYPES = {"string": str, "integer": int, "number": int, "boolean": bool, "null": type(None)}
# The type that a keyword's value must have before it is read here.
_KINDS = dict.fromkeys(_MAPS, dict) | dict.fromkeys(("required", "anyOf", "enum"), list) | {"maxProperties": int}
_UNENFORCED = dict.fromkeys("not if then else contains dependencies dependentRequired dependentSchemas".split(), "") | {
    "propertyNames": " other than an enum or a pattern, or beside properties",  # in which uses it cannot be enforced
    "uniqueItems": f" over items other than the values of an enum, at most {MAX_UNIQUE}, or in more than a dozen such arrays",
}
# An escaped character, a class of characters, or what llguidance cannot follow.
_REGEX_PART = re.compile(r"\\[^bB<>1-9k]|\[\^?\]?(?:\\.?|[^\]\\])*(?:\]|\Z)|(?P<looks>\(\?<?[=!]|\\[bB<>1-9k])", re.DOTALL)


def enforceable(place: str, schema: object, **options: object) -> dict[str, Any]:
    """Return a schema for llguidance, with its options, whose answers satisfy the one that a client wrote at this place.

    Raises: InvalidValueError, for deep nesting, long strings, and a part that cannot be enforced.
    """
    _check_size(place, schema)
    root: dict[str, Any] = json.loads(json.dumps(schema))
    if not isinstance(given := root.get("x-guidance") or {}, dict):
        raise InvalidValueError(f'{place}.x-guidance must be an object such as {{"lenient": true}}, got {given!r:.99}')
    root["x-guidance"] = given | options
    _Rewriter(place, root).visit(root, place)
    return root


def _check_size(place: str, value: object, depth: int = 0) -> None:
    """Refuse deep nesting and long strings. Descriptions are not read, but count."""
    if depth > MAX_NESTING:
        raise InvalidValueError(f"{place} must be nested at most {MAX_NESTING} deep")
    if isinstance(value, str) and len(value) > MAX_STRING:
        raise InvalidValueError(f"each string of {place} must have at most {MAX_STRING} characters, got {len(value)}")
    for child in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_size(place, child, depth + 1)


class _Rewriter:
    """Rewrites a schema in place, and remembers the parts that were visited and why they are refused."""

    def __init__(self, place: str, root: dict[str, Any]) -> None:
        self.place, self.root, self.num_orders = place, root, 0
        self.refusals: dict[int, InvalidValueError | None] = {}  # by the id of a part that was visited

    def visit(self, part: object, place: str, depth: int = 0) -> None:
        """Rewrite a part of the schema in place, and what it refers to. Raises: InvalidValueError, if it cannot be enforced."""
        if isinstance(part, dict) and id(part) not in self.refusals and depth < 2 * MAX_NESTING:
            self.refusals[id(part)] = None
            try:
                self.rewrite(part, place, depth + 1)
            except InvalidValueError as error:
                self.refusals[id(part)] = error
        if refusal := self.refusals.get(id(part)):
            raise refusal

    def rewrite(self, schema: dict[str, Any], place: str, depth: int) -> None:
        if not all(isinstance(schema[keyword], _KINDS[keyword]) for keyword in schema.keys() & _KINDS.keys()):
            return  # llguidance says what is wrong
        self.visit_parts(schema, place, depth)
        if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
            del schema["format"]  # by JSON Schema an annotation
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            named = schema.get("properties", {})  # what is required, but not named, may be anything
            schema["properties"] = named | dict.fromkeys(map(str, schema.get("required", ())), True) | named
        if "propertyNames" in schema:
            self.write_out_names(schema)
        if "uniqueItems" in schema:
            self.write_out_items(schema)
        unenforced = {keyword: _UNENFORCED[keyword] for keyword in sorted(schema.keys() & _UNENFORCED.keys())}
        patterns = [*schema.get("patternProperties", ()), str(schema.get("pattern", ""))]
        if any(part["looks"] for pattern in patterns for part in _REGEX_PART.finditer(pattern)):
            unenforced["pattern" if "pattern" in schema else "patternProperties"] = r" with look-around, \b or a back-reference"
        if unenforced and not self.root["x-guidance"].get("lenient"):
            names = ", ".join(f'"{keyword}"{use}' for keyword, use in unenforced.items())
            hint = 'leave them out, or set "x-guidance": {"lenient": true} in the schema, which drops them'
            raise InvalidValueError(f"{place} cannot be used: these keywords cannot be enforced: {names}; {hint}")
        for keyword in unenforced:
            del schema[keyword]

    def visit_parts(self, schema: dict[str, Any], place: str, depth: int) -> None:
        """Rewrite what a schema holds. An alternative that cannot be enforced is dropped if another one than null remains."""
        if "$ref" in schema:
            self.visit(*self.target(schema["$ref"]), depth)
        for keyword in _MAPS:
            for name, part in schema.get(keyword, {}).items():
                self.visit(part, f"{place}.{keyword}.{name}", depth)
        refused: dict[int, InvalidValueError] = {}
        for keyword in sorted(schema.keys() & _HOLDERS):
            for index, part in enumerate(held if isinstance(held := schema[keyword], list) else [held]):
                try:
                    self.visit(part, f"{place}.{keyword}" + (f"[{index}]" if isinstance(held, list) else ""), depth)
                except InvalidValueError as error:
                    if keyword != "anyOf":
                        raise
                    refused[index] = error
        rest = [part for index, part in enumerate(schema.get("anyOf", ())) if index not in refused and part is not False]
        if refused and all(isinstance(part, dict) and part.get("type") == "null" for part in rest):
            raise next(iter(refused.values()))
        for index in refused:
            schema["anyOf"][index] = False  # the others keep their indices, which a $ref may have

    def write_out_names(self, schema: dict[str, Any]) -> None:
        """Replace propertyNames by patternProperties, or drop it if it says nothing. It stays where neither is possible."""
        names = given if isinstance(given := schema["propertyNames"], dict) else {} if given is True else {"not": {}}
        said = names.keys() - _ANNOTATIONS - ({"type"} if names.get("type") == "string" else set())
        keys = [re.escape(key) for key in self.values(names) if isinstance(key, str)]
        if said:  # a format beside the pattern is an annotation
            pattern = f"^(?:{'|'.join(keys)})$" if keys else str(names["pattern"]) if said - {"format"} == {"pattern"} else ""
            if not pattern or schema.keys() & {*_MAPS} or schema.get("minProperties", 0) not in (0, 1):  # a name may come twice
                return
            schema |= {"patternProperties": {pattern: schema.get("additionalProperties", True)}, "additionalProperties": False}
            if keys:  # a grammar that requires all of them must end after them
                schema["maxProperties"] = min(schema.get("maxProperties", len(keys)), len(keys))
        del schema["propertyNames"]

    def write_out_items(self, schema: dict[str, Any]) -> None:
        """Replace uniqueItems by all orders of the few values that the items may have. It stays where that is not possible."""
        values = self.values(schema.get("items"))
        if schema["uniqueItems"] is False:
            del schema["uniqueItems"]
        elif (
            self.num_orders < MAX_ORDERS
            and schema.get("type") == "array"
            and 0 < len(values) <= MAX_UNIQUE
            and not schema.keys() & {"prefixItems", "allOf"}
        ):
            orders = [{"type": "array", "items": [{"const": value} for value in order]} for order in permutations(values)]
            self.num_orders += len(orders)
            # A shorter list is the beginning of an order.
            schema["allOf"] = [{"type": "array", "maxItems": len(values), "anyOf": orders}]
            del schema["uniqueItems"], schema["items"]

    def values(self, schema: Any) -> list[Any]:
        """Return the values of an enum that a grammar writes in one way only. []: other schemas."""
        if isinstance(schema, dict) and schema.keys() - _ANNOTATIONS == {"$ref"}:
            schema, _ = self.target(schema["$ref"])
        if not isinstance(schema, dict) or not isinstance(values := schema.get("enum", [schema.get("const")]), list):
            return []
        kinds = {_TYPES.get(str(schema["type"]))} if "type" in schema else {*_TYPES.values()}
        is_plain = schema.keys() - _ANNOTATIONS - {"type"} in ({"enum"}, {"const"}) and {*map(type, values)} <= kinds
        return [*{json.dumps(value): value for value in values}.values()] if is_plain else []

    def target(self, reference: object) -> tuple[Any, str]:
        """Return what a reference such as #/$defs/A names, and its place. None: not found here, but perhaps by llguidance."""
        part: Any = self.root
        start, *names = [name.replace("~1", "/").replace("~0", "~") for name in unquote(str(reference)).split("/")]
        for name in names:
            part = part.get(name) if isinstance(part, dict) else None
        return part if start == "#" else None, ".".join([self.place, *names])
