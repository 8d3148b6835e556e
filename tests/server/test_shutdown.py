"""SIGTERM: nothing new is accepted, running requests finish or end with an error, and the process ends."""

import re
import signal
import subprocess
import sys
import threading

import httpx2
import pytest
from typer.testing import CliRunner

from nanoinfer.cli import options as cli_options
from nanoinfer.cli.main import app
from nanoinfer.system.installation import install_command
from tests.helpers import http_server
from tests.helpers.limited_steps import limited_steps

LONG = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True, "stream": True}
# The engine stops after 20 steps, so that no long answer can end by itself.
FEW_STEPS = """
from itertools import count
from time import sleep
from nanoinfer.engine.llm_engine import LLMEngine
numbers, step = count(), LLMEngine.step
LLMEngine.step = lambda engine: step(engine) if next(numbers) < 20 else sleep(0.001) or []
"""


def start(*options):
    """`nanoinfer serve`, whose engine makes few steps, and its URL."""
    code = FEW_STEPS + "from nanoinfer.cli.main import app; app()"
    command = [sys.executable, "-c", code, "serve", "tiny-qwen3", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if found := re.search(r"running on (http://\S+)", line):
            return process, found[1]
    raise AssertionError("it did not start")


@pytest.mark.slow
def test_sigterm_ends_streams_with_an_error_and_the_process_with_0():
    process, url = start("--shutdown-timeout", "0", "--api-key", "k", "--served-model-name", "m")
    headers = {"Authorization": "Bearer k"}
    with process:
        with httpx2.stream(
            "POST", url + "/v1/completions", json=LONG | {"n": 16}, headers=headers, timeout=600, verify=False
        ) as response:
            lines = response.iter_lines()
            assert '"model":"m"' in next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"the request was aborted"' in rest[-2]
        with pytest.raises(httpx2.TransportError):
            httpx2.get(url + "/health")
        assert process.wait(timeout=120) == 0
        output = process.stdout.read()
        assert "Traceback" not in output, output


@pytest.mark.slow
def test_running_requests_may_finish_and_new_ones_on_open_connections_get_503():
    with http_server.serving(shutdown_timeout=600) as server:
        texts = []
        reader = threading.Thread(target=lambda: texts.append(server.post("/v1/completions", LONG).text))
        with limited_steps(server.async_llm.engine, 5):
            reader.start()
            server.wait_until_busy()
            server.async_llm._is_closing = True
            refused = server.post("/v1/completions", LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert server.get("/health").status_code == 503
            server.async_llm._is_closing = False
    reader.join()
    assert "error" not in texts[0]
    assert '"finish_reason":"length"' in texts[0]


@pytest.mark.slow
def test_a_server_switches_threads_more_often_exempts_what_was_loaded_and_reports_no_leaks_at_its_end():
    code = """
import contextlib, gc, sys
with contextlib.suppress(ImportError):
    import triton  # whose libraries report at exit what was not freed
from nanoinfer.server.run import share_the_process
before = sys.getswitchinterval(), gc.get_freeze_count()
share_the_process()
print(before[0] / sys.getswitchinterval(), before[1], gc.get_freeze_count() > 1000)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    ratio, *rest = ended.stdout.split()
    assert (float(ratio), rest, ended.returncode, ended.stderr) == (pytest.approx(2.5), ["0", "True"], 0, "")


@pytest.fixture
def serve(monkeypatch):
    """Runs the command as if a package were missing, which ends it before a model is loaded."""
    monkeypatch.delenv("NANOINFER_API_KEY", raising=False)
    monkeypatch.setattr(cli_options, "find_spec", lambda name: None)

    def run(*arguments):
        result = CliRunner().invoke(app, ["serve", *arguments])
        assert result.exit_code == 1
        return result.output

    return run


@pytest.mark.parametrize(
    ("arguments", "variable", "message"),
    [
        (["--api-key", ""], None, "API key 1 is empty"),
        (["--api-key", "good", "--api-key", " secret "], None, "API key 2 is empty, has spaces around it"),
        (["--api-key", "s\u00e9cret"], None, "printable ASCII"),
        ([], "", "NANOINFER_API_KEY is empty"),
        ([], " ", "NANOINFER_API_KEY is empty"),
        ([], "good s\u00e9cret", "API key 2"),
    ],
)
def test_a_key_that_no_client_can_send_is_refused_and_not_shown(serve, monkeypatch, arguments, variable, message):
    if variable is not None:
        monkeypatch.setenv("NANOINFER_API_KEY", variable)
    output = serve(*arguments)
    assert (message in output, "cret" in output) == (True, False)


def test_a_server_for_other_machines_without_a_key_warns(serve):
    for arguments, is_warned in (
        ([], False),
        (["--host", "localhost"], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "192.0.2.1"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
    ):
        assert ("warning: everyone who can reach" in serve(*arguments)) == is_warned, arguments


def test_a_second_model_or_a_missing_package_is_one_sentence(serve):
    assert "the model is given twice" in serve("tiny-qwen3", "--model", "tiny-gpt2")
    assert install_command("server") in serve()
