"""JSON schemas of clients, and grammars that try to do harm."""

import random

from tests.helpers.client_schemas import pydantic_schemas, zod_schemas

STR, INT = {"type": "string"}, {"type": "integer"}


def obj(_required: str = "*", **properties) -> dict:
    """An object. _required: names, all of them with "*". No further properties, as openai's strict mode demands."""
    required = list(properties) if _required == "*" else _required.split()
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def array(items: dict, **more) -> dict:
    return {"type": "array", "items": items, **more}


def enum(*values) -> dict:
    return {"enum": list(values)}


def string(**more) -> dict:
    return STR | more


def ref(name: str) -> dict:
    return {"$ref": f"#/$defs/{name}"}


def defs(schema: dict, **definitions) -> dict:
    return schema | {"$defs": definitions}


# every kind of schema that clients write and that can be enforced
SCHEMAS = [schema for _, schema, refused in (*pydantic_schemas(), *zod_schemas()) if refused is None]


def _chain(n: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: "a"? r{i + 1}?' for i in range(n)) + f'\nr{n}: "b"'


def _nested(depth: int) -> dict:
    return {"type": "array", "items": _nested(depth - 1)} if depth else INT


def _references(n: int, **link) -> dict:
    return defs(ref("d0"), **{f"d{i}": link or ref(f"d{i + 1}") for i in range(n)}, **{f"d{n}": INT})


# name -> a grammar of a size: how it grows with n is how it hurts
ADVERSARIAL = {
    "repeated repetition": lambda n: {"regex": f"(a{{{n}}}){{{n}}}"},
    "long repetition": lambda n: {"regex": f"a{{{n**3}}}"},
    "optional letters": lambda n: {"regex": "a?" * n + "a" * n},
    "stars": lambda n: {"regex": "(a*)*" * n},
    "exponential automaton": lambda n: {"regex": f".*(a|b).{{{n}}}"},
    "parentheses": lambda n: {"regex": "(" * n + "a" + ")" * n},
    "unclosed": lambda n: {"regex": "(" * n},
    "unicode": lambda n: {"regex": rf"\p{{L}}{{{n}}}"},
    "lookahead": lambda n: {"regex": "(?=a)b" * n},
    "many words": lambda n: {"choice": [f"word {i}" for i in range(n)]},
    "lone surrogates": lambda n: {"choice": ["\ud800" * n]},
    "intersection": lambda n: {"grammar": "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b/" for i in range(min(n, 60)))},
    "chain of rules": lambda n: {"grammar": _chain(n)},
    "left recursion": lambda n: {"grammar": 'start: start start | "a" | '},
    "ambiguity": lambda n: {"grammar": "start: s\ns: " + "s " * n + '| "a" | '},
    "no word at all": lambda n: {"grammar": "start: a\na: b\nb: a"},
    "optional parts": lambda n: {"grammar": "start: " + '"a"? ' * n},
    "doubling rules": lambda n: {
        "grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(n)), f'r{n}: "a"'])
    },
    "doubling terminals": lambda n: {
        "grammar": "\n".join(["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(n)), f'R{n}: "a"'])
    },
    "deep brackets": lambda n: {"grammar": "root ::= " + "(" * n + '"a"' + ")" * n},
    "not a grammar": lambda n: {"grammar": "\x00::=" * n},
    "long constant": lambda n: {"json": {"const": "x" * n * 5}},
    "large enum": lambda n: {"json": {"enum": list(range(n * 5))}},
    "deep schema": lambda n: {"json": _nested(min(n, 400))},
    "many properties": lambda n: {"json": {"type": "object", "properties": {f"p{i}": STR for i in range(n)}}},
    "chain of references": lambda n: {"json": _references(n)},
    "endless reference": lambda n: {"json": _references(n, **ref("d0"))},
    "required recursion": lambda n: {"json": obj(a={"$ref": "#"}, **{f"p{i}": INT for i in range(min(n, 50))})},
    "product of alternatives": lambda n: {
        "json": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": k}}} for k in range(4)]} for i in range(min(n, 40))]}
    },
    "long array": lambda n: {"json": {"type": "array", "items": INT, "minItems": n**3}},
    "adversarial pattern": lambda n: {"json": string(pattern=f"(a{{{n}}}){{{n}}}")},
    "multiples": lambda n: {"json": {"type": "integer", "multipleOf": 10 * n + 7, "maximum": 10**17}},
    "alternatives of objects": lambda n: {"json": {"anyOf": [obj(**{f"a{i}": STR}) for i in range(n)]}},
}  # fmt: skip


def adversarial(number: int) -> tuple[str, dict]:
    """A name and the arguments of StructuredOutputsParams. Later numbers are larger, up to 3,000 in most cases."""
    name = list(ADVERSARIAL)[number % len(ADVERSARIAL)]
    size = random.Random(number).choice([3, 10, 30, 100, 300, 1000, 3000])
    return f"{name} {size}", ADVERSARIAL[name](size)
