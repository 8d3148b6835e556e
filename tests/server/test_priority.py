"""The priority of the requests of every endpoint: those that wait begin in its order. test_async_llm.py has late arrivals."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanoinfer import AsyncLLM
from tests.helpers import http_server

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


@pytest.mark.parametrize("step", [4, 10])
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
