"""The priority of the requests of every endpoint: those that wait begin in its order."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from nanoinfer import LLM, AsyncLLM
from tests.helpers import http_server
from tests.helpers.limited_steps import limited_steps
from tests.helpers.starts import recorded_starts

pytestmark = pytest.mark.slow

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
ANSWERED = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
}
READ = {
    "/v1/embeddings": {"input": ["Hello", "Who?"]},
    "/v1/score": {"queries": "Hello", "documents": ["a fox"]},
    "/v1/rerank": {"query": "Hello", "documents": ["a fox", "a duck"]},
}
REQUESTS = [*ANSWERED.items(), *READ.items(), *((path, body | {"stream": True}) for path, body in ANSWERED.items())]


@pytest.fixture(scope="module")
def server(reranker_path):
    load = {"scheduling_policy": "priority", "max_num_seqs": 1, "kv_cache_memory": 2**22, "seed": 0}
    with http_server.serving(lambda: AsyncLLM(reranker_path, **load)) as running:
        yield running


@pytest.mark.parametrize("step", [1, 4, 10])
def test_requests_that_wait_begin_in_the_order_of_their_priorities(server, monkeypatch, step):
    """step: of the priorities from one request to the next, modulo their number."""
    engine, begun, all_wait, replies = server.async_llm.engine, [], [], []
    compute, schedule = engine.step, engine.scheduler.schedule
    num_texts = sum(len(body.get("input", body.get("documents", "a"))) if path in READ else 1 for path, body in REQUESTS)

    def compute_when_all_wait():
        if all_wait or engine.num_unfinished == num_texts or any(reply.done() for reply in replies):  # one was refused
            all_wait.append(True)
            compute()
        else:
            time.sleep(0.001)

    def scheduled():
        plan = schedule()
        begun.extend(item.sequence.priority for item in plan.scheduled)
        return plan

    monkeypatch.setattr(engine, "step", compute_when_all_wait)
    monkeypatch.setattr(engine.scheduler, "schedule", scheduled)
    priorities = [i * step % len(REQUESTS) - 5 for i in range(len(REQUESTS))]
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        for (path, body), priority in zip(REQUESTS, priorities, strict=True):
            replies.append(threads.submit(server.post, path, body | {"priority": priority}))
    assert [reply.result().status_code for reply in replies] == [200] * len(REQUESTS)
    assert list(dict.fromkeys(begun)) == sorted(priorities)
    assert begun == sorted(begun)


@contextmanager
def posting(server):
    """Yields: post(name, priority, max_tokens), which returns when the request has arrived. In the end each gets an answer.

    The name becomes the prompt's first token. priority: None is left out of the body.
    """
    replies = []

    def post(name, priority, max_tokens):
        body = {"prompt": [name, *range(20, 24)], "max_tokens": max_tokens, "ignore_eos": True}
        if priority is not None:
            body["priority"] = priority
        num_before = server.num_unfinished()
        replies.append(threads.submit(server.post, "/v1/completions", body))
        while server.num_unfinished() == num_before:
            assert not replies[-1].done(), replies[-1].result().text
            time.sleep(0.001)

    with ThreadPoolExecutor(16) as threads:
        yield post
    assert [reply.result().status_code for reply in replies] == [200] * len(replies)


def wait_for_steps(server, steps):
    while steps.num_made < steps.num_allowed:
        time.sleep(0.001)
    server.async_llm._thread.call(lambda: None).result(120)  # the last one has ended


def test_a_request_that_arrives_while_others_wait_passes_those_behind_it_and_not_the_one_that_runs(server):
    engine = server.async_llm.engine
    with recorded_starts(engine) as starts, limited_steps(engine, 0) as steps, posting(server) as post:
        post(1, 9, 30)
        steps.allow(2)
        wait_for_steps(server, steps)
        for name, priority in ((2, 3), (3, 0), (4, -2), (5, None), (6, 3), (7, 0)):
            post(name, priority, 2)
        steps.allow(10)
        wait_for_steps(server, steps)
        assert [seq.token_ids[0] for seq in starts] == [1]
        steps.allow(20)
        wait_for_steps(server, steps)
        assert [seq.token_ids[0] for seq in starts] == [1, 4]
        post(8, -(2**63), 2)
        steps.allow(1000)
    assert [seq.token_ids[0] for seq in starts] == [1, 4, 8, 3, 5, 7, 2, 6]


def test_when_blocks_run_out_the_last_in_priority_waits_and_every_request_is_answered(reranker_path):
    """24 blocks of 4 tokens. 1, 2 and 3 need 12 each in the end, so blocks run out when each has 8."""
    load = {"block_size": 4, "max_model_len": 90, "device": "cpu"}
    info = LLM(reranker_path, **load, kv_cache_memory=2**22).info
    load |= {"kv_cache_memory": 24 * info.num_cache_bytes // info.num_blocks, "enable_prefix_caching": False}
    load |= {"scheduling_policy": "priority", "max_num_seqs": 3}
    with http_server.serving(lambda: AsyncLLM(reranker_path, **load)) as server:
        engine = server.async_llm.engine
        with recorded_starts(engine) as starts, limited_steps(engine, 0) as steps, posting(server) as post:
            for name, priority in ((1, 5), (2, 5), (3, None)):
                post(name, priority, 40)
                steps.allow(1)
                wait_for_steps(server, steps)
            post(4, 6, 12)
            post(5, 3, 6)
            steps.allow(1000)
        assert [seq.token_ids[0] for seq in starts] == [1, 2, 3, 5, 2, 4]
