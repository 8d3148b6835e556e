"""When the events of a stream are sent. The engine makes a step only when the event of the last one was read."""

import json

import httpx2
import pytest

from nanoinfer.server import async_llm
from tests.helpers import http_server
from tests.helpers.limited_steps import limited_steps

COMPLETION = ("/v1/completions", {"prompt": "Once upon a time", "logprobs": 1})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True})


def tokens_and_steps(server, path, body, *, num_steps_per_event):
    """Stream an answer of 20 tokens.

    Returns: for each event with tokens, their number, and the number of steps that were made when it was read.
    """
    body, seen = body | {"stream": True, "max_tokens": 20, "ignore_eos": True, "seed": 1}, []
    stream = httpx2.stream("POST", server.url + path, json=body, timeout=600, verify=False)
    with limited_steps(server.async_llm.engine, 1) as steps, stream as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {") and (num_tokens := num_logprobs(json.loads(line.removeprefix("data: ")))):
                seen.append((num_tokens, steps.num_made))
                steps.allow(num_steps_per_event)
    return seen


def num_logprobs(event):
    logprobs = event["choices"][0].get("logprobs") or {}
    return len(logprobs.get("content") or logprobs.get("tokens") or ())


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
@pytest.mark.slow
def test_with_few_streams_each_step_is_sent_before_the_next_one_is_made(server, path, body):
    seen = tokens_and_steps(server, path, body, num_steps_per_event=1)
    assert seen == [(1, num_steps) for num_steps in range(1, 21)]


def test_the_first_and_the_last_tokens_do_not_wait_as_others_do(monkeypatch):
    """With a server of its own, which plans its next delivery for the far future."""
    for name in ("HOLD_SECONDS_PER_STREAM", "MAX_HOLD_SECONDS"):
        monkeypatch.setattr(async_llm, name, 1e6)
    path, body = COMPLETION
    with http_server.serving() as server:
        assert tokens_and_steps(server, path, body, num_steps_per_event=100) == [(1, 1), (19, 20)]
        alone = tokens_and_steps(server, path, body | {"stream_interval": 1}, num_steps_per_event=100)
    assert alone == [(1, 1)] + [(1, 20)] * 19


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
def test_with_stream_interval_1_a_token_without_text_has_a_chunk_too(server, path, body):
    """The answer has the first bytes and the last bytes of characters. A first byte waits for the next token."""
    body = {name: value for name, value in body.items() if name != "logprobs"}
    body |= {"stream": True, "max_tokens": 12, "seed": 1, "allowed_token_ids": [129, 104]}
    num_chunks = [server.post(path, body | more).text.count('"index":0') for more in ({}, {"stream_interval": 1})]
    assert num_chunks[0] < num_chunks[1] == 12 + (path == CHAT[0])  # a chat begins with the role
