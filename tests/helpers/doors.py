"""The four HTTP APIs as doors to the same answers: each writes a question as its body, and reads its reply as one Reply.

ask() sends a question whole and streamed. Whatever the events of a stream are, they add up to the whole answer.
"""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

MODES = ("required", "auto", "none")
UNEQUAL = ("id", "item_id", "call_id", "created_at", "created", "input_tokens_details", "previous_response_id")
CACHED = ("input_tokens", "cache_read_input_tokens")  # of /v1/messages, where a cached token is no input token


@dataclass
class Reply:
    """texts, reasons: of each answer. calls: of the first one, as (name, JSON text). num_prompt_tokens: with cached ones."""

    texts: list[str]
    reasons: list[str]
    num_prompt_tokens: int
    num_tokens: int
    reasoning: str = ""
    calls: list = field(default_factory=list)


def events_of(text):
    """The JSON of a stream's events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def post(server, path, body):
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def num_cached(usage):
    """The number of cached tokens, wherever an API tells it."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens", usage.get("cache_read_input_tokens"))


def without_ids(reply):
    """What is the same in two equal replies: ids, times and numbers of cached tokens are not."""
    if isinstance(reply, list):
        return [without_ids(one) for one in reply]
    if not isinstance(reply, dict):
        return reply
    left_out = UNEQUAL + CACHED * ("cache_read_input_tokens" in reply)
    return {name: without_ids(value) for name, value in reply.items() if name not in left_out}


def ask(server, door, *question, **asked):
    """The Reply to a question, whose stream is compared with it."""
    body = door.body(*question, **asked)
    return check_stream(server, door, body, post(server, door.path, body))


def check_stream(server, door, body, whole):
    """The Reply that a whole answer is. The same body is sent again, for a stream, which must add up to it."""
    reply = door.read(whole)
    has_usage = {"stream_options": {"include_usage": True}} if door in (Completions, Chat) else {}
    joined = door.joined(events_of(server.post(door.path, body | {"stream": True} | has_usage).text))
    if reply.calls and reply.reasons == ["length"]:
        assert door.read(joined).reasons == reply.reasons  # the last call is cut, and is no JSON
    else:
        assert door.read(joined) == reply
        if door in (Messages, Responses):  # whose streams have all that the whole answer has
            assert without_ids(joined) == without_ids(whole)
    return reply


def finite(digits):
    """A number of JSON, as /v1/messages writes it: 1e999 is the largest number."""
    return max(-sys.float_info.max, min(float(digits), sys.float_info.max))


def chat_messages(question, system):
    return [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": question}]


class Completions:
    path, unknown = "/v1/completions", ("system",)

    @staticmethod
    def body(prompt, **asked):
        return {"prompt": prompt} | asked

    @staticmethod
    def read(whole):
        choices, usage = whole["choices"], whole["usage"]
        texts, reasons = ([choice[name] for choice in choices] for name in ("text", "finish_reason"))
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return Reply(texts, reasons, usage["prompt_tokens"], usage["completion_tokens"])

    @staticmethod
    def joined(events):
        choices = {}
        for choice in (choice for event in events for choice in event["choices"]):
            so_far = choices.setdefault(choice["index"], choice | {"text": ""})
            so_far["text"] += choice["text"]
            so_far["finish_reason"] = choice["finish_reason"]
        return {"choices": [choices[i] for i in sorted(choices)], "usage": events[-1]["usage"]}


class Chat:
    path, unknown = "/v1/chat/completions", ()

    @staticmethod
    def body(question, *, system=None, functions=(), choice="auto", thinks=None, **asked):
        body = {"messages": chat_messages(question, system)} | asked
        if functions:
            named = {"type": "function", "function": {"name": choice}}
            body["tools"] = [{"type": "function", "function": function} for function in functions]
            body["tool_choice"] = choice if choice in MODES else named
        return body | ({} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}})

    @staticmethod
    def read(whole):
        choices, usage = whole["choices"], whole["usage"]
        message, reasons = choices[0]["message"], [choice["finish_reason"] for choice in choices]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        texts = [choice["message"].get("content") or "" for choice in choices]
        reasoning = message.get("reasoning") or ""
        return Reply(texts, reasons, usage["prompt_tokens"], usage["completion_tokens"], reasoning, calls)

    @staticmethod
    def joined(events):
        """What OpenAI's client accumulates. Each call begins with its id and its type, and goes on without them."""
        state = ChatCompletionStreamState()
        for event in events:
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
        parts = [part for event in events for one in event["choices"] for part in one["delta"].get("tool_calls") or ()]
        assert {part["type"] for part in parts if part.get("id")} <= {"function"}
        whole = state.current_completion_snapshot.to_dict()
        for choice in whole["choices"]:
            calls = choice["message"].get("tool_calls") or ()
            assert len({call["id"] for call in calls}) == len(calls)
        whole["choices"].sort(key=lambda choice: choice["index"])
        return whole


class Messages:
    path, unknown = "/v1/messages", ("n",)

    @staticmethod
    def body(question, *, functions=(), choice="auto", thinks=None, stop=None, **asked):
        body = {"messages": chat_messages(question, None)} | asked | ({} if stop is None else {"stop_sequences": stop})
        if functions:
            renamed = {"parameters": "input_schema"}
            body["tools"] = [{renamed.get(name, name): one[name] for name in one} for one in functions]
            body["tools"] = [{"input_schema": {"type": "object"}} | tool for tool in body["tools"]]
            mode = {"required": "any"}.get(choice, choice)
            body["tool_choice"] = {"type": mode} if choice in MODES else {"type": "tool", "name": choice}
        return body | ({} if thinks is None else {"thinking": {"type": "adaptive" if thinks else "disabled"}})

    @staticmethod
    def read(whole):
        assert (whole["type"], whole["role"]) == ("message", "assistant")
        kinds = {
            kind: [block for block in whole["content"] if block["type"] == kind] for kind in ("text", "thinking", "tool_use")
        }
        reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
        usage, calls = whole["usage"], [(block["name"], json.dumps(block["input"])) for block in kinds["tool_use"]]
        num_prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        text, reasoning = ("".join(block[kind] for block in kinds[kind]) for kind in ("text", "thinking"))
        return Reply([text], [reasons[whole["stop_reason"]]], num_prompt_tokens, usage["output_tokens"], reasoning, calls)

    @staticmethod
    def joined(events):
        """The message of a stream's events, whose order is checked."""
        first, *inner, change, last = events
        assert (first["type"], change["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
        message = first["message"]
        assert (message["content"], message["stop_reason"]) == ([], None)
        arguments, is_open = "", False
        for event in inner:
            begins = event["type"] == "content_block_start"
            assert event["index"] == len(message["content"]) - (not begins)
            assert is_open is not begins
            if begins:
                message["content"].append(event["content_block"])
                arguments, is_open = "", True
            elif event["type"] == "content_block_stop":
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    with suppress(json.JSONDecodeError):  # of a call that is cut
                        message["content"][-1]["input"] = json.loads(arguments, parse_float=finite)
            else:
                delta = dict(event["delta"])
                assert delta.pop("type") in ("text_delta", "thinking_delta", "input_json_delta", "signature_delta")
                [(name, new)] = delta.items()
                if name == "partial_json":
                    arguments += new
                else:
                    message["content"][-1][name] += new
        assert not is_open
        return message | change["delta"] | {"usage": change["usage"]}


class Responses:
    path, unknown = "/v1/responses", ("n", "stop")

    @staticmethod
    def body(question, *, system=None, functions=(), choice="auto", thinks=None, max_tokens=None, **asked):
        body = {"input": question} | asked | ({} if max_tokens is None else {"max_output_tokens": max_tokens})
        if functions:
            body["tools"] = [{"type": "function"} | function for function in functions]
            body["tool_choice"] = choice if choice in MODES else {"type": "function", "name": choice}
        body |= {} if system is None else {"instructions": system}
        return body | ({} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}})

    @staticmethod
    def read(whole):
        kinds = {kind: [item for item in whole["output"] if item["type"] == kind] for kind in ("message", "reasoning")}
        calls = [(item["name"], item["arguments"]) for item in whole["output"] if item["type"] == "function_call"]
        text, reasoning = ("".join(item["content"][0]["text"] for item in items) for items in kinds.values())
        reason = {"incomplete": "length", "completed": "tool_calls" if calls else "stop"}[whole["status"]]
        assert (reason == "length") == (whole["incomplete_details"] == {"reason": "max_output_tokens"})
        assert reason == "length" or {item["status"] for item in whole["output"]} <= {"completed"}
        usage = whole["usage"]
        return Reply([text], [reason], usage["input_tokens"], usage["output_tokens"], reasoning, calls)

    @staticmethod
    def joined(events):
        """The response of a stream's events: every event has its place, and those of an item add up to the item."""
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:2] == ["created", "in_progress"]
        assert [event["response"]["status"] for event in events[:2]] == ["in_progress"] * 2
        output, texts = [], []
        for kind, event in zip(kinds[2:-1], events[2:-1], strict=True):
            if kind == "output_item.added":
                assert (event["output_index"], event["item"]["status"]) == (len(output), "in_progress")
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
        assert (kinds[-1], response["output"]) == (response["status"], output)
        for item, text in zip(output, texts, strict=True):
            assert (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]) == text
        return response


CHATS = (Chat, Messages, Responses)
