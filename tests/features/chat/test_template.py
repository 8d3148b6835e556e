"""Chat templates run in a process of their own: transformers' text, and limits that end one template alone."""

import os
import signal
import time

import pytest

from nanoinfer import LLM
from nanoinfer.errors import InvalidPromptError, InvalidValueError
from nanoinfer.features.chat import template as chat_template
from nanoinfer.features.chat.messages import render_chat
from nanoinfer.features.chat.template import apply_chat_template
from nanoinfer.features.chat.tools import tool_schemas
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer.tokenization.tokenizer import Tokenizer
from tests.counts.python_calls import Calls
from tests.helpers.threads import run_in_threads

MESSAGES = [
    {"role": "system", "content": "You are a duck."},
    {"role": "user", "content": "Où est Lily ? 😀 <|im_end|>", "name": None},
]
USER = {"role": "user", "content": "Tell me a story about Lily"}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(BUNDLED / "tiny-qwen3")


def get_weather(city: str, days: int = 1):
    """Tell the weather.

    Args:
        city: The city.
        days: The number of days.
    """


BEYOND_MESSAGES = "{{ bos_token }}|{{ eos_token }}|{{ messages | tojson }}|{{ enable_thinking }}"
TEMPLATES = {
    "its own": {},
    "no generation prompt": {"add_generation_prompt": False},
    "a message that goes on": {"add_generation_prompt": False, "continue_final_message": True},
    "variables": {"chat_template": BEYOND_MESSAGES, "enable_thinking": False},
    "a given token": {"chat_template": "{{ eos_token }}", "eos_token": "</s>"},
    "tools": {"chat_template": "{{ tools | tojson(indent=2) }}", "tools": tool_schemas([get_weather])},
    "break": {"chat_template": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}"},
    "generation": {"chat_template": "{% generation %}{{ messages[0].content }}{% endgeneration %}"},
}


@pytest.mark.parametrize("arguments", TEMPLATES.values(), ids=TEMPLATES)
def test_the_text_is_that_of_transformers(tokenizer, arguments):
    text = apply_chat_template(tokenizer, MESSAGES, **arguments)
    assert text == tokenizer.hf.apply_chat_template(MESSAGES, tokenize=False, **{"add_generation_prompt": True} | arguments)
    assert text


@pytest.mark.slow
def test_a_role_is_one_of_openais_or_one_that_the_template_names():
    with LLM("tiny-qwen3", kv_cache_memory=2**20) as llm:
        inputs = llm.engine.inputs

    def render(*messages, template):
        return render_chat(inputs, [*messages], chat_template=template)["prompt"]

    plain = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
    naming = "{% for message in messages if message.role == 'judge' %}{{ message.content }}{% endfor %}"
    assert render({"role": "judge", "content": "Fair."}, template=naming) == "Fair."
    assert render({"role": "tool", "content": "31"}, template=plain) == "tool: 31"
    for role in ("judge", 5):
        with pytest.raises(InvalidValueError, match=r"messages\[1\]: the role must be one of system, .* names, got "):
            render(USER, {"role": role}, template=plain)


PARTS = {
    "a loop": "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}",
    "a filter": "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}",
    "the first part": "{{ message.content[0].text }}",
    "a sum, which no string has": "{% for part in message.content %}{{ '' + part.text }}{% endfor %}",
    "a string": "{{ message.content | trim }}",
    "both": "{% if message.content is string %}{{ message.content }}{% else %}list{% endif %}",
}
USERS = "{% if message.role == 'user' %}" + PARTS["a loop"] + "{% else %}{{ message.content.strip() }}{% endif %}"
SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + PARTS["a loop"]
PARTS |= {"a loop for users only": USERS, "a loop after a system message alone": SYSTEM}


@pytest.mark.parametrize("content", PARTS.values(), ids=PARTS)
def test_a_content_is_written_whether_the_template_reads_strings_or_lists_of_parts(tokenizer, content):
    template = "{{ bos_token }}{% for message in messages %}{{ '[' + message.role + ']' }}" + content + "{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "It is"},
    ]
    for more in ({}, {"add_generation_prompt": False, "continue_final_message": True}):
        text = apply_chat_template(tokenizer, chat, template, bos_token="", **more)
        assert text == "[system]Be brief.[user]How warm?[assistant][tool]12[assistant]It is"


def test_a_template_that_cuts_or_measures_a_string_gets_no_list(tokenizer):
    for text in ("How warm?", "How warm is it there?"):
        measured = {"content[:10]": text[:10], "content if messages[0].content | length < 10 else ''": text * (len(text) < 10)}
        for content, expected in measured.items():
            template = "{% for message in messages %}{{ messages[0]." + content + " }}{% endfor %}"
            assert apply_chat_template(tokenizer, [{"role": "user", "content": text}], template) == expected


def test_a_template_that_refuses_the_messages_and_what_is_not_json_are_refused(tokenizer):
    loop = []
    loop.append(loop)
    refusing = "{{ raise_exception('roles must alternate') }}"
    for content, more, sentence in (
        ("a", {"chat_template": refusing}, "the chat template refused the messages: roles must alternate"),
        ("a", {"chat_template": "{% for %}"}, "the chat template refused the messages"),
        (1j, {}, r"must be JSON \(Object of type complex is not"),
        ("a", {"documents": loop}, r"must be JSON \(Circular"),
    ):
        with pytest.raises(InvalidPromptError, match=sentence):
            apply_chat_template(tokenizer, [{"role": "user", "content": content}], **more)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows")
def test_a_renderer_that_was_stopped_or_killed_costs_no_other_chat(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template._renderer, "_max_seconds", 60)  # for 1.0 s of a processor that others use too
    expected = apply_chat_template(tokenizer, MESSAGES)
    forever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    start = time.perf_counter()
    with pytest.raises(InvalidPromptError, match=r"was stopped: it took more than 1.0 s, or crashed"):
        apply_chat_template(tokenizer, MESSAGES, chat_template=forever)
    assert time.perf_counter() - start > 0.9
    assert apply_chat_template(tokenizer, MESSAGES) == expected
    os.kill(chat_template._renderer._process.pid, signal.SIGKILL)
    assert apply_chat_template(tokenizer, MESSAGES) == expected


def test_a_long_chat_does_not_use_the_renderer_of_the_others(tokenizer):
    long = [{"role": "user", "content": "word " * 2**15}]
    with chat_template._renderer._lock:  # it is busy
        assert long[0]["content"].strip() in apply_chat_template(tokenizer, long)


def test_threads_get_the_text_of_their_own_messages(tokenizer):
    texts, messages = {}, [[{"role": "user", "content": f"question {i}"}] for i in range(8)]
    run_in_threads(lambda i: texts.update({i: apply_chat_template(tokenizer, messages[i])}), 8)
    assert texts == {i: apply_chat_template(tokenizer, messages[i]) for i in range(8)}


def test_a_chat_with_the_template_of_the_one_before_takes_few_calls(tokenizer):
    apply_chat_template(tokenizer, MESSAGES)
    calls = Calls()
    calls.of(apply_chat_template)(tokenizer, MESSAGES)
    assert calls.total() < 1000
