"""`nanoinfer chat --url`: our own server, one of scripted bytes, and servers that fail."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.chat_model import RemoteModel
from nanoinfer.cli.chat_session import ChatSession
from nanoinfer.cli.main import app
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.client import Client
from tests.helpers import fake_server
from tests.helpers.fake_server import chat_events, event, reply, stream

LILY = "Tell me a story about Lily"


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def run(server, *arguments, stdin=""):
    return CliRunner().invoke(app, ["chat", "--url", getattr(server, "url", server), *arguments], input=stdin)


def session_with(server, **options):
    model = RemoteModel(Client(server.url), "fake", set(options))
    return ChatSession(model, SamplingParams(**{"max_tokens": None} | options))


@pytest.mark.slow
def test_an_answer_of_our_server_is_that_of_llm_chat():
    for name in ("fastapi", "uvicorn", "prometheus_client", "httpx2"):
        pytest.importorskip(name)
    from nanoinfer import LLM
    from tests.helpers import http_server

    llm = LLM("tiny-qwen3")
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12)
    expected = llm.chat([{"role": "user", "content": LILY}], params, use_tqdm=False)[0]
    with http_server.serving() as server:
        options = "--temperature 0.8 --seed 5 --max-tokens 12 --stats"
        result = run(server.url + "/v1/", LILY, *options.split())
        assert (result.exit_code, result.stdout) == (0, expected.outputs[0].text + "\n"), result.stderr
        cut, stats = result.stderr.splitlines()
        assert cut == "(the answer is cut: max_tokens is 12)"
        assert stats.startswith(f"(prompt {len(expected.prompt_token_ids)} tokens (")
        assert "output 12 tokens" in stats
        assert stats.endswith("tokens/s, measured from outside)")
        refused = run(server, LILY, "--top-k", "-5")
        assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
        too_long = run(server, "a " * 5000)
        assert "answered 400: This model's maximum context length is 512 tokens" in too_long.stderr


def test_only_what_is_given_is_sent():
    with fake_server.serving(stream(*chat_events("Hi"))) as server:
        assert run(server, "Hello").stdout == "Hi\n"
        options = "--temperature 1 --stop a --max-tokens 9 --no-thinking --system Be -m other --api-key k"
        assert run(server, "Hello", *options.split()).exit_code == 0
    always = {"stream": True, "stream_options": {"include_usage": True}}
    question = {"role": "user", "content": "Hello"}
    assert server.bodies == [
        {"model": "fake", "messages": [question]} | always,
        {"model": "other", "messages": [{"role": "system", "content": "Be"}, question], "temperature": 1.0, "stop": ["a"]}
        | {"max_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}
        | always,
    ]
    assert [headers.get("Authorization") for headers in server.headers] == [None, "Bearer k"]


def test_set_reaches_the_server_and_seeds_go_on(capsys):
    with fake_server.serving(stream(*chat_events("Hi"))) as server:
        session = session_with(server, seed=3)
        for line in ("Hello", "/set temperature 1.0", "/set stop END", "/retry", "/set seed None", "/set stop []", "/set"):
            session.handle(line)
    sent = [{name: body[name] for name in ("seed", "temperature", "stop") if name in body} for body in server.bodies]
    assert sent == [{"seed": 3}, {"seed": 4, "temperature": 1.0, "stop": ["END"]}]
    shown = capsys.readouterr().err
    assert "temperature                 1.0\n" in shown
    assert "top_k                       as the server has it\n" in shown


def test_reasoning_is_between_tags_and_not_sent_again(capsys):
    thinking = [{"reasoning": "Hm", "reasoning_content": "Hm"}, {"reasoning_content": "."}, "Yes", "!"]
    with fake_server.serving(stream(*chat_events(*thinking)), stream(*chat_events({"reasoning": "So"}))) as server:
        session = session_with(server)
        for question in ("a", "b", "c"):
            session.handle(question)
    assert capsys.readouterr().out == "<think>\nHm.\n</think>\n\nYes!\n" + "<think>\nSo\n" * 2
    assert [message["content"] for message in server.bodies[2]["messages"]] == ["a", "Yes!", "b", "", "c"]


def test_ctrl_c_keeps_what_was_shown_and_closes_the_connection(monkeypatch, capsys):
    shown = threading.Event()
    show = lambda *text, **how: print(*text, **how) or shown.set()  # noqa: E731
    monkeypatch.setattr("nanoinfer.cli.generate.print", show, raising=False)

    def client_waits_for_bytes():
        return sys._current_frames()[threading.main_thread().ident].f_code.co_filename == socket.__file__

    def interrupted():
        yield stream(*chat_events("Once")[:1])
        shown.wait(120)
        while not client_waits_for_bytes():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(12_000):
            yield b": still here\n\n"
            yield 0.01

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with fake_server.serving(interrupted()) as server:
            session = session_with(server)
            session.handle("Hello")
            assert server.has_left.wait(120)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert [message["content"] for message in session.messages] == ["Hello", "Once"]
    assert capsys.readouterr() == ("Once\n", "(stopped)\n")


ONCE = chat_events("Once")
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "shown", "words"),
    [
        (reply(500, {"error": {"message": "out of\nmemory"}}), "", "/v1/chat/completions answered 500: out of memory"),
        (reply(404, {"error": "no such model"}), "", "answered 404: no such model"),
        (reply(422, {"detail": "no field"}), "", "answered 422: no field"),
        (reply(401, {"error": {"message": "no key"}}), "", "answered 401: no key; give --api-key, or set OPENAI_API_KEY"),
        (reply(502, b"<html>" + b"x" * 10**6), "", "answered 502: <html>xxx"),
        (reply(503, b""), "", "answered 503: (no text)"),
        (reply(302, b""), "", "answered 302"),
        (reply(200, {"choices": []}), "", "ended before its last event"),
        (stream(event(b"<html>")), "", "sent '<html>' where a JSON object was expected"),
        (stream(event(b"[1]")), "", "sent '[1]' where a JSON object was expected"),
        (stream(event({"choices": "Hi"})), "", "which is not a chunk of OpenAI's API"),
        (stream(event({"choices": [{"delta": "Hi"}]})), "", "which is not a chunk of OpenAI's API"),
        (stream(ONCE[0]), "Once\n", "ended before its last event"),
        (stream(ONCE[0], event({"error": {"message": "aborted"}})), "Once\n", "failed: aborted"),
        (CHUNKED + b"5\r\nabc", "", "broke (IncompleteRead"),
        (CHUNKED + b"zz\r\n", "", "broke ("),
        (b"not HTTP", "", "broke ("),
        (b"", "", "broke ("),
    ],
)
def test_a_server_that_fails_is_one_sentence(answer, shown, words):
    with fake_server.serving(answer) as server:
        result = run(server, "Hello")
    assert (result.exit_code, result.stdout) == (1, shown)
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 500


def test_after_an_error_the_session_goes_on():
    with fake_server.serving(reply(500, {"error": "busy"}), stream(*chat_events("Hi"))) as server:
        session = session_with(server)
        with pytest.raises(NanoinferError, match="busy"):
            session.handle("a")
        session.handle("b")
        assert [message["content"] for message in session.messages] == ["b", "Hi"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1/v1"),
        (["--url", "http://127.0.0.1:1"], "start one with `nanoinfer serve`, or correct the URL"),
        (["--url", "localhost:8000"], "the URL must be such as http://127.0.0.1:8000 or https://host/v1"),
        (["--url", "http://host:port"], "the URL must be such as"),
        (["--url", "http://a/\nb"], "the URL must be such as"),
        (["--url", "http://127.0.0.1:1", "--dtype", "float32", "--max-model-len", "9"], "--dtype, --max-model-len cannot"),
        (["--url", "http://127.0.0.1:1", "--temperature", "-1"], "temperature must be finite and >= 0, got -1.0"),
        (["--url", "http://127.0.0.1:1", "--api-key", "a\nb"], "the API key has characters"),
        (["--api-key", "k"], "--api-key is for a server; give its --url, too"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, words):
    result = CliRunner().invoke(app, ["chat", "Hello", *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_server_without_models_or_usage(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    with fake_server.serving(stream(*chat_events("Hi", finish_reason="length")), models=()) as server:
        assert "lists no model; name one with --model" in run(server, "Hello").stderr
        result = run(server, "Hello", "-m", "m", "--stats")
    assert result.stderr == "(the answer is cut: a limit of the server)\n(the server reports no numbers of tokens)\n"
    assert server.headers[0]["Authorization"] == "Bearer from the environment"


@pytest.mark.slow
def test_nothing_heavy_is_imported():
    with fake_server.serving(stream(*chat_events("Hi", num_tokens=1))) as server:
        arguments = ["chat", "--url", server.url, "Hello", "--stats"]
        code = f"import sys; from nanoinfer.cli.main import app; app({arguments}, standalone_mode=False); print(*sys.modules)"
        command = [sys.executable, "-c", code]
        imported = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout.split()
    assert imported[0] == "Hi"
    assert not {"torch", "transformers", "numpy", "fastapi"} & set(imported)
