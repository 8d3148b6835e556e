"""Reasoning budgets over HTTP: the fields of each API, and what is left for a required call or a format."""

import json

import pytest

from nanoinfer import SamplingParams
from nanoinfer.server.choices import ChatFormat
from nanoinfer.server.protocol import ChatCompletionRequest
from tests.helpers.doors import post
from tests.helpers.tool_cases import NAMED, QUESTION, TOOLS, check_call

pytestmark = pytest.mark.slow

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def thinking(tool_server):
    """A bias with which every token is <think>, so that reasoning does not end by itself."""
    think = tool_server.async_llm.llm.get_tokenizer().convert_tokens_to_ids("<think>")
    return {"logit_bias": {str(think): 100}, "max_tokens": 12}


def message_of(server, body):
    return post(server, CHAT, {"messages": QUESTION} | body)["choices"][0]["message"]


def test_reasoning_has_at_most_its_budget(tool_server, thinking):
    none = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}  # as if the template read neither
    for more, num_thoughts in (
        ({}, 11),
        ({"thinking_token_budget": 3}, 3),
        ({"thinking_token_budget": 0}, 0),
        ({"thinking_token_budget": -1}, 11),
        (none, 0),
        (none | {"thinking_token_budget": 2}, 2),
        ({"reasoning_effort": "high"}, 11),
    ):
        message = message_of(tool_server, thinking | more)
        assert message.get("reasoning", "") == "<think>" * num_thoughts, more
        assert message["content"] == ("<think>" * (10 - num_thoughts) if num_thoughts < 11 else ""), more


def test_reasoning_effort_sets_the_variables_of_the_template():
    effort, thinks, off = "reasoning_effort", {"enable_thinking": True}, {"enable_thinking": False}
    for fields, variables in (
        ({}, {}),
        ({effort: "none"}, {effort: "none"} | off),
        ({effort: "low"}, {effort: "low"} | thinks),
        ({effort: "low", "chat_template_kwargs": off}, {effort: "low"} | off),
    ):
        assert ChatCompletionRequest(messages=QUESTION, **fields).rendering["chat_template_kwargs"] == variables


def test_the_budget_of_a_message_is_that_of_its_client(tool_server, thinking):
    for thought, num in (({"type": "enabled", "budget_tokens": 4}, 4), ({"type": "enabled"}, 11), ({"type": "adaptive"}, 11)):
        message = post(tool_server, MESSAGES, {"messages": QUESTION, "thinking": thought} | thinking)
        assert message["content"][0] == {"type": "thinking", "thinking": "<think>" * num, "signature": "none"}
    off = {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}
    assert post(tool_server, MESSAGES, {"messages": QUESTION} | thinking | off)["content"][0]["type"] == "text"


def test_a_message_to_a_model_without_thoughts_may_have_a_budget(server):
    body = {"messages": QUESTION, "max_tokens": 2, "thinking": {"type": "enabled", "budget_tokens": 4}}
    assert post(server, MESSAGES, body)["content"][0]["type"] == "text"


def test_a_response_without_effort_has_no_reasoning(tool_server, thinking):
    body = {"input": "How warm is Oslo?", "max_output_tokens": 8, "logit_bias": thinking["logit_bias"]}
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    assert [item["type"] for item in post(tool_server, RESPONSES, body)["output"]] == ["reasoning"]
    for more in ({"reasoning": {"effort": "none"}}, {"thinking_token_budget": 0}):
        assert [item["type"] for item in post(tool_server, RESPONSES, body | more | kwargs)["output"]] == ["message"]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_required_call_begins_after_a_quarter_of_the_tokens(tool_server, thinking, choice):
    body = thinking | {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    message = message_of(tool_server, body)
    assert message["reasoning"] == "<think>" * 50
    [call, *_] = message["tool_calls"]
    check_call(call["function"]["name"], call["function"]["arguments"])
    assert message_of(tool_server, body | {"thinking_token_budget": 7})["reasoning"] == "<think>" * 7


def test_a_format_begins_after_a_quarter_of_the_tokens(tool_server, thinking):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    body = thinking | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    message = message_of(tool_server, body | {"max_tokens": 60})
    assert message["reasoning"] == "<think>" * 15
    assert json.loads(message["content"])["a"] in (1, 2)


THOUGHT = [{"role": "assistant", "content": "<think>"}]


@pytest.mark.parametrize(("reasoning", "begun"), [(True, []), (True, THOUGHT), (False, []), (False, THOUGHT)])
def test_a_call_has_no_thought_where_reasoning_is_not_parsed(tool_server, reasoning, begun):
    inputs, tokenizer = tool_server.async_llm.engine.inputs, tool_server.async_llm.llm.get_tokenizer()
    prompt = {"add_generation_prompt": not begun, "continue_final_message": bool(begun)}
    request = ChatCompletionRequest(messages=[*QUESTION, *begun], tools=TOOLS, tool_choice="required", **prompt)
    prepared = ChatFormat(reasoning, tool_calls=True).prepare(request, inputs, SamplingParams(max_tokens=40))
    state = inputs.compile(prepared).constraints[-1]
    for token_id in tokenizer.encode("Hm." if begun else "<think>Hm.", add_special_tokens=False):
        state.advance(token_id)
    assert (state.error is None) == reasoning
    assert prepared.params.thinking_token_budget == (10 if reasoning else None)


def test_an_answer_that_repeats_itself_ends(tool_server, thinking):
    detection = {"repetition_detection": {"max_pattern_size": 2, "min_count": 4}}
    choice = post(tool_server, CHAT, {"messages": QUESTION} | thinking | detection)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["reasoning"]) == ("repetition", "<think>" * 3)
    message = post(tool_server, MESSAGES, {"messages": QUESTION} | thinking | detection)
    assert message["stop_reason"] == "max_tokens"
    body = {"input": "How warm is Oslo?", "logit_bias": thinking["logit_bias"], "max_output_tokens": 12}
    response = post(tool_server, RESPONSES, body | detection)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 4


def test_the_log_probabilities_of_given_ids_are_listed(tool_server):
    body = {"max_tokens": 3, "temperature": 0, "return_tokens_as_token_ids": True, "logprob_token_ids": [5, 300]}
    chat = post(tool_server, CHAT, {"messages": QUESTION, "logprobs": True} | body)["choices"][0]["logprobs"]["content"]
    assert [{entry["token"] for entry in position["top_logprobs"]} for position in chat] == [{"token_id:5", "token_id:300"}] * 3
    everything = post(tool_server, "/v1/completions", {"prompt": "Once", "logprobs": 0} | body)["choices"][0]["logprobs"]
    for token, top in zip(everything["tokens"], everything["top_logprobs"], strict=True):
        assert top.keys() == {token, "token_id:5", "token_id:300"}
