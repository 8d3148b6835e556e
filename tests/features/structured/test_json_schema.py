"""Schemas of clients are rewritten so that every answer satisfies what the client wrote, or refused with the place."""

import json
import sys

import jsonschema
import pytest

from nanoinfer import StructuredOutputsParams
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.structured.grammar import GrammarCompiler
from nanoinfer.features.structured.json_schema import FORMATS, enforceable
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.client_schemas import pydantic_schemas, random_answer, zod_schemas

llguidance = pytest.importorskip("llguidance")

VOCAB_SIZE = 300
CHECKED = jsonschema.FormatChecker(["email", "ipv4", "ipv6", "uuid"])  # a date may be February 31: a grammar has no calendar
LARGEST = sys.float_info.max


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE)


def read_json(text):
    """Numbers like 1e999 are the largest ones."""
    return json.loads(text, parse_float=lambda digits: max(-LARGEST, min(float(digits), LARGEST)))


@pytest.mark.parametrize("num_answers", [2, pytest.param(8, marks=pytest.mark.long)])
def test_60_schemas_of_pydantic_and_zod_are_obeyed_but_for_those_refused_with_their_place(compiler, num_answers):
    schemas = [*pydantic_schemas(), *zod_schemas()]
    assert len(schemas) == 60
    for name, schema, refused in schemas:
        given = StructuredOutputsParams(json=schema)
        if refused is not None:
            with pytest.raises(InvalidValueError) as caught:
                compiler.compile(given)
            assert str(caught.value).startswith(f"{refused} cannot be used: these keywords cannot be enforced: "), name
            assert '"x-guidance": {"lenient": true}' in str(caught.value)
            continue
        state, seeds, answers = compiler.compile(given), iter(range(100)), []
        while len(answers) < num_answers:
            if (answer := random_answer(state, VOCAB_SIZE, next(seeds))) is not None:
                answers.append(answer)
                jsonschema.Draft202012Validator(schema, format_checker=CHECKED).validate(read_json(answer))


# ---- single rules


def matcher_of(schema):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)


def is_allowed(schema, text):
    matcher = matcher_of(enforceable("json", schema, whitespace_flexible=False))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()


def array(*values, **more):
    return {"type": "array", "uniqueItems": True, "items": {"enum": list(values)}} | more


LOOKS = {"type": "string", "pattern": "^(?!a)b"}
COLOR = {"$ref": "#/$defs/Color"}
WITH_COLOR = {"$defs": {"Color": {"title": "Color", "type": "string", "enum": ["r", "g"]}}}
KEYED = {"type": "object", "additionalProperties": {"type": "integer"}}
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}

LENIENT = {"x-guidance": {"lenient": True}}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)} | {"d2000": {"type": "integer"}}

# a schema, the texts that it allows, and those that it does not
RULES = {
    "unknown format": ({"type": "string", "format": "binary"}, ['"x"'], ["1"]),
    "known format": ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"x"']),
    "decimal or null": ({"anyOf": [{"type": "number"}, LOOKS, {"type": "null"}]}, ["1.5", "null"], ['"b"']),
    "alternative by reference": (
        {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "integer"}], "$defs": {"A": {"properties": {"a": {"items": LOOKS}}}}},
        ["1"],
        ['{"a":["b"]}'],
    ),
    "set": (array("a", 1, None), ["[]", "[1]", '["a",null,1]', '[null,1,"a"]'], ["[1,1]", '["a",1,"a"]', "[2]", "[1,null,1]"]),
    "set of five": (array(1, 2, 3, 4, 5), ["[5,1,4,2,3]", "[2]"], ["[1,2,3,4,5,1]", "[1,2,3,4,4]"]),
    "sizes of a set": (array(1, 2, 3, minItems=1, maxItems=2), ["[1]", "[3,1]"], ["[]", "[1,2,3]", "[1,1]"]),
    "set by reference": ({"type": "array", "uniqueItems": True, "items": COLOR, **WITH_COLOR}, ['["g","r"]'], ['["g","g"]']),
    "set in an old draft": (array(1, 2, **{"$schema": DRAFT_7}), ["[2,1]"], ["[1,1]", "[3]", "[1,2,3]"]),
    "doubled values": (array(1, 1, True), ["[1,true]"], ["[1,1]"]),
    "no set": ({"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, ["[1,1]"], ['["a"]']),
    "names of any kind": (KEYED | {"propertyNames": {"type": "string", "description": "a"}}, ['{"x":1}'], ['{"x":"a"}']),
    "names of true": (KEYED | {"propertyNames": True}, ['{"x":1}'], ['{"x":"a"}']),
    "names of an enum": (KEYED | {"propertyNames": COLOR, **WITH_COLOR}, ["{}", '{"g":1,"r":2}'], ['{"x":1}', '{"g":"a"}']),
    "required names": (
        KEYED | {"propertyNames": {"enum": ["a|b", "c"]}, "required": ["c", "a|b"]},
        ['{"c":1,"a|b":2}'],
        ['{"c":1}', '{"a":1}'],
    ),
    "names by a pattern": (KEYED | {"propertyNames": {"pattern": "^x+$"}}, ['{"xx":1}'], ['{"y":1}', '{"xx":"a"}']),
    "required without a schema": (CLOSED | {"required": ["b"]}, ['{"a":1,"b":[2]}', '{"b":1}'], ['{"a":1}', '{"b":1,"c":1}']),
    "order of properties": (CLOSED | {"properties": {"b": {}, "a": {}}}, ['{"b":1,"a":2}', '{"a":1}'], ['{"a":1,"b":2}']),
    "data": (
        {"enum": [{"not": 1}, {"format": "binary"}, {"uniqueItems": True}], "default": {"not": {}}, "examples": [LOOKS]},
        ['{"not":1}', '{"format":"binary"}', '{"uniqueItems":true}'],
        ["{}"],
    ),
    "keywords as names": (
        {"properties": {"not": {}, "format": {}, "pattern": {}, "$ref": {}, "required": {}}, "required": ["not", "$ref"]},
        ['{"not":1,"format":"binary","$ref":2}'],
        ["{}"],
    ),
    "unused definition": ({"type": "integer", "$defs": {"A": {"not": {}}}}, ["1"], ["a"]),
    "circle": (
        {"$ref": "#/$defs/A", "$defs": {"A": CLOSED | {"properties": {"a": {"$ref": "#/$defs/A"}, "b": array(1, 2)}}}},
        ['{"a":{"a":{},"b":[1]}}'],
        ['{"a":1}', '{"b":[1,1]}'],
    ),
    "whatever looks like look-around": ({"type": "string", "pattern": r"^[(?=)\]]\(\?=\\b$"}, [r'"=(?=\\b"'], ['"b"']),
    "lenient": (LENIENT | array(1) | {"items": {"pattern": r"\bword"}, "not": {}}, ['["x","x"]'], ["{}"]),
    "inheritance": (
        {"allOf": [{"$ref": "#/definitions/A"}, KEYED | {"required": ["b"]}], "definitions": {"A": {"required": ["a"]}}},
        ['{"a":1,"b":2}'],
        ['{"a":1}', '{"b":2}', '{"a":1,"b":""}'],
    ),
    "references as far as the stack allows": ({"$ref": "#/$defs/d1990", "$defs": CHAIN}, ["1"], ['"1"']),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rewritten_schema_allows_what_satisfies_it_and_nothing_else(rule):
    schema, allowed, refused = RULES[rule]
    before = json.dumps(schema)
    assert [text for text in allowed + refused if is_allowed(schema, text)] == allowed
    assert json.dumps(schema) == before  # it is the client's


# a schema, the place that is refused, and a word of the reason
REFUSED = {
    "not": ({"not": {}}, "json", '"not"'),
    "contains": ({"properties": {"x": {"contains": {}}}}, "json.properties.x", '"contains"'),
    "if": ({"allOf": [{"if": {}, "then": {}}]}, "json.allOf[0]", '"if", "then"'),
    "set": ({"items": {"type": "array", "uniqueItems": True}}, "json.items", '"uniqueItems" over items other'),
    "set of six": (array(1, 2, 3, 4, 5, 6), "json", "at most 5"),
    "set after many sets": (
        {"properties": {f"p{number}": array(1, 2, 3, 4, 5) for number in range(14)}},
        "json.properties.p13",
        "more than a dozen such arrays",
    ),
    "set of numbers": (array(1, 1.0), "json", '"uniqueItems"'),
    "null alone": ({"anyOf": [{"type": "null"}, LOOKS]}, "json.anyOf[1]", '"pattern" with look-around'),
    "word boundary": ({"properties": {"a.b": {"pattern": r"a\b"}}}, "json.properties.a.b", '"pattern" with look-around'),
    "back-reference": ({"prefixItems": [{"pattern": r"(a)\1"}]}, "json.prefixItems[0]", "back-reference"),
    "look-around in a name": ({"patternProperties": {"(?<=a)": {}}}, "json", '"patternProperties" with look-around'),
    "names by look-around": ({"propertyNames": LOOKS}, "json.propertyNames", '"pattern" with look-around'),
    "names of a format": ({"propertyNames": {"format": "date"}}, "json", '"propertyNames" other than'),
    "two names of an enum": (KEYED | {"propertyNames": COLOR, **WITH_COLOR, "minProperties": 2}, "json", "propertyNames"),
    "names and properties": (CLOSED | {"propertyNames": {"enum": ["a"]}}, "json", "beside properties"),
    "definition": ({"items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {"items": LOOKS}}}, "json.$defs.a/b.items", "pattern"),
    "definition behind definitions": (
        {"$ref": "#/definitions/A", "definitions": {"A": {"items": {"$ref": "#/definitions/B"}}, "B": {"not": {}}}},
        "json.definitions.B",
        '"not"',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_its_place_and_a_hint(case):
    schema, place, reason = REFUSED[case]
    with pytest.raises(InvalidValueError) as caught:
        enforceable("json", schema)
    message = str(caught.value)
    assert message.startswith(f"{place} cannot be used: these keywords cannot be enforced: ")
    assert reason in message
    assert message.endswith('; leave them out, or set "x-guidance": {"lenient": true} in the schema, which drops them')
    matcher = matcher_of(enforceable("json", {"x-guidance": {"lenient": True}, **schema}))
    assert not matcher.is_error()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5}, {"properties": [1]}, {"patternProperties": 5}, {"required": 5}, {"anyOf": 5}, {"items": 5}, {"$ref": 5},
        {"required": [[]], "additionalProperties": False}, {"$ref": "#/$defs/a/b"}, {"pattern": 5}, {"format": []},
        {"maxProperties": "a"}, {"pattern": "[(?=a"}, {"pattern": "[\\"},
    ],
)  # fmt: skip
def test_a_malformed_schema_is_left_to_llguidance_which_says_what_is_wrong(schema):
    assert matcher_of(enforceable("json", schema)).is_error()


def test_options_replace_those_of_the_client_who_keeps_the_others_and_long_schemas_are_read():
    enforceable("json", {"$ref": "#/$defs/d0", "$defs": CHAIN})  # deeper than the stack
    assert enforceable("json", {"x-guidance": None}, whitespace_flexible=True)["x-guidance"] == {"whitespace_flexible": True}
    schema = enforceable("json", {"x-guidance": {"lenient": True, "key_separator": "="}}, key_separator=":")
    assert schema == {"x-guidance": {"lenient": True, "key_separator": ":"}}
    with pytest.raises(InvalidValueError, match=r"^json.x-guidance must be an object such as .*, got 5$"):
        enforceable("json", {"x-guidance": 5})
    sets = {f"p{number}": array(1, 2, 3, 4, 5) for number in range(13)}  # as many as are written out
    free = array(1, 2) | {"uniqueItems": False}
    assert "uniqueItems" not in enforceable("json", {"properties": sets | {"z": free}})["properties"]["z"]


def test_the_formats_that_are_kept_are_those_that_llguidance_enforces():
    others = "binary byte cuid idn-email int32 iri json-pointer password path regex uri-reference url uuid4".split()
    assert others == [name for name in [*FORMATS, *others] if matcher_of({"type": "string", "format": name}).is_error()]
