"""Messages are refused before a template that would write them somehow."""

import pytest

from nanoinfer import LLM
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.chat.messages import render_chat

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
NAMING = "{% for message in messages if message.role == 'judge' %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def inputs():
    with LLM("tiny-qwen3", kv_cache_memory=2**20) as llm:
        return llm.engine.inputs


def test_a_role_is_one_of_openais_or_one_that_the_template_names(inputs):
    given = [{"role": "judge", "content": "Fair."}]
    assert render_chat(inputs, given, chat_template=NAMING)["prompt"] == "Fair."
    assert render_chat(inputs, [{"role": "tool", "content": "31"}], chat_template=PLAIN)["prompt"] == "tool: 31"
    for role in ("judge", 5):
        with pytest.raises(InvalidValueError, match=r"messages\[1\]: the role must be one of system, .* names, got "):
            render_chat(inputs, [{"role": "user", "content": "a"}, {"role": role}], chat_template=PLAIN)
