"""LLM.chat with tools: what the model reads, and calls that are required."""

from dataclasses import replace

import pytest

from nanoinfer import LLM, SamplingParams, StructuredOutputsParams, parse_chat_answer
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from tests.helpers.tool_cases import NAMED, QUESTION, TOOLS, check_call

ONE_TOKEN = SamplingParams(max_tokens=1)
STRICT = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]


@pytest.fixture(scope="module")
def llm(tools_path) -> LLM:
    return LLM(tools_path, kv_cache_memory=2**24)


def test_the_prompt_has_the_tools_the_calls_and_their_results(llm):
    function = {"name": "weather", "arguments": '{"city":"Oslo","days":1}'}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
    ]
    prompt = llm.render_chat(messages, tools=TOOLS)["prompt"]
    assert '"name": "night"' in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>' in prompt
    assert "<tool_response>\n12\n</tool_response>" in prompt
    assert prompt == llm.chat(messages, ONE_TOKEN, False, tools=TOOLS)[0].prompt
    [plain], [left_out] = (
        llm.chat(QUESTION, ONE_TOKEN, False, **more) for more in ({}, {"tools": TOOLS, "tool_choice": "none"})
    )
    assert left_out.prompt == plain.prompt
    assert "<tools>" not in plain.prompt


@pytest.mark.parametrize(("choice", "thinks"), [("required", True), ("required", False), (NAMED, True)])
def test_random_weights_make_valid_calls_if_they_must(llm, choice, thinks):
    ids = llm.get_tokenizer().convert_tokens_to_ids
    soon = {ids("<think>"): 100.0, ids("</think>"): 100.0, ids("<|im_end|>"): 100.0}  # answers end soon, where they may end
    params = SamplingParams(max_tokens=150, temperature=1.5, n=3, seed=1, logit_bias=soon)
    kwargs = {"enable_thinking": thinks}
    output = llm.chat(QUESTION, params, False, tools=TOOLS, tool_choice=choice, chat_template_kwargs=kwargs)[0]
    for answer in output.outputs:
        assert answer.finish_reason == "stop"
        message = parse_chat_answer(answer.text, output.prompt)
        assert message["content"] is None
        assert answer.text.startswith("<think>") == thinks
        for call in message["tool_calls"]:
            check_call(call["function"]["name"], call["function"]["arguments"])
            assert choice == "required" or call["function"]["name"] == "weather"


def test_a_required_call_may_have_its_tags_as_tokens(llm):
    tags = llm.get_tokenizer().convert_tokens_to_ids(["<tool_call>", "</tool_call>", "<|im_end|>"])
    params = SamplingParams(max_tokens=150, temperature=0, logit_bias=dict.fromkeys(tags, 100.0))
    kwargs = {"enable_thinking": False}
    answer = llm.chat(QUESTION, params, False, tools=TOOLS, tool_choice=NAMED, chat_template_kwargs=kwargs)[0].outputs[0]
    assert answer.token_ids[0] == tags[0]
    assert answer.token_ids[-2:] == tags[1:]


def test_a_required_call_takes_the_place_of_a_structured_output(llm):
    """An answer that is a call has no content that could have a format."""
    kwargs = {"tools": TOOLS, "tool_choice": NAMED, "chat_template_kwargs": {"enable_thinking": False}}
    params = SamplingParams(max_tokens=150, temperature=0, structured_outputs=StructuredOutputsParams(regex="a"))
    answers = [llm.chat(QUESTION, one, False, **kwargs)[0] for one in (params, replace(params, structured_outputs=None))]
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
    [call] = parse_chat_answer(answers[0].outputs[0].text, answers[0].prompt)["tool_calls"]
    check_call(call["function"]["name"], call["function"]["arguments"])


OPENED = "{% for message in messages %}{{ message.content }}{% endfor %}<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("form", [{"choice": ["yes"]}, {"json": {"enum": ["yes"]}}, {"regex": "yes"}])
def test_a_format_follows_the_thought_that_the_template_has_begun(llm, form):
    end, turn = llm.get_tokenizer().convert_tokens_to_ids(["</think>", "<|im_end|>"])
    params = SamplingParams(max_tokens=40, temperature=0, structured_outputs=StructuredOutputsParams(**form))
    for bias in ({end: 100, turn: 100}, {end: -100}):  # reasoning that ends at once, and reasoning that its budget ends
        output = llm.chat(QUESTION, replace(params, logit_bias=bias), False, chat_template=OPENED)[0]
        message = parse_chat_answer(output.outputs[0].text, output.prompt)
        assert message["content"] in ("yes", '"yes"')
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].token_ids.index(end) == (0 if end in bias and bias[end] > 0 else 10)


def test_a_grammar_of_the_users_own_is_that_of_the_whole_answer(llm):
    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(grammar='start: "Hm.</think>yes"'))
    output = llm.chat(QUESTION, params, False, chat_template=OPENED)[0]
    message = parse_chat_answer(output.outputs[0].text, output.prompt)
    assert (message["reasoning"], message["content"]) == ("Hm.", "yes")


def test_a_format_of_gpt_oss_is_that_of_its_final_message(llm):
    template = (
        "<|start|>user<|message|>{{ messages[0].content }}<|end|>{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(choice=["yes"]))
    output = llm.chat(QUESTION, params, False, chat_template=template)[0]
    assert output.prompt.endswith("<|start|>assistant<|channel|>final<|message|>")
    assert parse_chat_answer(output.outputs[0].text, output.prompt)["content"] == "yes"
    free = llm.chat(QUESTION, ONE_TOKEN, False, chat_template=template)[0]
    assert free.prompt.endswith("<|start|>assistant")


WITH_FORM = {"tools": STRICT, "sampling_params": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))}


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"tools": TOOLS, "chat_template": "{{ messages }}"},
            UnsupportedError,
            "^prompt 0: this chat template has no place for",
        ),
        ({"tools": {"name": "f"}}, InvalidTypeError, "tools must be a list"),
        ({"tool_choice": "required"}, InvalidValueError, "^prompt 0: tool_choice 'required' needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, InvalidTypeError, "^prompt 0: tool_choice must be"),
        ({"chat_template_kwargs": {"tools": TOOLS}}, InvalidValueError, "^prompt 0: chat_template_kwargs must not hold tools"),
        (WITH_FORM, InvalidValueError, "^prompt 0: structured_outputs cannot be used with strict tool calls"),
    ],
)
def test_what_cannot_be_honoured_is_refused(llm, kwargs, error, message):
    with pytest.raises(error, match=message):
        llm.chat(QUESTION, use_tqdm=False, **kwargs)
