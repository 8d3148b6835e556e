"""/v1/responses with OpenAI's own client, which checks every shape, and with its agents SDK where that is installed."""

import asyncio
import json
import re
from typing import Literal

import openai
import pydantic
import pytest

from nanoinfer.server.responses import ResponseStore
from tests.helpers import doors, http_server
from tests.helpers.tool_cases import WEATHER, check_call

pytestmark = pytest.mark.slow

PATH = "/v1/responses"
QUESTION = "How warm is Oslo?"
RESPONSES_TOOLS = [
    {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "night"},
]
BODY = {"input": QUESTION, "max_output_tokens": 8, "seed": 3}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def storing():
    with http_server.serving(max_stored_responses=2) as running:
        yield running


def post(server, body, path=PATH):
    return doors.post(server, path, body)


def streamed(server, body):
    """The response that the events of a stream make. Each has its type as its name."""
    text = server.post(PATH, body | {"stream": True}).text
    events = doors.events_of(text)
    assert re.findall("^event: (.*)$", text, re.MULTILINE) == [event["type"] for event in events]
    return doors.Responses.joined(events)


def test_reasoning_is_an_item_and_is_counted(tool_server):
    think = tool_server.async_llm.llm.get_tokenizer().convert_tokens_to_ids("<think>")
    body = {"input": QUESTION, "temperature": 1.5, "max_output_tokens": 5, "logit_bias": {str(think): 100}}
    response = post(tool_server, body | {"include": ["reasoning.encrypted_content"]})
    [item] = response["output"]
    assert (item["type"], item["summary"], item["status"]) == ("reasoning", [], "incomplete")
    assert item["content"] == [{"type": "reasoning_text", "text": "<think>" * 4}]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}


def test_openais_client_reads_the_calls_of_a_stream(tool_server, soon):
    options = {"model": "tiny-qwen3", "input": QUESTION, "tools": RESPONSES_TOOLS, "tool_choice": "required"}
    options |= {"temperature": 1.5, "max_output_tokens": 150, "extra_body": {"seed": 1, "logit_bias": soon}}
    with http_server.new_client(tool_server, strict=True) as client, client.responses.stream(**options) as stream:
        final = stream.until_done().get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert (final.status, len(calls) > 0) == ("completed", True)
    for call in calls:
        check_call(call.name, call.arguments)


def test_an_answer_is_parsed_by_its_schema(client):
    class Hero(pydantic.BaseModel):
        name: Literal["Lily", "Tom"]

    response = client.responses.parse(model="tiny-qwen3", input="Who?", text_format=Hero, max_output_tokens=60)
    assert response.output_parsed.name in ("Lily", "Tom")
    assert response.text.format.name == "Hero"


def test_a_failed_stream_ends_with_a_failed_response(server):
    events = server.post(PATH, BODY | {"timeout": 1e-9, "stream": True}).text.strip().split("\n\n")
    assert [event.split("\n")[0] for event in events] == ["event: response.created", "event: response.failed"]
    failed = json.loads(events[1].split("\ndata: ")[1])["response"]
    assert failed["error"]["message"].startswith("the request took longer than its timeout")
    assert server.post(PATH, BODY | {"timeout": 1e-9}).status_code == 504


# ---- stored responses


def test_a_response_continues_a_stored_one(storing):
    first = post(storing, BODY | {"instructions": "Tell stories."})
    text = first["output"][0]["content"][0]["text"]
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And?"},
    ]
    count = post(storing, {"messages": messages}, "/tokenize")["count"]  # instructions are not carried over
    for second in (
        post(storing, BODY | {"input": "And?", "previous_response_id": first["id"]}),
        streamed(storing, BODY | {"input": "And?", "previous_response_id": first["id"]}),
    ):
        assert second["usage"]["input_tokens"] == count
        assert (second["store"], second["previous_response_id"]) == (True, first["id"])
        assert storing.get(f"{PATH}/{second['id']}").json() == second


def test_old_responses_are_forgotten_and_the_error_says_so(storing):
    ids = [post(storing, BODY)["id"] for _ in range(3)]
    unstored = post(storing, BODY | {"store": False})
    assert unstored["store"] is False
    for lost in (ids[0], unstored["id"]):
        refused = storing.post(PATH, BODY | {"previous_response_id": lost})
        assert refused.status_code == 404
        assert "is forgotten: the server keeps the latest 2 responses" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "previous_response_id"
        assert storing.get(f"{PATH}/{lost}").status_code == 404
    client = http_server.new_client(storing, strict=True)
    assert client.responses.retrieve(ids[1]).id == ids[1]
    client.responses.delete(ids[1])
    with pytest.raises(openai.NotFoundError, match="send the whole conversation as input"):
        client.responses.retrieve(ids[1])
    assert post(storing, BODY | {"previous_response_id": ids[2]})["status"] == "incomplete"
    client.close()
    replayed = storing.get(f"{PATH}/{ids[2]}?stream=true")
    assert (replayed.status_code, replayed.json()["error"]["param"]) == (400, "stream")


def test_a_stored_response_belongs_to_the_key_that_made_it():
    mine, other = {"Authorization": "Bearer mine"}, {"X-Api-Key": "other"}
    with http_server.serving(max_stored_responses=8, api_key=("mine", "other"), cache_salt_by_key=True) as keyed:
        body = BODY | {"input": "A prompt that two clients send to this server. " * 8}
        first = keyed.post(PATH, body, headers=mine).json()
        path, continued = f"{PATH}/{first['id']}", BODY | {"previous_response_id": first["id"]}
        assert [keyed.request(method, path, headers=other).status_code for method in ("GET", "DELETE")] == [404] * 2
        assert [keyed.post(one, continued, headers=other).status_code for one in (PATH, f"{PATH}/input_tokens")] == [404] * 2
        assert keyed.get(path, headers=mine).json() == first
        second = keyed.post(PATH, continued, headers=mine).json()
        counted = keyed.post(f"{PATH}/input_tokens", continued, headers=mine).json()
        assert counted == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}
        usages = [keyed.post(PATH, body, headers=headers).json()["usage"] for headers in (other, other, mine)]
        cached = [usage["input_tokens_details"]["cached_tokens"] > 0 for usage in usages]
        assert cached == [False, True, True], "no key learns from the times what another has asked"
        assert keyed.request("DELETE", path, headers=mine).json()["deleted"]


def test_nothing_is_stored_by_default(server):
    first = post(server, BODY)
    assert first["store"] is False
    refused = server.post(PATH, BODY | {"previous_response_id": first["id"]}).json()["error"]
    assert "keeps no responses without --max-stored-responses" in refused["message"]


def test_the_store_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("nanoinfer.server.responses.MAX_STORED_BYTES", 100)
    store = ResponseStore(10)
    for number, num_bytes in enumerate((60, 40, 30, 101)):
        store.add("", [], num_bytes - len("[]"), {"id": str(number), "output": []})
        kept = [name for name in "0123" if ("", name) in store._kept]
        assert kept == [["0"], ["0", "1"], ["1", "2"], []][number]


@pytest.mark.parametrize("streams", [False, True])
def test_the_agents_sdk_calls_a_tool(tool_server, soon, streams):
    agents = pytest.importorskip("agents", reason="the SDK is not installed; pip install openai-agents")
    agents.set_tracing_disabled(True)
    cities = []

    @agents.function_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Look up the weather."""
        cities.append(city)
        return "sun"

    async def run():
        async with openai.AsyncOpenAI(base_url=tool_server.url + "/v1", api_key="none") as asynchronous:
            model, more = agents.OpenAIResponsesModel("tiny-qwen3", asynchronous), OFF | {"seed": 5, "logit_bias": soon}
            settings = agents.ModelSettings(tool_choice="required", max_tokens=200, extra_body=more)
            agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)
            if not streams:
                return await agents.Runner.run(agent, QUESTION, max_turns=3)
            result = agents.Runner.run_streamed(agent, QUESTION, max_turns=3)
            assert [event async for event in result.stream_events()]
            return result

    kinds = {item.type for item in asyncio.run(run()).new_items}
    assert {"tool_call_item", "tool_call_output_item"} <= kinds
    assert {"Oslo", "Rome"} >= {*cities} != set()
