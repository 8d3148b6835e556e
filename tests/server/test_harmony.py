"""gpt-oss over HTTP: channels become reasoning, content and tool calls in every API, whole and streamed."""

import json

import pytest
from transformers import AutoTokenizer

from nanoinfer import AsyncLLM
from nanoinfer.features.chat.harmony import FINAL, HarmonyParser
from nanoinfer.features.own_code.logits_processors import LogitsProcessor, process_dict_updates
from nanoinfer.server.choices import ChatFormat
from nanoinfer.server.protocol import ChatCompletionRequest
from tests.helpers import http_server, tiny_models
from tests.helpers.doors import CHATS, ask
from tests.helpers.tool_cases import BUNDLED, NAMED, QUESTION, TOOLS, WEATHER, check_call

pytestmark = pytest.mark.slow

MARKS = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")]
# What gpt-oss's template writes, without its system message.
TEMPLATE = """
{%- for tool in tools or [] %}<|start|>developer<|message|>{{ tool | tojson }}<|end|>{% endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}<|start|>functions.weather to=assistant<|channel|>commentary<|message|>
    {%- elif message.tool_calls %}
        {%- if message.content and message.thinking %}{{ raise_exception("content and thinking") }}{% endif %}
        {%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
        {%- set call = message.tool_calls[0].function -%}
        <|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
        {{- call.arguments | tojson }}<|call|>
    {%- elif message.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>
    {%- else %}<|start|>{{ message.role }}<|message|>
    {%- endif %}
    {%- if not message.tool_calls %}{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
CHAT = {"model": "tiny-qwen3", "messages": QUESTION}
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 1}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>A warm day.<|end|><|start|>assistant"


class Scripted(LogitsProcessor):
    """Every answer is the script."""

    script: tuple[int, ...] = ()

    def __init__(self, vllm_config, device, is_pin_memory):
        self.answers = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        process_dict_updates(self.answers, batch_update, lambda params, prompt, output: output)

    def apply(self, logits):
        for row, output in self.answers.items():
            if len(output) < len(self.script):
                logits[row, self.script[len(output)]] += 1000  # what a grammar forbids stays at -inf
        return logits


@pytest.fixture(scope="module")
def harmony_server(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt_oss")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    tiny_models.save("gpt_oss_window", path, vocab_size=len(tokenizer), eos_token_id=ends)
    tokenizer.save_pretrained(path)
    with http_server.serving(lambda: AsyncLLM(path, kv_cache_memory=2**24, logits_processors=[Scripted])) as running:
        yield running


@pytest.fixture
def say(harmony_server, monkeypatch):
    def say(text):
        ids = harmony_server.async_llm.llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
        monkeypatch.setattr(Scripted, "script", tuple(ids))

    return say


@pytest.fixture
def client(harmony_server):
    with http_server.new_client(harmony_server, strict=False) as client:
        yield client


def test_channels_are_reasoning_text_and_calls_of_every_api_whole_and_streamed(harmony_server, say):
    for door in CHATS:
        say(f"{THOUGHT}<|channel|>final<|message|>It is warm.<|return|>")
        reply = ask(harmony_server, door, "How warm is Oslo?", max_tokens=100)
        assert (reply.reasoning, reply.texts, reply.reasons) == ("A warm day.", ["It is warm."], ["stop"]), door
        say(THOUGHT + CALL)
        reply = ask(harmony_server, door, "How warm is Oslo?", max_tokens=100, functions=[tool["function"] for tool in TOOLS])
        [(name, arguments)] = reply.calls
        assert (name, json.loads(arguments)) == ("weather", {"city": "Oslo", "days": 1}), door
        assert (reply.reasoning, reply.texts, reply.reasons) == ("A warm day.", [""], ["tool_calls"]), door


def test_a_call_and_its_result_are_rendered(client, harmony_server, say):
    say(THOUGHT + CALL)
    whole = client.chat.completions.create(**CHAT, tools=TOOLS).choices[0]
    say("<|channel|>final<|message|>Warm.<|return|>")
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "20 degrees"}
    again = CHAT | {"messages": [*QUESTION, whole.message.model_dump(), result], "tools": TOOLS}
    answer = client.chat.completions.create(**again, extra_body={"return_token_ids": True})
    prompt = harmony_server.post("/detokenize", {"tokens": answer.prompt_token_ids}).json()["prompt"]
    assert "<|start|>assistant<|channel|>analysis<|message|>A warm day.<|end|>" in prompt
    assert '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"' in prompt
    assert answer.choices[0].message.content == "Warm."


def test_a_format_is_that_of_the_final_message(client, harmony_server, say):
    say("")
    answer_format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    answer = client.chat.completions.create(**CHAT, response_format=answer_format, extra_body={"return_token_ids": True})
    check_call("weather", answer.choices[0].message.content)
    prompt = harmony_server.post("/detokenize", {"tokens": answer.prompt_token_ids}).json()["prompt"]
    assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>")


def test_a_mark_in_the_text_of_a_format_is_text():
    request = ChatCompletionRequest.model_validate(CHAT | {"tools": TOOLS})
    parser = ChatFormat(True, True, HarmonyParser).make_parser(request, f"<|start|>assistant{FINAL}")
    text = '{"mark": "<|start|>assistant to=functions.weather<|message|>{}"}'
    assert parser.push(text, is_last=True).message()["content"] == text


@pytest.mark.parametrize(("choice", "more"), [("required", {}), (NAMED, {"response_format": {"type": "json_object"}})])
def test_a_required_call_is_all_that_noise_may_write(client, say, choice, more):
    """A structured output is left out, because a call is no content."""
    say("<|channel|>commentary")  # not reasoning of noise, which has no end
    for seed in range(3):
        [answer] = client.chat.completions.create(**CHAT | more, tools=TOOLS, tool_choice=choice, seed=seed).choices
        assert answer.message.content is None
        [call] = answer.message.tool_calls
        assert call.function.name in (["weather"] if choice is NAMED else ["weather", "night"])
        check_call(call.function.name, call.function.arguments)


def test_a_strict_call_obeys_its_schema_and_text_is_free(client, say):
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    say(f"{THOUGHT}<|channel|>final<|message|>It is warm.<|return|>")
    [answer] = client.chat.completions.create(**CHAT, tools=strict).choices
    assert (answer.message.reasoning, answer.message.content) == ("A warm day.", "It is warm.")
    say(CALL.replace('"days": 1', '"days": "one"'))
    for tools, is_free in ((TOOLS, True), (strict, False)):
        [answer] = client.chat.completions.create(**CHAT, tools=tools, max_tokens=60).choices
        arguments = answer.message.tool_calls[0].function.arguments
        assert (arguments.startswith('{"city": "Oslo", "days": '), '"one"' in arguments) == (True, is_free)


def test_a_call_that_is_required_may_follow_reasoning_and_nothing_else(client, harmony_server, say):
    for begin in (THOUGHT, ""):
        say(begin + CALL)
        [answer] = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice="required").choices
        assert (answer.message.reasoning if begin else None) == ("A warm day." if begin else None)
        assert json.loads(answer.message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 1}
    say("<|channel|>final<|message|>It is warm.<|return|>")
    [answer] = client.chat.completions.create(**CHAT, tools=TOOLS, tool_choice="required", max_tokens=40).choices
    assert "It is warm." not in (answer.message.content or "")
    body = CHAT | {"tools": TOOLS, "tool_choice": "required", "add_generation_prompt": False}
    refused = harmony_server.post("/v1/chat/completions", body)
    assert (refused.status_code, "add_generation_prompt=True" in refused.json()["error"]["message"]) == (400, True)
