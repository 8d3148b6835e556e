"""Every example runs, offline and without a warning, and is short. Those with a client have a server of their own.

Those that take seconds run where they or what they import have changed (tests/ran.py), and with `-m long`.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nanoinfer import AsyncLLM
from tests import ran
from tests.helpers import forked

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
EXAMPLES = [path for path in EXAMPLES if path.stem != "coding_agent"]  # test_coding_agent.py

SECONDS = {"grpo", "tensor_parallel", "benchmark", "tool_loop", "openai_structured_output"}

# What each must print: something that only a right run can say.
SAYS = {
    "offline_batch": ["named Lily.", "40 tokens, length"],
    "streaming": ["ended by 'stop'", "first token after"],
    "chat": ["Tom", "0 of them from the cache", "64 of them from the cache"],
    "per_request_parameters": ["a kind duck named", "until a full stop: Once upon a time, there was a kind duck named Max.\n"],
    "beam_search": ["greedy  -10.812", "width 8 -10.790"],
    "logprobs": ["-21.97  Once upon a time, there was a kind duck.", "-36.39"],
    "embeddings": ["is nearest to 'Lily had a red ball.", "is nearest to 'Tom was a lazy fox."],
    "prefix_caching": ["cache: 0 of 113", "cache: 112 of 113"],
    "shortest_job_first": ["Scheduler: finished in the order [90,", "First: finished in the order [10, 30", "same texts: True"],
    "least_frequently_hit": ["BlockManager: 0 tokens", "LeastFrequentlyHit: 16 tokens"],
    "grpo": ["round 0: reward 0.", "round 1: reward 0."],
    "trl_grpo": ["'rewards/rule/mean': '0."],
    "custom_stage": ["15 stages", "16 stages", "!"],
    "custom_model": ["log-probability -14.9", "log-probability -71.3"],
    "tracing_to_html": ["found its beginning in blocks (0,)", "u = "],
    "tensor_parallel": ["the text of one process: True", "one process: 262,144", "each of two: 131,072"],
    "tool_loop": [
        'calculator({"expression": "12 + 7"}) -> 19\n',
        "= 19\n",
        'dictionary({"word": "brave"}) -> ',
        "means: not afraid\n",
    ],
    "benchmark": [" 64 sequences"],
    "openai_client": ["[24 tokens, length]", "the same text: True"],
    "openai_structured_output": [" years old"],
    "openai_tool_loop": ['weather({"city": "Rome"}) -> sun\n', "The weather in Rome is sun\n"],
    "ray_data_http": ["Lily: ", "Tom: "],
    "ray_serve": ["Lily"],
}


def test_every_example_is_known_here():
    assert {path.stem for path in EXAMPLES} == set(SAYS)
    page = (EXAMPLES[0].parent / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)\.py\)", page)) == {*SAYS, "coding_agent"}


@pytest.fixture(scope="module")
def server_url():
    for name in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx2"):
        pytest.importorskip(name)
    from tests.helpers import http_server

    with http_server.serving() as server:
        yield server.url


@pytest.fixture(scope="module")
def tools_url(server_url):
    """The server of a model that has learned tools."""
    from tests.helpers import http_server

    with http_server.serving(lambda: AsyncLLM("tiny-tools", seed=0)) as server:
        yield server.url


@pytest.fixture
def environment(path, request):
    if path.stem == "openai_tool_loop":
        yield {"OPENAI_BASE_URL": request.getfixturevalue("tools_url") + "/v1"}
    elif path.stem == "ray_serve":
        pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
        pytest.importorskip("openai")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        yield {"PORT": str(port)}
    elif path.stem.startswith(("openai_", "ray_data_")):
        if path.stem == "ray_data_http":
            pytest.importorskip("ray.data", reason="ray[data] is not installed")
        if path.stem == "openai_structured_output":
            pytest.importorskip("llguidance")
        yield {"OPENAI_BASE_URL": request.getfixturevalue("server_url") + "/v1"}
    elif path.stem.endswith("grpo"):
        if path.stem == "trl_grpo":
            pytest.importorskip("trl", reason="trl is not installed")
        request.getfixturevalue("kernels")
        yield {"ROUNDS": "2"}
    else:
        yield {}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem in SECONDS and not ran.is_due(path)))
        for path in EXAMPLES
    ],
)
def test_an_example_runs_and_is_short(path, environment, tmp_path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < (120 if path.stem == "grpo" else 40)
    if path.stem.startswith(("ray_", "trl_")):  # they use what pydantic or transformers has deprecated; Ray must not be forked
        environment, options = os.environ | environment, {"capture_output": True, "text": True, "encoding": "utf-8"}
        run = subprocess.run([sys.executable, path], cwd=tmp_path, env=environment, **options)
    else:
        fewer = ["--answers", "2"] if path.stem == "grpo" else []
        run = forked.run_script(path, *fewer, cwd=tmp_path, environment=environment)
    assert run.returncode == 0, run.stderr
    for words in SAYS[path.stem]:
        assert words in run.stdout
    written = {file.name for file in tmp_path.iterdir()}
    assert written == ({"trace.html", "trace.jsonl"} if path.stem == "tracing_to_html" else set())
