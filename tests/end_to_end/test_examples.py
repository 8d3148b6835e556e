"""Every example runs, offline and without a warning, and is short."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

# What each must print: something that only a right run can say.
SAYS = {
    "offline_batch": ["named Lily.", "40 tokens, length"],
    "streaming": ["ended by 'stop'", "first token after"],
    "chat": ["Tom", "0 of them from the cache", "64 of them from the cache"],
    "per_request_parameters": ["a kind duck named", "until a full stop: Once upon a time, there was a kind duck named Max.\n"],
    "beam_search": ["greedy  -10.812", "width 8 -10.790"],
    "logprobs": ["-21.97  Once upon a time, there was a kind duck.", "-36.39"],
    "prefix_caching": ["cache: 0 of 113", "cache: 112 of 113"],
    "custom_stage": ["14 stages", "15 stages", "!"],
    "custom_model": ["log-probability -14.9", "log-probability -71.3"],
    "tracing_to_html": ["found its beginning in blocks (0,)", "u = "],
    "tool_loop": ['weather({"city": "', ") -> "],
    "benchmark": [" 64 sequences"],
}


def test_every_example_is_known_here():
    assert {path.stem for path in EXAMPLES} == set(SAYS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_is_under_40_lines(path, tmp_path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 40
    run = subprocess.run([sys.executable, "-W", "error", path], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0, run.stderr
    for words in SAYS[path.stem]:
        assert words in run.stdout
    written = {file.name for file in tmp_path.iterdir()}
    assert written == ({"trace.html", "trace.jsonl"} if path.stem == "tracing_to_html" else set())
