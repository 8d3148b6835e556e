"""Clients that leave, that do not read, that are too many; stages that raise. Nothing is left, and the others are answered."""

import asyncio
import contextlib
import random
import socket
import struct
import time

import httpx2
import pytest
from starlette.requests import ClientDisconnect

from nanoinfer import AsyncLLM, SamplingParams
from nanoinfer.sampling.sampler import STAGES
from tests.helpers import http_server
from tests.helpers.limited_steps import limited_steps

COMPLETIONS = "/v1/completions"
PROMPTS = ["Once upon a time", "The cat", "One day, Lily", "Tim and Anna went"]
LONG = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True}


@pytest.fixture(scope="module")
def small():
    """Two run, further ones wait."""
    with http_server.serving(lambda: AsyncLLM("tiny-qwen3", max_num_seqs=2, max_num_queued_requests=6, seed=0)) as running:
        yield running


def reset(connection):
    """Close at once, with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def leave(connection):
    connection.close()


def all_at_once(server, bodies, limit=1000, on_refusal=lambda: None):
    """The responses to many requests, in order. on_refusal is called for each 429."""

    async def main():
        async def post(body):
            response = await client.post(COMPLETIONS, json=body)
            if response.status_code == 429:
                on_refusal()
            return response

        limits = httpx2.Limits(max_connections=limit)
        patience = httpx2.Timeout(60, pool=None)  # the last requests wait for all others
        async with httpx2.AsyncClient(base_url=server.url, timeout=patience, limits=limits, verify=False) as client:
            return await asyncio.gather(*map(post, bodies))

    return asyncio.run(main())


@pytest.mark.parametrize(("stream", "end"), [(False, leave), (True, leave), (True, reset)])
def test_a_client_that_leaves_frees_its_blocks(small, stream, end):
    with limited_steps(small.async_llm.engine, 5):  # so that no answer can end by itself
        connections = [small.open_stream(LONG | {"stream": stream}) for _ in range(5)]  # two run, three wait
        while small.num_unfinished() < 5:
            time.sleep(0.005)
        for connection in reversed(connections):
            end(connection)
        small.wait_until_idle()
    manager = small.async_llm.engine.block_manager
    assert manager.num_free_blocks == manager.num_blocks


def test_more_answers_than_ever_fit_are_a_bad_request(small):
    for body in ({"prompt": ["x"] * 9}, {"prompt": ["x", "y"], "n": 5}):
        refused = small.post(COMPLETIONS, body)
        assert refused.status_code == 400
        assert "answers are requested, and at most 8 may run or wait" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_connections_that_are_reset_at_random_points_leave_nothing(server):
    rng = random.Random(0)
    for i in range(60):
        body = LONG | {"stream": i % 2 == 0, "n": 1 + i % 3}
        connection = server.open_stream(body) if i % 5 else socket.create_connection(("127.0.0.1", server.port))
        time.sleep(rng.choice((0, 0, 0.001, 0.004)))
        if rng.random() < 0.3:
            connection.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                connection.recv(rng.choice((1, 200)))
        reset(connection)
    server.wait_until_idle()


def test_a_response_that_is_never_started_closes_its_streams(server):
    """A generator that is dropped before its first anext never runs its finally."""
    from nanoinfer.server.answers import Answers, EventStream

    class Stream:
        is_closed = False

        def close(self):
            self.is_closed = True

    async def events():
        raise AssertionError("it was started")
        yield b""

    async def broken(*message):
        raise OSError("the client has left")

    answers = Answers(1)
    answers.streams = [Stream()]
    with pytest.raises(ClientDisconnect):
        asyncio.run(EventStream(answers, events())({"type": "http", "asgi": {"spec_version": "2.4"}}, broken, broken))
    assert answers.streams[0].is_closed


@pytest.mark.slow
def test_slow_readers_delay_nobody_and_cost_little(server):
    logprobs = {"logprobs": 20, "n": 8, "stream": True}  # large events fill the socket's buffers
    slow = [server.open_stream(LONG | logprobs | {"max_tokens": 100, "seed": i}) for i in range(2)]
    assert server.post(COMPLETIONS, {"prompt": "The cat", "max_tokens": 5}).status_code == 200
    while server.num_unfinished():  # the engine does not wait for them
        time.sleep(0.01)
    for connection in slow[1:]:
        reset(connection)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += slow[0].recv(2**16)
    slow[0].close()
    assert data.count(b"data: [DONE]") == 1
    assert data.count(b"data: ") <= 801
    server.wait_until_idle()


@pytest.mark.slow
def test_overload_is_429_and_every_other_answer_is_right(small, llm):
    bodies = [{"prompt": PROMPTS[i % 4], "max_tokens": 10, "seed": i, "stream": i % 3 == 0} for i in range(120)]
    with limited_steps(small.async_llm.engine, 0) as steps:  # nothing ends before one was refused
        responses = all_at_once(small, bodies, on_refusal=lambda: steps.allow(10_000))
    assert {response.status_code for response in responses} == {200, 429}
    for i, (body, response) in enumerate(zip(bodies, responses, strict=True)):
        if response.status_code == 429:
            assert int(response.headers["Retry-After"]) <= 120
            assert response.json()["error"]["code"] == "queue_full"
        elif not body["stream"]:
            params = SamplingParams(temperature=0.7, max_tokens=10, seed=i)
            expected = llm.generate(body["prompt"], params, use_tqdm=False)[0].outputs[0].text
            assert response.json()["choices"][0]["text"] == expected
    small.wait_until_idle()


@pytest.mark.slow
def test_the_tokens_of_a_seed_are_those_of_generate_under_a_mixed_load(server, llm):
    rng = random.Random(5)
    requests = [
        {"prompt": rng.choice(PROMPTS) * rng.randint(1, 9), "max_tokens": rng.randint(1, 40), "seed": rng.randrange(2**40)}
        | rng.choice([{}, {"temperature": 0}, {"top_k": 7}, {"top_p": 0.8, "n": 2}, {"repetition_penalty": 1.3}])
        for _ in range(24)
    ]
    params = [
        SamplingParams(**{"temperature": 0.7} | {name: value for name, value in one.items() if name != "prompt"})
        for one in requests
    ]
    expected = llm.generate([one["prompt"] for one in requests], params, use_tqdm=False)
    gone = [server.open_stream(LONG | {"stream": i % 2 == 0, "n": 2}) for i in range(8)]
    responses = all_at_once(server, [one | {"return_token_ids": True} for one in requests])
    for connection in gone:
        reset(connection)
    for response, output in zip(responses, expected, strict=True):
        assert [one["token_ids"] for one in response.json()["choices"]] == [answer.token_ids for answer in output.outputs]
    server.wait_until_idle()


class FailingStage:
    """Raises for rows with this temperature."""

    def __call__(self, logits, batch):
        if any(one.temperature == 0.123 for one in batch.params):
            raise OSError("cannot read /a/path/of/this/machine")
        return logits


@pytest.mark.slow
def test_a_stage_that_raises_ends_its_request_alone_and_a_dead_engine_answers_503():
    with http_server.serving(lambda: AsyncLLM("tiny-qwen3", stages=[*STAGES, FailingStage()], seed=0)) as server:
        whole = server.post(COMPLETIONS, {"prompt": "x", "temperature": 0.123})
        assert (whole.status_code, whole.json()["error"]["message"]) == (500, "OSError: cannot read <path>")
        assert server.post(COMPLETIONS, {"prompt": "x"}).status_code == 200
        body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0.123, "stream": True}
        events = server.post("/v1/chat/completions", body).text.split("\n\n")
        assert events[-3:-1] == [
            'data: {"error":{"message":"OSError: cannot read <path>","type":"server_error","param":null,"code":null}}',
            "data: [DONE]",
        ]
        assert server.get("/health").status_code == 200
        for _ in range(3):
            server.post(COMPLETIONS, {"prompt": "x", "temperature": 0.123})
        for response in (server.get("/health"), server.post(COMPLETIONS, {"prompt": "x"})):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
            assert "cannot read <path>" in response.json()["error"]["message"]
            assert int(response.headers["Retry-After"]) <= 120
        assert server.get("/metrics").status_code == 200
