"""`nanoinfer bench serve`: exact counts of our own server, known times of a scripted one, and how requests fail."""

import json
import threading

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.main import app
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer_lab.bench import workloads
from nanoinfer_lab.bench.client import Client
from nanoinfer_lab.bench.serve import Target, figures, run
from nanoinfer_lab.bench.timing import RequestTiming, parse_goodput
from tests.helpers import fake_server
from tests.helpers.fake_server import chat_events, event, reply, stream


def bench(server, *arguments):
    url = [] if server is None else ["--url", server.url]
    return CliRunner().invoke(app, ["bench", "serve", *url, *arguments])


def workload(num_prompts, **changes):
    arguments = {"input_len": "4", "output_len": "6", "request_rate": float("inf"), "sampling": {"temperature": 0.0}, "seed": 0}
    return workloads.described(num_prompts=num_prompts, **arguments | changes)


def measure(server, num_prompts, goodput=(), *, max_concurrency=None, timeout=120.0, **changes):
    target = Target(client=Client(server.url, timeout=timeout), model="fake", is_chat=True, max_concurrency=max_concurrency)
    return run(target, workload(num_prompts, **changes), dict(goodput)).figures


GOOD = stream(*chat_events("a", "b", num_tokens=2))


@pytest.mark.slow
def test_the_counts_of_our_server_are_exact():
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx2"):
        pytest.importorskip(name)
    from tests.helpers import http_server

    options = "--num-prompts 6 --input-len 3-9 --output-len 4-20 --request-rate 100 --max-concurrency 4 --seed 1 --json"
    described = workload(6, input_len="3-9", output_len="4-20", request_rate=100.0, seed=1)
    with http_server.serving() as server:
        for endpoint in ([], ["--chat"]):
            result = bench(server, *options.split(), *endpoint, "--goodput", "ttft:60000 tpot:60000")
            assert result.exit_code == 0, result.output
            [measured] = json.loads(result.stdout)["results"]
            found, [of_run] = measured["figures"], measured["runs"]
            assert (found["num_requests"], found["num_failed"], found["failures"]) == (6, 0, {})
            assert found["num_output_tokens"] == sum(described.output_lens)
            assert found["goodput_requests_per_s"] == pytest.approx(found["requests_per_s"])
            assert found["output_tokens_per_s"] == pytest.approx(found["num_output_tokens"] / found["duration_s"])
            assert 0 < found["ttft_ms"]["p50"] <= found["e2el_ms"]["p50"]
            assert [row["num_output_tokens"] for row in of_run["requests"]] == list(described.output_lens)
            assert {row["finish_reason"] for row in of_run["requests"]} == {"length"}
            if not endpoint:
                assert found["num_prompt_tokens"] == sum(described.input_lens)
                assert of_run["counts"]["prefix_cache_queries"] == sum(described.input_lens)
        table = bench(server, "--num-prompts", "2", "--output-len", "3").stdout
    # No ITL, because the three tokens of a text arrive in one event where the machine is busy.
    words = ("TTFT", "TPOT", "E2EL", "mean ms", "p99 ms", "2 requests in ", "6 output tokens, ")
    assert [name for name in words if name not in table] == []
    assert max(map(len, table.splitlines())) <= 80


def test_the_times_are_those_of_the_chunks():
    """A role at once, then 3 chunks of 2 tokens, 0.05 s apart, and the usage 0.1 s after the last."""
    role, *chunks, usage, done = chat_events({"role": "assistant", "content": ""}, "a", "b", "c", num_tokens=6)
    slow = [stream(role), *(part for chunk in chunks for part in (0.05, chunk)), 0.1, usage, done]
    with fake_server.serving(slow) as server:
        found = measure(server, 4, {"ttft": 49.0})
    assert (found.num_requests, found.num_failed, found.num_output_tokens, found.num_prompt_tokens) == (4, 0, 24, 12)
    assert found.tokens_per_chunk == 2
    assert found.ttft_ms.p50 >= 50  # not that of the role
    assert found.tpot_ms.mean == pytest.approx(found.itl_ms.mean * 2 / 5, abs=0.01)
    assert found.e2el_ms.mean == pytest.approx(found.ttft_ms.mean + 2 * found.itl_ms.mean, abs=0.01)
    assert found.goodput_requests_per_s == 0  # no TTFT is under 49 ms
    assert server.bodies[1]["max_tokens"] == 6
    assert server.bodies[1]["ignore_eos"] is True
    assert len(server.bodies) == 5  # one to warm up


@pytest.mark.slow
def test_no_more_requests_are_in_flight_than_allowed_and_arrivals_are_kept():
    for limit in (3, 12):
        together = threading.Barrier(limit, timeout=120)  # no request is answered before as many are in flight
        with fake_server.serving(GOOD, [together.wait, GOOD]) as server:  # the first one warms up
            assert measure(server, 12, max_concurrency=limit if limit < 12 else None).num_failed == 0
            assert server.peak == limit
    with fake_server.serving(GOOD) as server:
        found = measure(server, 12, request_rate=40.0)
        assert found.duration_s >= workload(12, request_rate=40.0).arrivals[-1]


@pytest.mark.slow
def test_failures_are_counted_by_their_sentence():
    whole = chat_events("a", "b", num_tokens=2)
    bad = {
        "answered 500: out of memory": reply(500, {"error": {"message": "out of memory"}}),
        "ended before its last event": stream(*whole[:-1]),
        "where a JSON object was expected": stream(event(b"<html>")),
        "has no usage": stream(*chat_events("a")),
        "has no text, in 0 tokens": stream(*chat_events(num_tokens=0)),
    }
    with fake_server.serving(GOOD, *bad.values(), reply(500, {"error": "out of memory"}), GOOD) as server:
        found = measure(server, 9)
    assert (found.num_requests, found.num_failed, found.num_output_tokens) == (9, 6, 6)
    counts = {words: count for message, count in found.failures.items() for words in bad if words in message}
    assert counts == dict.fromkeys(bad, 1) | {"answered 500: out of memory": 2}


def test_failures_are_shown_and_are_the_exit_code_and_those_of_the_warm_up_are_an_error():
    with fake_server.serving(GOOD, reply(500, {"error": "busy"})) as server:
        result = bench(server, "--num-prompts", "3", "--chat")
    assert result.exit_code == 1
    assert "3 failed" in result.stdout
    assert f"failed 3 times: {server.url}/v1/chat/completions answered 500: busy" in result.stdout
    with fake_server.serving(reply(500, {"error": "busy"})) as server, pytest.raises(NanoinferError, match="busy"):
        measure(server, 1)


def test_a_server_that_refuses_the_first_request_is_one_sentence():
    with fake_server.serving(reply(400, {"error": {"message": "unknown field ignore_eos"}})) as server:
        result = bench(server)
        assert len(server.bodies) == 1
        assert bench(server, "--no-ignore-eos").exit_code == 1
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "answered 400: unknown field ignore_eos" in result.stderr
    assert "ignore_eos" not in server.bodies[1]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(404, {"error": "no such model"}), "answered 404: no such model"),
        (reply(401, {"error": {"message": "no\nkey"}}), "answered 401: no key; give --api-key, or set OPENAI_API_KEY"),
        (reply(502, b"<html>" + b"x" * 10**6), "answered 502: <html>xxx"),
        (reply(503, b""), "answered 503: (no text)"),
        (reply(200, {"choices": []}), "ended before its last event"),
        (stream(event(b"[1]")), "sent '[1]' where a JSON object was expected"),
        (stream(event({"choices": [{"delta": "Hi"}]})), "which is not a chunk of OpenAI's API"),
        (stream(chat_events("Once")[0], event({"error": {"message": "aborted"}})), "failed: aborted"),
        (CHUNKED + b"5\r\nabc", "broke (IncompleteRead"),
        (b"not HTTP", "broke ("),
        ([stream(chat_events("a")[0]), 0.5], "sent nothing for too long"),
        (b"", "broke ("),
    ],
)
def test_a_server_that_fails_is_one_sentence(answer, words):
    with fake_server.serving(answer) as server, pytest.raises(NanoinferError) as caught:
        measure(server, 1, timeout=0.1 if isinstance(answer, list) else 120.0)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.slow
def test_a_key_of_the_environment_is_sent_and_a_server_without_models_is_an_error(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    with fake_server.serving(GOOD, models=()) as server:
        assert "lists no model; name one with --model" in bench(server).stderr
        assert bench(server, "-m", "m", "--chat").exit_code == 0
    assert server.headers[0]["Authorization"] == "Bearer from the environment"


def test_a_limit_that_is_none_is_refused():
    for text in ("itl:5", "ttft:x", "ttft:-1", "ttft:nan", "ttft:"):
        with pytest.raises(InvalidValueError, match="with milliseconds > 0 and one of ttft, tpot, e2el, got"):
            parse_goodput([f"tpot:5 {text}"])


def test_figures_by_hand():
    timings = [
        RequestTiming(1.0, [1.1, 1.2, 1.4], num_prompt_tokens=5, num_output_tokens=3),
        RequestTiming(2.0, [2.4], num_prompt_tokens=7, num_output_tokens=1),
        RequestTiming(0.5, [0.9], error="cut"),
    ]
    found = figures(timings, {"ttft": 200.0, "e2el": 5000.0})
    assert found.duration_s == pytest.approx(1.9)  # from the first request to the last chunk
    assert (found.num_prompt_tokens, found.num_output_tokens, found.num_failed) == (12, 4, 1)
    assert found.requests_per_s == pytest.approx(2 / 1.9)
    assert found.goodput_requests_per_s == pytest.approx(1 / 1.9)
    assert (found.ttft_ms.mean, found.ttft_ms.p50) == (250.0, 250.0)
    assert (found.tpot_ms.mean, found.itl_ms.p50, found.e2el_ms.mean) == (150.0, 150.0, 400.0)
    nothing = figures(timings[2:], {})
    assert (nothing.requests_per_s, nothing.ttft_ms, nothing.goodput_requests_per_s) == (0.0, None, None)
