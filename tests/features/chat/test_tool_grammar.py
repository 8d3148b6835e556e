"""Tools reach the template as schemas, and required or strict calls have a grammar."""

import random
import re

import pytest

from nanoinfer import parse_chat_answer
from nanoinfer.errors import InvalidTypeError, InvalidValueError
from nanoinfer.features.chat.tools import check_tool_choice, tool_call_grammar, tool_schemas, with_tool_arguments

CITY = {"type": "string", "maxLength": 5}
WEATHER = {"type": "object", "properties": {"city": CITY, "unit": {"enum": ["c", "f"]}}, "required": ["city", "unit"]}


def tool(name: str, parameters: dict | None = None, **fields) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | fields}


TOOLS = [tool("weather", WEATHER), tool("night")]
STRICT = [tool("weather", WEATHER, strict=True), tool("night", {"type": "object"})]
NAMED = {"type": "function", "function": {"name": "night"}}


def calling(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


OSLO = calling("weather", '{"city": "Oslo", "unit": "c"}')
MORE = calling("weather", '{"city": "Oslo", "unit": "c", "a": 1}')
LONG = calling("weather", '{"city": "Stavanger", "unit": "c"}')
NIGHT = calling("night")
THOUGHT = "<think>\nA <tool_call>?\n</think>\n\n"

# (tools, tool_choice, the prompt's end, parallel_tool_calls, what the grammar accepts, what it refuses)
GRAMMARS = {
    "required": (TOOLS, "required", "", True, [OSLO, NIGHT, OSLO + "\n" + NIGHT, THOUGHT + OSLO], ["", LONG, MORE, OSLO + "a"]),
    "one call": (TOOLS, "required", "", False, [OSLO, NIGHT], [OSLO + "\n" + NIGHT, ""]),
    "thinking opened": (TOOLS, "required", "<think>\n", True, ["a\n</think>\n\n" + OSLO], [OSLO, "a"]),
    "thinking off": (TOOLS, "required", "<think>\n\n</think>\n\n", True, [OSLO], [THOUGHT + OSLO]),
    "named": (TOOLS, NAMED, "", True, [NIGHT, THOUGHT + NIGHT], [OSLO, NIGHT + "\n" + NIGHT, calling("night", '{"a": 1}')]),
    "strict": (
        STRICT,
        "auto",
        "",
        True,
        ["", "a <tool", "a\n" + OSLO + NIGHT + " b", calling("night", '{"a": [1, {}]}'), THOUGHT.replace("_", "") + "b"],
        ["<tool_call>a", LONG, "a\n" + OSLO + LONG],
    ),
}


def matcher_of(grammar: str):
    llguidance = pytest.importorskip("llguidance")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.grammar_from("grammar", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def num_consumed(grammar: str, text: str) -> int:
    return matcher_of(grammar).try_consume_tokens([*text.encode()])


@pytest.mark.parametrize("case", GRAMMARS)
def test_a_grammar_accepts_calls_that_satisfy_the_schemas_and_no_others(case):
    tools, choice, prompt, parallel, accepted, refused = GRAMMARS[case]
    grammar = tool_call_grammar(tools, choice, prompt=prompt, parallel_tool_calls=parallel)
    for text in accepted + refused:
        matcher = matcher_of(grammar)
        is_accepted = matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and matcher.is_accepting()
        assert is_accepted == (text in accepted), text


def test_random_bytes_under_a_required_grammar_are_calls():
    grammar = tool_call_grammar(TOOLS, "required", prompt="</think>", parallel_tool_calls=False)
    start = matcher_of(grammar)
    for seed in range(20):
        matcher, rng, answer = start.deep_copy(), random.Random(seed), b""
        while not matcher.is_stopped():
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            byte = rng.choice([byte for byte in range(256) if bits >> byte & 1])
            matcher.consume_token(byte)
            answer += bytes([byte])
        message = parse_chat_answer(answer.decode())
        assert message["content"] is None
        assert [call["function"]["name"] in ("weather", "night") for call in message["tool_calls"]] == [True]


def test_a_free_answer_has_no_grammar_and_parameters_have_the_limits_of_a_schema():
    for tools, choice in ((TOOLS, "auto"), (STRICT, "none"), ([], "auto")):
        assert tool_call_grammar(tools, choice, prompt="") is None
    deep = {"type": "object"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    assert tool_call_grammar([tool("f", deep)], "auto", prompt="") is None
    with pytest.raises(InvalidValueError, match=r"^tools\[1\].parameters must be nested at most 64 deep"):
        tool_call_grammar([TOOLS[0], tool("f", deep)], "required", prompt="")
    with pytest.raises(InvalidValueError, match=r"^each string of tools\[0\].parameters must have at most 8192"):
        tool_call_grammar([tool("f", {"const": "a" * 9000}, strict=True)], "auto", prompt="")


LOOKS = {"type": "string", "pattern": r"^(?!/)/usr/\bbin"}
ADDRESS = {"type": "object", "properties": {"x": LOOKS}}


@pytest.mark.parametrize(("choice", "more"), [("required", {}), ("auto", {"strict": True}), ("named", {})])
def test_what_cannot_be_enforced_is_refused_with_the_tool_and_the_place(choice, more):
    schema = {"type": "object", "properties": {"to": {"$ref": "#/$defs/Address"}}, "$defs": {"Address": ADDRESS}}
    choice = {"type": "function", "function": {"name": "f"}} if choice == "named" else choice
    place = re.escape("tools[3].parameters.$defs.Address.properties.x cannot be used: these keywords cannot be enforced")
    with pytest.raises(InvalidValueError, match=f'^{place}: "pattern" with look-around.* set "x-guidance"'):
        tool_call_grammar([*TOOLS, tool("night"), tool("f", schema, **more)], choice, prompt="")
    lenient = tool_call_grammar([tool("f", schema | {"x-guidance": {"lenient": True}}, **more)], choice, prompt="")
    text = calling("f", '{"to": {"x": "anything"}}')
    assert num_consumed(lenient, text) == len(text)


def test_tools_have_the_schemas_that_clients_write():
    fields = {"price": {"anyOf": [{"type": "number"}, LOOKS]}, "file": {"type": "string", "format": "binary"}}
    fields["colors"] = {"type": "array", "items": {"enum": ["r", "g"]}, "uniqueItems": True}
    schema = {"type": "object", "properties": fields, "required": ["price", "absent"]}
    grammar = tool_call_grammar([tool("f", schema)], "required", prompt="</think>")
    for arguments in ('{"price": 1.5, "file": "a", "colors": ["g", "r"], "absent": [1]}', '{"price": 2, "absent": null}'):
        text = calling("f", arguments)
        assert num_consumed(grammar, text) == len(text)
    for arguments in ('{"price": "/usr", ', '{"price": 1, "colors": ["g", "g"', '{"price": 1}', '{"price": 1, "absent": 1, "b'):
        text = calling("f", arguments)
        assert num_consumed(grammar, text) < len(text) - len("}\n</tool_call>")


def test_a_function_is_described_by_its_docstring():
    def weather(city: str, unit: str = "c") -> str:
        """Say the weather.

        Args:
            city: Where.
            unit: Of the temperature.
        """
        return ""

    schema, same = tool_schemas([weather, TOOLS[0]])
    assert schema["function"]["name"] == "weather"
    assert schema["function"]["parameters"]["required"] == ["city"]
    assert same == TOOLS[0]


REFUSED = [
    ("weather", InvalidTypeError, "tools must be a list"),
    ([TOOLS[0], {"name": "f"}], InvalidTypeError, "tools[1] must be a function"),
    ([tool("")], InvalidValueError, "tools[0] must have a name, got ''"),
    ([tool("f", "text")], InvalidTypeError, "tools[0]: parameters must be a JSON schema"),
    ([lambda city: ""], InvalidValueError, "tools[0] needs type hints and a Google style docstring"),
]


def test_a_tool_that_cannot_be_described_is_refused():
    for tools, error, message in REFUSED:
        with pytest.raises(error, match=re.escape(message)):
            tool_schemas(tools)


CHOICES = [
    ("any", TOOLS, InvalidTypeError, "tool_choice must be 'auto', 'none', 'required'"),
    ({"type": "custom", "custom": {"name": "night"}}, TOOLS, InvalidTypeError, "tool_choice must be"),
    ("required", [], InvalidValueError, "needs tools"),
    (NAMED, [TOOLS[0]], InvalidValueError, "tool_choice has 'night', but the tools are weather"),
    (NAMED, [], InvalidValueError, "but the tools are none"),
]


def test_a_tool_choice_that_cannot_be_honoured_is_refused():
    for choice, tools, error, message in CHOICES:
        with pytest.raises(error, match=re.escape(message)):
            check_tool_choice(choice, tools)


def test_messages_become_what_templates_read():
    def message(arguments):
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "reasoning": "Hm.", "refusal": None, "tool_calls": [call]}

    messages = [message('{"a": 1}'), message("{a"), message("[1]"), {"role": "user", "content": "Hello"}]
    read = [with_tool_arguments(one) for one in messages]
    assert [one["tool_calls"][0]["function"]["arguments"] for one in read[:3]] == [{"a": 1}, "{a", "[1]"]
    assert read[0].keys() == {"content", "role", "reasoning", "reasoning_content", "thinking", "tool_calls"}
    assert (read[0]["content"], read[0]["reasoning_content"]) == ("", "Hm.")
    assert read[3] == {"role": "user", "content": "Hello"}
