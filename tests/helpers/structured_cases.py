"""JSON schemas in the shapes of real APIs, grammars that try to do harm, and a small model to draw from."""

import random

STR, INT, NUM, BOOL = ({"type": name} for name in ("string", "integer", "number", "boolean"))


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


def optional(schema: dict) -> dict:
    """As pydantic writes `T | None`."""
    return {"anyOf": [schema, {"type": "null"}], "default": None}


def ref(name: str) -> dict:
    return {"$ref": f"#/$defs/{name}"}


def defs(schema: dict, **definitions) -> dict:
    return schema | {"$defs": definitions}


POINT = obj(lat={"type": "number", "minimum": -90, "maximum": 90}, lon={"type": "number", "minimum": -180, "maximum": 180})
MONEY = obj(amount={"type": "integer", "minimum": 0}, currency=enum("usd", "eur", "gbp"))

HAND_WRITTEN = [
    obj(name=STR, age=INT),  # a person
    obj(city=STR, unit=enum("celsius", "fahrenheit")),  # get_current_weather
    obj("city", city=STR, unit=enum("celsius", "fahrenheit"), days={"type": "integer", "minimum": 1, "maximum": 14}),
    obj(steps=array(obj(explanation=STR, output=STR)), final_answer=STR),  # openai's maths tutor
    obj(label=enum("positive", "negative", "neutral"), confidence={"type": "number", "minimum": 0, "maximum": 1}),
    obj(name=STR, date=string(format="date"), participants=array(STR)),  # a calendar event
    obj(is_violating=BOOL, category=optional(enum("violence", "sexual", "self_harm")), explanation=optional(STR)),  # moderation
    defs(  # a user interface, recursive
        obj(type=enum("div", "button", "form"), label=STR, children=array(ref("ui"))),
        ui=obj(type=enum("div", "button", "form"), label=STR, children=array(ref("ui"), maxItems=2)),
    ),
    defs(obj(head=ref("node")), node=obj(value=NUM, next={"anyOf": [ref("node"), {"type": "null"}]})),  # a linked list
    obj(query=STR, filters=array(obj(field=STR, op=enum("eq", "lt", "gt"), value={"anyOf": [STR, NUM]}))),  # a search
    obj(sql=STR, tables=array(STR, minItems=1)),
    obj(amount=INT, currency=enum("usd", "eur"), customer=optional(STR), metadata={"type": "object"}),  # a charge
    {"type": "object", "additionalProperties": STR},  # labels
    {"type": "object", "additionalProperties": {"type": "array", "items": INT}},
    {"type": "object", "patternProperties": {"^x-": STR}, "additionalProperties": False},
    obj(id=string(format="uuid"), created_at=string(format="date-time"), url=string(format="uri")),
    obj(email=string(format="email"), ip=string(format="ipv4"), host=string(format="hostname")),
    obj(sku=string(pattern="^[A-Z]{3}-[0-9]{4}$"), price={"type": "number", "exclusiveMinimum": 0}),
    obj(phone=string(pattern=r"^\+?[0-9]{7,15}$"), zip=string(pattern=r"^\d{5}(-\d{4})?$")),
    obj(position=POINT, altitude=optional(NUM)),
    {"type": "object", "properties": {"type": {"const": "Point"}, "coordinates": array(NUM, minItems=2, maxItems=3)},
     "required": ["type", "coordinates"]},  # GeoJSON
    {"anyOf": [obj(kind={"const": "circle"}, radius=NUM), obj(kind={"const": "box"}, width=NUM, height=NUM)]},
    {"oneOf": [obj(kind={"const": "card"}, number=string(pattern="^[0-9]{16}$")), obj(kind={"const": "iban"}, iban=STR)]},
    defs({"anyOf": [ref("create"), ref("delete")]},
         create=obj(op={"const": "create"}, path=STR), delete=obj(op={"const": "delete"}, path=STR)),  # an operation
    array(obj(op=enum("add", "remove", "replace"), path=STR), minItems=1, maxItems=4),  # JSON patch
    obj(jsonrpc={"const": "2.0"}, method=STR, params={"anyOf": [array(STR), {"type": "object"}]}, id={"anyOf": [STR, INT]}),
    array(array(NUM, minItems=2, maxItems=2), maxItems=3),  # a matrix
    {"type": "array", "prefixItems": [STR, INT, BOOL], "minItems": 3, "items": False},  # a tuple
    {"type": ["string", "null"]},
    {"type": "string", "enum": ["GET", "POST", "PUT", "DELETE"]},
    {"const": {"status": "ok"}},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    string(minLength=3, maxLength=12),
    {"allOf": [{"type": "object", "properties": {"id": INT}, "required": ["id"]},
               {"type": "object", "properties": {"name": STR}, "required": ["name"]}]},  # OpenAPI's inheritance
    defs({"allOf": [ref("base"), {"properties": {"breed": enum("lab", "pug")}, "required": ["breed"]}]},
         base={"type": "object", "properties": {"name": STR}, "required": ["name"]}),
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/a", "title": "A",
     "description": "An answer", **obj(answer=STR), "examples": [{"answer": "yes"}]},
    {"definitions": {"pet": obj(name=STR)}, **array({"$ref": "#/definitions/pet"}, maxItems=3)},  # draft 7
    obj(apiVersion={"const": "v1"}, kind=enum("Pod", "Service"), metadata=obj("name", name=STR, labels={
        "type": "object", "additionalProperties": STR}), spec={"type": "object"}),  # Kubernetes
    obj(model=STR, messages=array(obj("role", role=enum("system", "user", "assistant"), content=optional(STR)), minItems=1),
        temperature={"type": "number", "minimum": 0, "maximum": 2}),  # a chat completion
    obj(tool=enum("search", "calculator"), arguments={"type": "object", "properties": {"q": STR}, "required": ["q"]}),
    obj(total=MONEY, items=array(obj(name=STR, quantity={"type": "integer", "minimum": 1}, price=MONEY)), paid=BOOL),
    obj(file=string(format="binary")),
    # what cannot be enforced is refused
    array(STR, uniqueItems=True),
    {"not": STR},
]  # fmt: skip

_NAMES = "id name title status url created_at updated_at type owner tags price count email locale size".split()


def generated(seed: int) -> dict:
    """A schema as an API's documentation has it: objects of objects and lists, with some constraints."""
    rng = random.Random(seed)
    leaves = [
        lambda: STR, lambda: INT, lambda: NUM, lambda: BOOL,
        lambda: enum(*rng.sample(_NAMES, rng.randint(2, 6))),
        lambda: string(maxLength=rng.choice([8, 64, 255])),
        lambda: string(format=rng.choice(["date", "date-time", "uuid", "email", "uri"])),
        lambda: string(pattern=rng.choice(["^[a-z]{2}$", "^[A-Z][a-z]+$", r"^v\d+\.\d+$", "^#[0-9a-f]{6}$"])),
        lambda: {"type": "integer", "minimum": rng.randint(0, 9), "maximum": rng.randint(10, 9999)},
        lambda: {"const": rng.choice(_NAMES)},
    ]  # fmt: skip

    def schema(depth: int) -> dict:
        kind = rng.random()
        if depth == 0 or kind < 0.4:
            return rng.choice(leaves)()
        if kind < 0.5:
            return optional(schema(depth - 1))
        if kind < 0.65:
            return array(schema(depth - 1), **({"maxItems": rng.randint(1, 4)} if rng.random() < 0.5 else {}))
        if kind < 0.7:
            return {"anyOf": [obj(kind={"const": name}, value=schema(depth - 1)) for name in rng.sample(_NAMES, 2)]}
        return whole(depth)

    def whole(depth: int) -> dict:
        names = rng.sample(_NAMES, rng.randint(1, 7))
        made = obj(" ".join(names[: rng.randint(0, len(names))]), **{name: schema(depth - 1) for name in names})
        if rng.random() < 0.2:
            del made["additionalProperties"]
        return made | ({"description": "What the caller gets."} if rng.random() < 0.3 else {})

    return whole(rng.randint(2, 4))


SCHEMAS = [*HAND_WRITTEN, *(generated(seed) for seed in range(200 - len(HAND_WRITTEN)))]


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
