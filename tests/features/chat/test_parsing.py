"""An answer's text becomes content, reasoning and tool calls, however it is split."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.features.chat import parsing
from nanoinfer.features.chat.harmony import HarmonyParser
from nanoinfer.features.chat.parsing import ChatParser, parse_chat_answer

NIGHT = '<tool_call>\n{"name": "night", "arguments": {}}\n</tool_call>'
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def call(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parse(pieces: list[str], prompt: str = "", **kwargs) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, [(name, arguments)]) of a stream, accumulated as a client does."""
    parser = (HarmonyParser if prompt.endswith(("<|message|>", "assistant")) else ChatParser)(prompt, **kwargs)
    content = reasoning = ""
    calls: list[dict] = []
    deltas = [parser.push(piece) for piece in pieces] + [parser.push("", is_last=True)]
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        for part in delta.tool_calls:
            if part["index"] == len(calls):
                assert part["id"].startswith("call_")
                assert part["type"] == "function"
                calls.append({"name": part["function"]["name"], "arguments": "", "id": part["id"]})
            else:  # of the newest call, and without what the first delta said
                assert part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
                assert part["index"] == len(calls) - 1
            calls[-1]["arguments"] += part["function"]["arguments"]
    assert len({made["id"] for made in calls}) == len(calls)
    return reasoning, content, [(made["name"], made["arguments"]) for made in calls]


A, B = '{"name": "a", "arguments": {}}', '{"name": "b", "arguments": {"x": "</tool_call>"}}'
C = '{"name": "c", "parameters": {"x": {}}}'
CALLS = [("a", "{}"), ("b", '{"x": "</tool_call>"}')]
CHANGED = '{"wd": 23, "sd": 0.8, "injection": "ZSJB39", "module_id": "M62121G9142"}'


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


# name -> (prompt's end, text, (reasoning, content, calls))
CASES = {
    "plain text is kept as it is": ("", "\n Hello \n", ("", "\n Hello \n", [])),
    "whitespace alone": ("", " \n", ("", " \n", [])),
    "thinking": ("", "<think>\nHm.\n\nYes.\n</think>\n\nFour.\n", ("Hm.\n\nYes.", "Four.\n", [])),
    "thinking opened by the prompt": ("<think>\n", "Hm.\n</think>\n\nFour.", ("Hm.", "Four.", [])),
    "thinking off (vllm #17609)": ("<think>\n\n</think>\n\n", "Four.", ("", "Four.", [])),
    "an empty think block": ("", "<think>\n\n</think>\n\nFour.", ("", "Four.", [])),
    "thinking is cut": ("", "<think>\nHm. </thi", ("Hm. </thi", "", [])),
    "thinking is cut after a space": ("<think>", "Hm. \n", ("Hm.", "", [])),
    "a think tag later is content": ("", "Use <think> and </think>.", ("", "Use <think> and </think>.", [])),
    "a call named in the reasoning": ("", "<think><tool_call></think>\n" + NIGHT, ("<tool_call>", "", [("night", "{}")])),
    "thinking, content and a call": ("", f"<think>a</think>\n\nb\n\n{WEATHER}", ("a", "b", [("weather", '{"city": "Paris"}')])),
    "content between calls": ("", f"a\n{NIGHT}\nb\n{NIGHT}\nc\n", ("", "a\n\nb\n\nc\n", [("night", "{}")] * 2)),
    "a tag in content, then a call": ("", f"<tool_call> is a tag.\n{NIGHT}", ("", "<tool_call> is a tag.", [("night", "{}")])),
    "two objects in a block": ("", f"a {block(A + chr(10) + B)} b", ("", "a  b", CALLS)),
    "an object that is no call after a call": ("", block(A + '{"name" "b"}'), ("", '{"name" "b"}', [("a", "{}")])),
    "an object that is no call before a call": ("", block('{"x": 1}' + A), ("", '{"x": 1}', [("a", "{}")])),
    "a number between calls": ("", block('[{"name": "a"}, 5, {"name": "c"}]'), ("", "5", [("a", "{}"), ("c", "{}")])),
    "words after a call": ("", block(f"{A} is what I call"), ("", "is what I call", [("a", "{}")])),
    "cut before the second call": ("", f"<tool_call>{A}{B[:9]}", ("", '{"name":', [("a", "{}")])),
}
NO_CALLS = {  # they stay content
    "cut in the name": '<tool_call>\n{"name": "we',
    "cut in a tag": "a <tool_ca",
    "no JSON": "\n<tool_call>no</tool_call> a",
    "malformed JSON": '<tool_call>{"name" "f"}</tool_call>',
    "JSON that is no call": "<tool_call>{}</tool_call>",
    "an empty list": block("[]"),
}
CASES |= {name: ("", text, ("", text, [])) for name, text in NO_CALLS.items()}
ONLY_CALLS = {  # a text, and its calls
    "no arguments (vllm #28806)": (NIGHT, [("night", "{}")]),
    "a comma before a call": (f"{NIGHT.replace('>', '>,', 1)}", [("night", "{}")]),
    "arguments are left out": ('<tool_call>{"name": "night"}</tool_call>', [("night", "{}")]),
    "two calls": (f"{WEATHER}\n{NIGHT}\n", [("weather", '{"city": "Paris"}'), ("night", "{}")]),
    "values repeat earlier text (vllm #10395)": (call(CHANGED), [("f", CHANGED)]),
    "braces in a string (vllm #21544)": (call('{"c": "mkdir {a,b"}'), [("f", '{"c": "mkdir {a,b"}')]),
    "nested, closed by numbers (vllm #22885)": (call('{"a": {"b": [1, {}]}}'), [("f", '{"a": {"b": [1, {}]}}')]),
    "escapes": (call(r'{"a": "\"}\\", "b": 1}'), [("f", r'{"a": "\"}\\", "b": 1}')]),
    "the closing tag in a string": (call('{"a": "</tool_call>"}'), [("f", '{"a": "</tool_call>"}')]),
    "not ASCII (vllm #19056)": (call('{"title": "版本 🎉"}', "summary"), [("summary", '{"title": "版本 🎉"}')]),
    "arguments first": ('<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', [("f", '{"a": 1}')]),
    "arguments as a string": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
    "the closing tag is missing": (WEATHER.removesuffix("\n</tool_call>"), [("weather", '{"city": "Paris"}')]),
    "cut in the arguments": ('<tool_call>{"name": "f", "arguments": {"a": "b', [("f", '{"a": "b')]),
    "malformed arguments": (call("{a: [1") + NIGHT, [("f", "{a: [1}\n"), ("night", "{}")]),
    "parameters": (block('{"name": "f", "parameters": {"x": 1}}'), [("f", '{"x": 1}')]),
    "parameters as a string": (block('{"parameters": "{\\"x\\": 1}", "name": "f"}'), [("f", '{"x": 1}')]),
    "arguments after parameters": (block('{"name": "f", "parameters": {"x": 1}, "arguments": {"y": 2}}'), [("f", '{"y": 2}')]),
    "arguments are null": (block('{"name": "f", "arguments": null, "parameters": {"x": 1}}'), [("f", '{"x": 1}')]),
    "a list in a block": (block(f"[{A}, {B}]"), CALLS),
    "objects with commas in a block": (block(f"{A}, {B}"), CALLS),
    "a list of other keys": (block('[{"arguments": {}, "name": "a"}, {"name": "c"}]'), [("a", "{}"), ("c", "{}")]),
    "keys after the arguments": (block(A[:-1] + ', "id": "}"}' + C), [("a", "{}"), ("c", '{"x": {}}')]),
    "a brace too many": (block(A + "}"), [("a", "{}")]),
    "a brace too few": (block(A[:-1]), [("a", "{}")]),
    "cut in the closing tag": (block(A)[:-5], [("a", "{}")]),
    "cut in the closing tag of a list": (block('[{"name": "a"}]')[:-12], [("a", "{}")]),
    "cut in the second call": (f"<tool_call>{A}{B[:-9]}", [("a", "{}"), ("b", '{"x": "</tool')]),
}
CASES |= {name: ("", text, ("", "", calls)) for name, (text, calls) in ONLY_CALLS.items()}

HARMONY = "<|end|><|start|>assistant"
THOUGHT, FINAL, COMMENT = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"
HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|end|>"}'
CALLED, LONG = [("f", '{"a": "<|end|>"}')], f"<|channel|>{'x' * 1014}<|message|>b"
GPT_OSS = {  # what it writes after the prompt
    "thinks": (f"{THOUGHT}Hm.\n{HARMONY}{FINAL} Four. \n<|return|>", ("Hm.\n", " Four. \n", [])),
    "writes no last mark": (f"{THOUGHT}Hm.{HARMONY}{FINAL}Four.\n", ("Hm.", "Four.\n", [])),
    "calls": (f"{THOUGHT}Hm.{HARMONY}{HARMONY_CALL}", ("Hm.", "", CALLED)),
    "calls in the role": (" to=functions.f<|channel|>analysis json<|message|>{}<|call|>", ("", "", [("f", "{}")])),
    "says what it calls": (f"{COMMENT}I look.{HARMONY}{HARMONY_CALL}<|call|>", ("", "I look.", CALLED)),
    "writes several messages": (f"{THOUGHT}a{HARMONY}{THOUGHT}b < c{HARMONY}{FINAL}d", ("a\nb < c", "d", [])),
    "calls in malformed JSON": (HARMONY_CALL[:-10] + f"a]{HARMONY}{FINAL}b", ("", "b", [("f", '{"a": a]')])),
    "names a form in a header": ("<|channel|>final <|constrain|>json<|message|>{}", ("", "{}", [])),
    "is cut in a header": ("<|channel|>ana", ("", "", [])),
    "is cut after reasoning": (f"{THOUGHT}Hm. \n", ("Hm. \n", "", [])),
    "writes an empty last message": (f"{FINAL}Hi{HARMONY}{FINAL}", ("", "Hi", [])),
    "writes more after a call": (HARMONY_CALL + f" }}<|call|>{HARMONY}{FINAL}a", ("", "a", CALLED)),
    "writes more after a message": (f"{FINAL}Use <|end|> to end.", ("", "Use \n to end.", [])),
    "writes what begins like a header": ("to=5 is it", ("", "to=5 is it", [])),
    "writes one letter": ("t", ("", "t", [])),
    "writes the longest header": (LONG.replace("x", "", 1), ("", "b", [])),
    "writes a header that is too long": (LONG, ("", LONG, [])),
    "is cut in a mark": (f"{THOUGHT}Hm. <|en", ("Hm. <|en", "", [])),
    "writes no header": ("Four.", ("", "Four.", [])),
    "writes JSON only": ('{"a": 1}', ("", '{"a": 1}', [])),
}
CASES |= {f"gpt-oss {name}": (HARMONY, *case) for name, case in GPT_OSS.items()}
CASES |= {
    "gpt-oss's prompt has ended its message": (f"{THOUGHT}old{HARMONY[:7]}<|start|>assistant", "Hi", ("", "Hi", [])),
    "gpt-oss's prompt has begun the final message": (f"{HARMONY}{FINAL}", "Four.\n", ("", "Four.\n", [])),
    "gpt-oss's prompt has begun to think": (f"{HARMONY}{THOUGHT}", f"Hm.{HARMONY}{FINAL}Four.", ("Hm.", "Four.", [])),
}


@pytest.mark.parametrize("case", CASES)
def test_a_text_is_parsed_the_same_whole_and_by_characters(case):
    prompt, text, expected = CASES[case]
    assert parse([text], prompt) == expected
    assert parse(list(text), prompt) == expected


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", "<", "{", "}", '"', "\\", "a", "{}", NIGHT, WEATHER]
PIECES += ['{"name": "f"', ', "arguments": ', "[", "]", "<tool", "</", ",", ', "parameters": ', A]
PIECES += [HARMONY, THOUGHT, FINAL, HARMONY_CALL, "<|call|>", "<|", "<|message|>", "to="]


@given(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.data(),
    st.sampled_from(["", "<think>\n", HARMONY, HARMONY + FINAL]),
)
def test_no_split_changes_the_message(text, data, prompt):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, prompt) == parse([text], prompt)


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_without_parsers_an_answer_is_its_text(text):
    assert parse(list(text), "<think>", reasoning=False, tool_calls=False) == ("", text, [])


def test_a_header_that_never_ends_is_content():
    text = "<|channel|>" + "a" * 20_000
    assert parse(list(text), HARMONY) == parse([text], HARMONY) == ("", text, [])


def test_text_is_held_back_only_while_a_tag_may_begin():
    parser = ChatParser()
    pieces = ["<", "p>", "a", " <tool", "box> ", "b", "<tool_call>", '{"name": "f"', ', "arguments": {', '"a', '": 1}', "}"]
    shown = [parser.push(piece).fields() for piece in pieces]
    assert [fields.get("content", "") for fields in shown[:6]] == ["", "<p>", "a", "", " <toolbox>", " b"]
    assert shown[6:8] == [{}, {}]
    functions = [fields["tool_calls"][0]["function"] for fields in shown[8:11]]
    assert functions == [{"name": "f", "arguments": "{"}, {"arguments": '"a'}, {"arguments": '": 1}'}]
    assert shown[11] == {}


LONG_BEGINNINGS = [
    '<tool_call>{"name": "' + "f" * 50_000,
    '<tool_call>{"arguments": {"a": "' + "b" * 50_000 + '"}, "name": "f"}</tool_call> then',
    '<tool_call>{"name": "f", "arguments": {}}' + " " * 50_000 + "b</tool_call> then",
]


@pytest.mark.parametrize("text", LONG_BEGINNINGS, ids=["name", "arguments", "space"])
def test_a_long_beginning_of_a_call_is_parsed_a_few_times_only(text, monkeypatch):
    num_characters = 0

    class Counting:
        def match(self, buffer):
            nonlocal num_characters
            num_characters += len(buffer)
            return header.match(buffer)

    header = parsing.CALL_HEADER
    monkeypatch.setattr(parsing, "CALL_HEADER", Counting())
    streamed = parse(list(text))
    assert num_characters < 30 * len(text)  # and not len(text) ** 2 / 2
    assert streamed == parse([text])


def test_has_tool_calls_says_whether_a_call_is_complete():
    for text, is_complete in ((WEATHER, True), (WEATHER[:-20], False), ("Hello", False)):
        parser = ChatParser()
        parser.push(text, is_last=True)
        assert parser.has_tool_calls is is_complete


def test_without_parallel_tool_calls_the_first_remains_also_of_a_block():
    weather = ("weather", '{"city": "Paris"}')
    blocks = {block(text): ("a", "{}") for text in (A + B, f"[{A}, {B}]", f'[{{"name": "a"}}, {A}]')}
    for text, first in ({WEATHER + NIGHT + NIGHT: weather} | blocks).items():
        for pieces in ([text], list(text)):
            assert parse(pieces, parallel_tool_calls=False) == ("", "", [first])


def test_a_tag_that_no_tag_began_ends_the_thought_of_a_whole_answer():
    for prompt in ("", "<|im_start|>assistant\n"):
        message = parse_chat_answer("\nLet me think.</think>4.", prompt)
        assert (message["reasoning"], message["content"]) == ("Let me think.", "4.")
    message = parse_chat_answer(f"Let me think.</think>{WEATHER}")
    assert (message["reasoning"], message["tool_calls"][0]["function"]["name"]) == ("Let me think.", "weather")
    for text, prompt in (
        ("Use <think> and </think>.", ""),  # the tag of a text about tags
        ("It is </think>.", "<think>\n\n</think>\n\n"),  # the prompt has ended the reasoning
        (call('{"a": "</think>"}'), ""),
    ):
        assert "reasoning" not in parse_chat_answer(text, prompt)
    assert ChatParser(reasoning=False).push("a</think>4.", is_last=True).content == "a</think>4."


def test_a_whole_answer_of_gpt_oss_is_known_by_its_channels():
    assert parse_chat_answer(f"{THOUGHT}Hm.{HARMONY}{FINAL}Four.")["reasoning"] == "Hm."
    for text in ("Four.", '{"a": "<|end|><think>"}'):  # the prompt has begun the final message
        assert parse_chat_answer(text, HARMONY + FINAL)["content"] == text
    about_it = "<|im_start|>user\nWhat is <|start|>assistant?<|im_end|>\n<|im_start|>assistant\n"
    assert parse_chat_answer("<think>Hm.</think>Four.", about_it)["reasoning"] == "Hm."


def test_a_message_has_openais_fields():
    message = parse_chat_answer(f"<think>\nHm.\n</think>\n\n{WEATHER}\n{NIGHT}")
    first, second = message["tool_calls"]
    assert message["role"] == "assistant"
    assert message["content"] is None
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    assert first.keys() == {"id", "type", "function"}
    assert json.loads(first["function"]["arguments"]) == {"city": "Paris"}
    assert second["function"] == {"name": "night", "arguments": "{}"}
    assert "reasoning" not in parse_chat_answer("Hello")
