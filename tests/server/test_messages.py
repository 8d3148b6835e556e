"""/v1/messages: Anthropic's shapes over HTTP, and its own client where it is installed (pip install anthropic)."""

import json
import re
import sys

import pytest

from nanoinfer.server.blocks import Block
from nanoinfer.server.errors import json_response
from nanoinfer.server.messages import _json_of
from tests.helpers import doors
from tests.helpers.doors import Messages, events_of, without_ids
from tests.helpers.tool_cases import WEATHER

pytestmark = pytest.mark.slow

PATH = "/v1/messages"
QUESTION = [{"role": "user", "content": "How warm is Oslo?"}]
MESSAGES_TOOLS = [{"name": "weather", "input_schema": WEATHER}, {"name": "night", "input_schema": {"type": "object"}}]
BODY = {"messages": QUESTION, "max_tokens": 8, "seed": 3}


@pytest.fixture(scope="module")
def call_body(soon):
    body = {"model": "tiny-qwen3", "messages": QUESTION, "tools": MESSAGES_TOOLS, "max_tokens": 150}
    return body | {"seed": 1, "temperature": 1.5, "logit_bias": soon}


def post(server, body, path=PATH):
    return doors.post(server, path, body)


def streamed(server, body):
    """The message that the events of a stream make. Each has its type as its name."""
    response = server.post(PATH, body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert re.findall("^event: (.*)$", response.text, re.MULTILINE) == [event["type"] for event in events]
    return Messages.joined(events)


def test_the_reason_of_an_end_is_anthropics(server):
    body = BODY | {"messages": [{"role": "user", "content": "a " * 230}], "max_tokens": 1000, "ignore_eos": True}
    assert post(server, body)["stop_reason"] == "model_context_window_exceeded"
    ended = post(server, BODY | {"temperature": 0, "max_tokens": 60, "stop_sequences": ["zebra", "."]})
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", ".")
    chat = BODY | {"temperature": 0, "max_tokens": 60, "stop": ["zebra", "."]}
    assert post(server, chat, "/v1/chat/completions")["choices"][0]["stop_reason"] == "."  # vLLM's name for it


def test_the_last_message_is_continued_and_an_answer_follows_a_schema(server):
    messages = [*QUESTION, {"role": "assistant", "content": "Once upon a"}]
    chat = {"messages": messages, "max_tokens": 4, "temperature": 0}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    text = post(server, chat | more, "/v1/chat/completions")["choices"][0]["message"]["content"]
    assert post(server, chat)["content"] == [{"type": "text", "text": text}]
    schema = {"type": "object", "properties": {"name": {"enum": ["Lily", "Tom"]}}, "required": ["name"]}
    answer_format = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    text = post(server, BODY | {"output_config": {"effort": "low", "format": answer_format}, "max_tokens": 60})["content"][0][
        "text"
    ]
    assert json.loads(text)["name"] in ("Lily", "Tom")


def test_numbers_that_json_does_not_have_are_replaced():
    """A schema of numbers accepts 1e999, and a model that is not forced may write NaN."""
    block = Block("call", 0, name="f", pieces=['{"a": [1e999, -1e999], "b": NaN}'])
    largest = sys.float_info.max
    assert json.loads(json_response(_json_of(block)).body)["input"] == {"a": [largest, -largest], "b": None}


def test_thinking_is_a_block_unless_it_is_omitted(tool_server, call_body):
    think = tool_server.async_llm.llm.get_tokenizer().convert_tokens_to_ids("<think>")
    body = call_body | {"tool_choice": {"type": "none"}, "max_tokens": 5, "logit_bias": {str(think): 100}}
    message = post(tool_server, body)
    assert message["content"] == [{"type": "thinking", "thinking": "<think>" * 4, "signature": "none"}]
    assert streamed(tool_server, body)["content"] == message["content"]
    body["thinking"] = {"type": "adaptive", "display": "omitted"}
    assert post(tool_server, body)["content"] == streamed(tool_server, body)["content"] == []


def test_errors_of_every_status_have_anthropics_format(server, guarded):
    for headers in ({}, {"X-Api-Key": "wrong"}, {"Authorization": "Bearer wrong", "X-Api-Key": "second"}):
        for path in (PATH, PATH + "/count_tokens"):
            refused = guarded.post(path, BODY, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    for headers in ({"X-Api-Key": "second"}, {"Authorization": "Bearer second"}):
        assert guarded.post(PATH, BODY, headers=headers).status_code == 200
    for more, status, kind in (
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "other"}, 404, "not_found_error"),
        ({"timeout": 1e-9}, 504, "timeout_error"),
        ({"metadata": "x" * 2**22}, 413, "request_too_large"),
    ):
        response = server.post(PATH, BODY | more)
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body.keys() == {"type", "error"}
        assert body["error"].get("details", {}).get("error_code") == body["error"]["code"]
    failed = server.post(PATH, BODY | {"timeout": 1e-9, "stream": True}).text
    assert failed.startswith('event: error\ndata: {"type":"error","error":{"message":"the request took longer')


def test_other_tools_are_left_out_where_unknown_fields_are_ignored(ignoring):
    body = BODY | {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "betas": [1]}
    assert without_ids(post(ignoring, body)) == without_ids(post(ignoring, BODY))
    for path in (PATH, PATH + "/count_tokens"):  # whose messages are not all in the request
        refused = ignoring.post(path, BODY | {"thread": {"type": "continue", "previous_message_id": "msg_1"}})
        assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


# ---- Anthropic's client


@pytest.fixture(scope="module")
def anthropic_client(tool_server):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed; pip install anthropic")
    with anthropic.Anthropic(
        base_url=tool_server.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def test_the_client_reads_a_stream_and_a_message_alike(anthropic_client, call_body):
    extra = {name: call_body[name] for name in ("seed", "temperature", "logit_bias")}
    options = {name: value for name, value in call_body.items() if name not in extra}
    for choice in ("auto", "any", "none"):
        options["tool_choice"] = {"type": choice}
        message = anthropic_client.messages.create(**options, extra_body=extra)
        with anthropic_client.messages.stream(**options, extra_body=extra) as stream:
            kinds = [event.type for event in stream]
        final = stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert without_ids(final.to_dict()) == without_ids(message.to_dict())
        assert ("tool_use" in [block.type for block in final.content]) is (choice == "any")
    del options["tool_choice"], options["max_tokens"]
    counted = anthropic_client.messages.count_tokens(**options)
    full = anthropic_client.messages.create(**options, max_tokens=1).usage
    assert counted.input_tokens == full.input_tokens + full.cache_read_input_tokens


def test_the_tool_runner_sends_the_results_of_calls(anthropic_client, call_body):
    import anthropic

    cities = []

    @anthropic.beta_tool(input_schema=WEATHER)
    def weather(city, days):
        """Look up the weather."""
        cities.append(city)
        return "sun"

    options = {"model": "tiny-qwen3", "messages": QUESTION, "max_tokens": 150, "tools": [weather], "max_iterations": 3}
    extra = {name: call_body[name] for name in ("seed", "temperature", "logit_bias")}
    runner = anthropic_client.beta.messages.tool_runner(**options, tool_choice={"type": "any"}, extra_body=extra)
    assert [message.stop_reason for message in runner] == ["tool_use"] * 3
    assert {"Oslo", "Rome"} >= {*cities} != set()


def test_the_client_raises_its_own_errors(anthropic_client):
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="is not served"):
        anthropic_client.messages.create(model="other", messages=QUESTION, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="a block of type 'image'"):
        anthropic_client.messages.create(
            model="tiny-qwen3", messages=[{"role": "user", "content": [{"type": "image"}]}], max_tokens=1
        )
