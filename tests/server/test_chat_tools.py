"""Tools over /v1/chat/completions: OpenAI's client, what is rendered, which format is parsed. test_doors.py has the calls."""

from typing import Literal

import openai
import pydantic
import pytest

from nanoinfer.features.chat.harmony import HarmonyParser
from nanoinfer.server import messages, responses
from nanoinfer.server.choices import ChatFormat
from nanoinfer.server.protocol import ChatCompletionRequest
from nanoinfer.server.settings import ServerSettings
from tests.helpers import http_server
from tests.helpers.doors import Chat, Messages, Responses, post
from tests.helpers.tool_cases import QUESTION, TOOLS

pytestmark = pytest.mark.slow

TWO_CALLS = '<tool_call>\n{"name": "night", "arguments": {}}\n</tool_call>' * 2
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def test_a_pydantic_model_is_a_strict_tool_and_comes_back_parsed(tool_server, soon):
    class Weather(pydantic.BaseModel):
        city: Literal["Oslo", "Rome"]
        windy: bool

    options = {"model": "tiny-qwen3", "messages": QUESTION, "tools": [openai.pydantic_function_tool(Weather)], "seed": 1}
    options |= {"tool_choice": "required", "temperature": 1.5, "logit_bias": soon, "max_tokens": 150, "extra_body": OFF}
    with http_server.new_client(tool_server, strict=True) as client, client.chat.completions.stream(**options) as stream:
        events = [event for event in stream if event.type.startswith("tool_calls.function.arguments.")]
    calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [event.name for event in events if event.type.endswith("done")] == ["Weather"] * len(calls)
    assert len(events) > 3 * len(calls), "arguments come in fragments"
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)


def test_each_api_can_ask_for_one_call():
    off, nights = {"parallel_tool_calls": False}, [{"name": "night"}]
    for number, more, choice in ((2, {}, {}), (1, off, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})):
        for request in (
            ChatCompletionRequest(**Chat.body("x", functions=nights), **more),
            responses.to_chat(responses.ResponsesRequest(**Responses.body("x", functions=nights), **more))[0],
            messages.to_chat(messages.MessagesRequest(**Messages.body("x", functions=nights, max_tokens=9) | choice)),
        ):
            parser = ChatFormat(False, tool_calls=True).make_parser(request, "")
            assert len(parser.push(TWO_CALLS, is_last=True).message()["tool_calls"]) == number


def test_reasoning_has_two_names(tool_server):
    think = tool_server.async_llm.llm.get_tokenizer().convert_tokens_to_ids("<think>")
    body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": "none", "max_tokens": 5, "logit_bias": {str(think): 100}}
    message = post(tool_server, "/v1/chat/completions", body)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "<think>" * 4


def test_what_the_schema_of_a_tool_or_the_template_refuses_gets_400(tool_server):
    wrong = [{"type": "function", "function": {"name": "f", "parameters": {"type": 1}}}]
    for fields, message in (
        ({"tool_choice": "required", "tools": wrong}, "tools: grammar cannot be used: type must be"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] must be a function"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "the chat template refused the messages"),
    ):
        reply = tool_server.post("/v1/chat/completions", {"messages": QUESTION} | fields)
        assert (reply.status_code, message in reply.json()["error"]["message"]) == (400, True), reply.text


@pytest.mark.parametrize(
    ("template", "reasoning_parser", "tool_call_parser", "expected"),
    [
        ("{{ messages }}", None, None, ChatFormat(False, False)),
        (r"</think> {{ tools }} <tool_call>\n{\"name\": 1, \"arguments\": 2}", None, None, ChatFormat(True, True)),
        ("{{ messages }}<think>", None, None, ChatFormat(True, False)),
        ("{{ tools }} <tool_call><function=f><parameter=a>", None, None, ChatFormat(False, False)),
        ("{{ messages }}", "qwen3", "hermes", ChatFormat(True, True)),
        (r'</think> <tool_call> "arguments"', "none", "none", ChatFormat(False, False)),
        ("<|channel|>", None, None, ChatFormat(True, True, HarmonyParser)),
        ("<|channel|>", None, "none", ChatFormat(True, False, HarmonyParser)),
        ("<|channel|>", "none", "none", ChatFormat(False, False)),
        ("<|channel|>", None, "hermes", ChatFormat(False, True)),
        ("{{ messages }}", "openai_gptoss", "openai", ChatFormat(True, True, HarmonyParser)),
    ],
)
def test_the_template_decides_what_is_parsed_unless_a_parser_is_named(template, reasoning_parser, tool_call_parser, expected):
    assert ChatFormat.choose(template, reasoning_parser, tool_call_parser) == expected


def test_an_unknown_parser_is_refused():
    allowed = "'hermes', 'openai' or 'none', got 'llama3'; without it, the template decides"
    with pytest.raises(ValueError, match=f"tool_call_parser must be {allowed}"):
        ServerSettings(tool_call_parser="llama3")
    with pytest.raises(ValueError, match="--reasoning-parser qwen3 and --tool-call-parser openai parse different formats"):
        ChatFormat.choose("", "qwen3", "openai")


def test_tokenize_counts_the_tools(tool_server):
    chat = {"messages": QUESTION, "tools": TOOLS}
    used = tool_server.post("/v1/chat/completions", chat | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
    counts = [tool_server.post("/tokenize", body).json()["count"] for body in (chat, {"messages": QUESTION})]
    assert counts[0] == used > counts[1]
    refused = tool_server.post("/tokenize", {"prompt": "a", "tools": TOOLS})
    assert (refused.status_code, "tools need messages" in refused.text) == (400, True)
