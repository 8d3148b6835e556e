"""Forced and strict calls, with schemas of real APIs: over each chat API, whole and streamed, a model of noise obeys them."""

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from nanoinfer import AsyncLLM
from tests.helpers import http_server, tool_cases
from tests.helpers.structured_cases import SCHEMAS

pytestmark = pytest.mark.slow

FUNCTIONS = [{"name": f"f{i}", "parameters": one} for i, one in enumerate(SCHEMAS) if one.get("type") == "object"]
MODES = ("required", "auto")
FORMATS = jsonschema.FormatChecker(["email", "ipv4", "uuid"])  # a date may be February 31: a grammar has no calendar
NUM_TOKENS = 300  # noise may write longer strings and numbers


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tool_cases.save_checkpoint(tmp_path_factory.mktemp("forced"), max_position_embeddings=2**15)
    with http_server.serving(lambda: AsyncLLM(path, kv_cache_memory=2**28, max_num_seqs=32)) as running:
        yield running


# The request of each API, and what it answers, whole and as events: the calls as [name, JSON text], and whether the last is cut


class Chat:
    path = "/v1/chat/completions"

    @staticmethod
    def body(functions, choice):
        if choice not in MODES:
            choice = {"type": "function", "function": {"name": choice}}
        tools = [{"type": "function", "function": one} for one in functions]
        return {"messages": tool_cases.QUESTION, "tools": tools, "tool_choice": choice, "max_tokens": NUM_TOKENS}

    @staticmethod
    def read(answer):
        [choice] = answer["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        return [[call["name"], call["arguments"]] for call in calls], choice["finish_reason"] == "length"

    @staticmethod
    def read_events(events):
        calls = []
        for choice in (event["choices"][0] for event in events):
            for part in choice["delta"].get("tool_calls", ()):
                if part["index"] == len(calls):
                    calls.append([part["function"]["name"], ""])
                calls[part["index"]][1] += part["function"].get("arguments", "")
        return calls, choice["finish_reason"] == "length"


class Messages:
    path = "/v1/messages"

    @staticmethod
    def body(functions, choice):
        choice = {"type": {"required": "any", "auto": "auto"}[choice]} if choice in MODES else {"type": "tool", "name": choice}
        tools = [{"input_schema" if name == "parameters" else name: one[name] for name in one} for one in functions]
        return {"messages": tool_cases.QUESTION, "tools": tools, "tool_choice": choice, "max_tokens": NUM_TOKENS}

    @staticmethod
    def read(answer):
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        return [[call["name"], json.dumps(call["input"])] for call in calls], answer["stop_reason"] == "max_tokens"

    @staticmethod
    def read_events(events):
        calls = {}
        for event in events:
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                calls[event["index"]] = [event["content_block"]["name"], ""]
            elif event["type"] == "content_block_delta" and event["index"] in calls:
                calls[event["index"]][1] += event["delta"]["partial_json"]
        return list(calls.values()), events[-2]["delta"]["stop_reason"] == "max_tokens"


class Responses:
    path = "/v1/responses"

    @staticmethod
    def body(functions, choice):
        if choice not in MODES:
            choice = {"type": "function", "name": choice}
        tools = [{"type": "function"} | one for one in functions]
        return {"input": "How warm is Oslo?", "tools": tools, "tool_choice": choice, "max_output_tokens": NUM_TOKENS}

    @staticmethod
    def read(answer):
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        return [[call["name"], call["arguments"]] for call in calls], answer["status"] == "incomplete"

    @staticmethod
    def read_events(events):
        calls = {}
        for event in events:
            if event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call":
                calls[event["output_index"]] = [event["item"]["name"], ""]
            elif event["type"] == "response.function_call_arguments.delta":
                calls[event["output_index"]][1] += event["delta"]
        return list(calls.values()), events[-1]["response"]["status"] == "incomplete"


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_json(text):
    """Numbers like 1e999 are the largest ones, as which /v1/messages writes them."""
    return json.loads(text, parse_float=lambda digits: max(-sys.float_info.max, min(float(digits), sys.float_info.max)))


def num_calls(server, api, seed):
    """The number of calls in the answer to a request with this seed, which are checked. None: it was refused or cut."""
    rng, tokenizer = random.Random(seed), server.async_llm.llm.get_tokenizer()
    functions = [FUNCTIONS[seed % len(FUNCTIONS)], *rng.sample(FUNCTIONS, rng.choice([0, 0, 2]))]
    schemas = {one["name"]: one["parameters"] for one in functions}
    choice, thinks = rng.choice([*MODES, functions[0]["name"]]), rng.random() < 0.3
    likely = dict.fromkeys(['"', "]", "}", *["</think>"] * thinks], 9)  # so that noise comes to an end
    likely["<|im_end|>"] = rng.choice([0, 100])
    if choice == "auto":
        functions = [one | {"strict": True} for one in functions]
        likely |= {"<|im_end|>": 12, "<tool_call>": 15}
    body = api.body(functions, choice) | {
        "seed": seed,
        "temperature": rng.choice([0.5, 1.0, 1.5]),
        "logit_bias": {str(tokenizer.convert_tokens_to_ids(token)): bias for token, bias in likely.items()},
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    reply = server.post(api.path, body)
    if reply.status_code == 400:
        assert "these keywords cannot be enforced" in reply.text
        return None
    calls, is_cut = api.read(reply.json())
    streamed = api.read_events(events_of(server.post(api.path, body | {"stream": True}).text))
    assert streamed[1] == is_cut
    if is_cut:
        return None
    calls = [(name, read_json(arguments)) for name, arguments in calls]
    assert [(name, read_json(arguments)) for name, arguments in streamed[0]] == calls
    assert calls or choice == "auto"
    for name, arguments in calls:
        assert choice in (*MODES, name)
        jsonschema.Draft202012Validator(schemas[name], format_checker=FORMATS).validate(arguments)
    return len(calls)


@pytest.mark.parametrize("num_requests", [4, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("api", [Chat, Messages, Responses])
def test_every_forced_or_strict_call_obeys_its_schema(server, api, num_requests):
    """num_requests: whose answers have calls, and are not cut."""
    seeds, found, num_sent = iter(range(10**9)), [], 0
    with ThreadPoolExecutor(16) as threads:
        while len(found) < num_requests:
            some = [next(seeds) for _ in range(num_requests - len(found))]
            num_sent += len(some)
            found += filter(None, threads.map(lambda seed: num_calls(server, api, seed), some))
            assert num_sent < 100 or len(found) > 0.5 * num_sent  # of few the share varies
