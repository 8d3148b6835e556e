"""/v1/responses with OpenAI's own client, which checks every shape, and with its agents SDK where that is installed."""

import asyncio
import json
from typing import Literal

import httpx2
import openai
import pydantic
import pytest
import typing_extensions
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from nanoinfer.server.responses import ResponseStore
from tests.helpers import http_server
from tests.helpers.tool_cases import TOOLS, WEATHER, check_call

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
def tool_client(tool_server):
    with http_server.new_client(tool_server, strict=True) as client:
        yield client


@pytest.fixture(scope="module")
def storing():
    with http_server.serving(max_stored_responses=2) as running:
        yield running


@pytest.fixture(scope="module")
def options(soon):
    extra = {"seed": 1, "logit_bias": soon}
    shared = {"model": "tiny-qwen3", "input": QUESTION, "tools": RESPONSES_TOOLS, "temperature": 1.5, "extra_body": extra}
    return shared | {"max_output_tokens": 150}


def post(server, body, path=PATH):
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def without_ids(response):
    """What is the same in two equal responses: other ids, times and numbers of cached tokens."""
    if isinstance(response, dict):
        left_out = ("id", "item_id", "call_id", "created_at", "input_tokens_details", "previous_response_id")
        return {name: without_ids(value) for name, value in response.items() if name not in left_out}
    return [without_ids(one) for one in response] if isinstance(response, list) else response


def check_events(events):
    """Every event has its place, and those of an item add up to the item. Returns the response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert [event["response"]["status"] for event in events[:2]] == ["in_progress"] * 2
    output, texts = [], []
    for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            assert event["item"]["status"] == "in_progress"
            output.append(event["item"])
            texts.append("")
        assert event["output_index"] == len(output) - 1
        assert event.get("item_id", output[-1]["id"]) == output[-1]["id"]
        if kind.endswith(".delta"):
            texts[-1] += event["delta"]
        if kind == "output_item.done":
            output[-1] = event["item"]
        elif kind.endswith(".done"):
            done = event.get("part", event)
            assert done.get("text", done.get("arguments")) == texts[-1]
    response = events[-1]["response"]
    assert kinds[-1] == response["status"]
    assert response["output"] == output
    for item, text in zip(output, texts, strict=True):
        assert (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]) == text
    return response


def streamed(server, body):
    parts = server.post(PATH, body | {"stream": True}).text.strip().split("\n\n")
    events = [json.loads(part.split("\ndata: ")[1]) for part in parts]
    assert [part.split("\n")[0] for part in parts] == [f"event: {event['type']}" for event in events]
    return check_events(events)


@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"instructions": "Tell stories."}, {"top_k": 5}])
def test_a_response_is_the_answer_of_a_chat(server, more):
    response = post(server, BODY | more)
    system = [{"role": "system", "content": more["instructions"]}] if "instructions" in more else []
    chat = {name: value for name, value in (BODY | more).items() if name in ("seed", "temperature", "top_k")}
    chat |= {"messages": [*system, {"role": "user", "content": QUESTION}], "max_tokens": 8}
    answer = post(server, chat, "/v1/chat/completions")
    [item] = response["output"]
    assert item["content"][0]["text"] == answer["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == answer["usage"]["completion_tokens"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert item["status"] == "incomplete"
    assert without_ids(streamed(server, BODY | more)) == without_ids(response)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
@pytest.mark.parametrize("thinks", [True, False])
def test_a_required_call_is_the_same_streamed_and_whole(tool_client, options, choice, thinks):
    options = options | {"tool_choice": choice, "extra_body": options["extra_body"] | ({} if thinks else OFF)}
    whole = tool_client.responses.create(**options)
    calls = [item for item in whole.output if item.type == "function_call"]
    assert whole.status == "completed"
    for call in calls:
        check_call(call.name, call.arguments)
    assert calls
    events = [event.to_dict() for event in tool_client.responses.create(**options, stream=True)]
    assert without_ids(check_events(events)) == without_ids(whole.to_dict())
    with tool_client.responses.stream(**options) as stream:
        final = stream.until_done().get_final_response()
    assert [item.arguments for item in final.output if item.type == "function_call"] == [call.arguments for call in calls]


def test_reasoning_is_an_item_and_is_counted(tool_server, options):
    think = tool_server.async_llm.llm.get_tokenizer().convert_tokens_to_ids("<think>")
    body = {name: options[name] for name in ("input", "temperature")}
    body |= {"max_output_tokens": 5, "logit_bias": {str(think): 100}, "include": ["reasoning.encrypted_content"]}
    response = post(tool_server, body)
    [item] = response["output"]
    assert (item["type"], item["summary"], item["status"]) == ("reasoning", [], "incomplete")
    assert item["content"] == [{"type": "reasoning_text", "text": "<think>" * 4}]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    assert without_ids(streamed(tool_server, body)) == without_ids(response)


def test_an_answer_is_parsed_by_its_schema(client):
    class Hero(pydantic.BaseModel):
        name: Literal["Lily", "Tom"]

    response = client.responses.parse(model="tiny-qwen3", input="Who?", text_format=Hero, max_output_tokens=60)
    assert response.output_parsed.name in ("Lily", "Tom")
    assert response.text.format.name == "Hero"


def test_items_are_rendered_as_in_a_chat(tool_server):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "How warm"}, {"type": "input_text", "text": "is Oslo?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Oslo?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Oslo", "days": 2}'},
        {"type": "function_call", "call_id": "2", "name": "night", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "31"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "dark"}]},
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}},
        {"id": "2", "type": "function", "function": {"name": "night", "arguments": "{}"}},
    ]
    chat = [
        {"role": "system", "content": "Be good.\n\nBe brief."},
        {"role": "user", "content": "How warm\nis Oslo?"},
        {"role": "assistant", "reasoning": "Oslo?", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "31"},
        {"role": "tool", "tool_call_id": "2", "content": "dark"},
    ]
    weather = {"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}
    tokens = post(tool_server, {"messages": chat, "tools": [weather, TOOLS[1]], "return_token_strs": True}, "/tokenize")
    body = {"input": items, "instructions": "Be good.", "tools": RESPONSES_TOOLS, "max_output_tokens": 1}
    usage = [post(tool_server, body)["usage"] for _ in range(2)]
    assert usage[0]["input_tokens"] == tokens["count"]
    assert usage[1]["input_tokens_details"]["cached_tokens"] > tokens["count"] // 2


def test_null_is_left_out_for_every_name_of_openai(server):
    nulls = dict.fromkeys(typing_extensions.get_type_hints(ResponseCreateParamsNonStreaming))
    assert without_ids(post(server, nulls | BODY)) == without_ids(post(server, BODY))


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"input": None}, "input: Input should be a string or a list", "input"),
        ({"input": []}, "input has no items", "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0: an item of type 'item_reference'", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "a part of type 'input_image'", "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role: Input should be 'user'", "input"),
        ({"input": "a " * 100_000}, "maximum context length is 512 tokens", "input"),
        ({"tools": [{"type": "web_search"}]}, "a tool of type 'web_search' is not supported; offer functions", "tools"),
        ({"tools": RESPONSES_TOOLS}, "no known format of calls", "tools"),
        ({"tool_choice": "any"}, "tool_choice: Input should be 'auto', 'none' or 'required'", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice has 'a', but the tools are none", "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "a format has a schema if its type is json_schema", "text"),
        ({"text": {"verbosity": "low"}}, "text.verbosity: Input should be 'medium'", "text"),
        ({"reasoning": {"effrt": "low"}}, "did you mean effort?", "effrt"),
        ({"max_output_token": 5}, "did you mean max_output_tokens?", "max_output_token"),
        ({"background": True}, "background=True is not supported", "background"),
        ({"store": True}, "store=true needs a server with --max-stored-responses", "store"),
        ({"include": ["message.output_text.logprobs"]}, "include.0: Input should be", "include"),
        ({"priority": 1}, "priority=1 has no effect with this scheduler", "priority"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_honoured_gets_400(server, more, message, param):
    response = server.post(PATH, BODY | more)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert message in response.json()["error"]["message"]
    assert "<" not in response.json()["error"]["message"]


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
    with http_server.serving(max_stored_responses=8, api_key=("mine", "other"), cache_salt_by_key=True) as guarded:
        text = "A prompt that two clients send to this server. " * 8
        first = guarded.post(PATH, BODY | {"input": text}, headers=mine).json()
        path = f"{PATH}/{first['id']}"
        assert guarded.get(path, headers=other).status_code == 404
        assert httpx2.delete(guarded.url + path, headers=other).status_code == 404
        continued = BODY | {"previous_response_id": first["id"]}
        for endpoint in (PATH, f"{PATH}/input_tokens"):
            assert guarded.post(endpoint, continued, headers=other).status_code == 404
        assert guarded.get(path, headers=mine).json() == first
        second = guarded.post(PATH, continued, headers=mine).json()
        counted = guarded.post(f"{PATH}/input_tokens", continued, headers=mine).json()
        assert counted == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}
        cached = []
        for headers in (other, other, mine):
            usage = guarded.post(PATH, BODY | {"input": text}, headers=headers).json()["usage"]
            cached.append(usage["input_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, True, True], "no key learns from the times what another has asked"
        assert httpx2.delete(guarded.url + path, headers=mine).json()["deleted"]


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


# ---- many at once


def test_64_streams_have_the_texts_of_their_seeds(client, server):
    async def texts():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as asynchronous:

            async def text(seed):
                events = await asynchronous.responses.create(
                    model="tiny-qwen3", input=QUESTION, max_output_tokens=12, stream=True, extra_body={"seed": seed}
                )
                return check_events([event.to_dict() async for event in events])["output"]

            return await asyncio.gather(*map(text, range(64)))

    for seed, output in list(enumerate(asyncio.run(texts())))[::8]:
        alone = client.responses.create(model="tiny-qwen3", input=QUESTION, max_output_tokens=12, extra_body={"seed": seed})
        assert without_ids(alone.to_dict())["output"] == without_ids(output)


def test_the_agents_sdk_calls_a_tool(tool_server, soon):
    agents = pytest.importorskip("agents", reason="the SDK is not installed; pip install openai-agents")
    agents.set_tracing_disabled(True)
    cities = []

    @agents.function_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Look up the weather."""
        cities.append(city)
        return "sun"

    async def run(is_stream):
        async with openai.AsyncOpenAI(base_url=tool_server.url + "/v1", api_key="none") as asynchronous:
            model = agents.OpenAIResponsesModel("tiny-qwen3", asynchronous)
            settings = agents.ModelSettings(
                tool_choice="required", max_tokens=200, extra_body=OFF | {"seed": 5, "logit_bias": soon}
            )
            agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)
            if not is_stream:
                return await agents.Runner.run(agent, QUESTION, max_turns=3)
            result = agents.Runner.run_streamed(agent, QUESTION, max_turns=3)
            return result if [event async for event in result.stream_events()] else None

    for is_stream in (False, True):
        kinds = [item.type for item in asyncio.run(run(is_stream)).new_items]
        assert {"tool_call_item", "tool_call_output_item"} <= set(kinds)
    assert set(cities) <= {"Oslo", "Rome"}
    assert len(cities) >= 2
