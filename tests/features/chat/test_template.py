"""Chat templates run in a process of their own: transformers' text, and limits that end one template alone."""

import os
import signal
import time

import pytest

from nanoinfer.errors import InvalidPromptError
from nanoinfer.features.chat import template as chat_template
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


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {
            "chat_template": "{{ bos_token }}|{{ eos_token }}|{{ messages | tojson }}|{{ enable_thinking }}",
            "enable_thinking": False,
        },
        {"chat_template": "{{ eos_token }}", "eos_token": "</s>"},
        {"chat_template": "{{ tools | tojson(indent=2) }}", "tools": tool_schemas([get_weather])},
        {"chat_template": "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}"},
        {"chat_template": "{% generation %}{{ messages[0].content }}{% endgeneration %}"},
    ],
)
def test_the_text_is_that_of_transformers(tokenizer, arguments):
    text = apply_chat_template(tokenizer, MESSAGES, **arguments)
    assert text == tokenizer.hf.apply_chat_template(MESSAGES, tokenize=False, **{"add_generation_prompt": True} | arguments)
    assert text


def test_the_chat_template_writes_every_message_and_the_generation_prompt_unless_switched_off(tokenizer):
    messages = [USER, {"role": "assistant", "content": "No."}]
    text = "<|im_start|>user\nTell me a story about Lily<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
    assert apply_chat_template(tokenizer, messages, add_generation_prompt=False) == text
    assert apply_chat_template(tokenizer, messages) == text + "<|im_start|>assistant\n"


PARTS = {
    "a loop": "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}",
    "a filter": "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}",
    "the first part": "{{ message.content[0].text }}",
    "a sum, which no string has": "{% for part in message.content %}{{ '' + part.text }}{% endfor %}",
}
PARTS["a loop for users only"] = (
    "{% if message.role == 'user' %}" + PARTS["a loop"] + "{% else %}{{ message.content.strip() }}{% endif %}"
)
PARTS["a loop after a system message alone"] = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + PARTS["a loop"]
)
STRINGS = ["{{ message.content | trim }}", "{% if message.content is string %}{{ message.content }}{% else %}list{% endif %}"]


@pytest.mark.parametrize("content", [*PARTS.values(), *STRINGS], ids=[*PARTS, "a string", "both"])
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
    text = apply_chat_template(tokenizer, chat, template, bos_token="")
    assert text == "[system]Be brief.[user]How warm?[assistant][tool]12[assistant]It is"
    more = {"add_generation_prompt": False, "continue_final_message": True}
    assert apply_chat_template(tokenizer, chat, template, bos_token="", **more) == text


@pytest.mark.parametrize("content", ["content[:10]", "content if messages[0].content | length < 10 else ''"])
def test_a_template_that_cuts_or_measures_a_string_gets_no_list(tokenizer, content):
    template = "{% for message in messages %}{{ messages[0]." + content + " }}{% endfor %}"
    for text in ("How warm?", "How warm is it there?"):
        expected = text[:10] if "[:10]" in content else text if len(text) < 10 else ""
        assert apply_chat_template(tokenizer, [{"role": "user", "content": text}], template) == expected


def test_a_template_that_refuses_the_messages_is_quoted(tokenizer):
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidPromptError, match="the chat template refused the messages: roles must alternate"):
        apply_chat_template(tokenizer, [USER], chat_template=refusing)
    with pytest.raises(InvalidPromptError, match="the chat template refused the messages"):
        apply_chat_template(tokenizer, [USER], chat_template="{% for %}")


def test_what_is_not_json_is_refused(tokenizer):
    with pytest.raises(InvalidPromptError, match=r"must be JSON \(Object of type complex is not"):
        apply_chat_template(tokenizer, [{"role": "user", "content": 1j}])
    loop = []
    loop.append(loop)
    with pytest.raises(InvalidPromptError, match=r"must be JSON \(Circular"):
        apply_chat_template(tokenizer, MESSAGES, documents=loop)


@pytest.mark.slow
def test_a_template_that_is_stopped_ends_alone_and_the_next_chat_is_answered(tokenizer):
    expected = apply_chat_template(tokenizer, MESSAGES)
    forever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    start = time.perf_counter()
    with pytest.raises(InvalidPromptError, match=r"was stopped: it took more than 1.0 s, or crashed"):
        apply_chat_template(tokenizer, MESSAGES, chat_template=forever)
    assert time.perf_counter() - start > 0.9
    assert apply_chat_template(tokenizer, MESSAGES) == expected


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows")
def test_a_renderer_that_was_killed_costs_no_chat(tokenizer):
    expected = apply_chat_template(tokenizer, MESSAGES)
    os.kill(chat_template._renderer._process.pid, signal.SIGKILL)
    assert apply_chat_template(tokenizer, MESSAGES) == expected


def test_a_long_chat_does_not_use_the_renderer_of_the_others(tokenizer):
    long = [{"role": "user", "content": "word " * 2**15}]
    with chat_template._renderer._lock:  # it is busy
        assert long[0]["content"].strip() in apply_chat_template(tokenizer, long)


def test_threads_get_the_text_of_their_own_messages(tokenizer):
    def messages(i):
        return [{"role": "user", "content": f"question {i}"}]

    texts = {}
    run_in_threads(lambda i: texts.update({i: apply_chat_template(tokenizer, messages(i))}), 8)
    assert texts == {i: apply_chat_template(tokenizer, messages(i)) for i in range(8)}


def test_a_chat_with_the_template_of_the_one_before_takes_few_calls(tokenizer):
    apply_chat_template(tokenizer, MESSAGES)
    calls = Calls()
    calls.of(apply_chat_template)(tokenizer, MESSAGES)
    assert calls.total() < 1000
