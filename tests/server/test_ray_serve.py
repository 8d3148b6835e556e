"""The server as a Ray Serve deployment: its options, its tokens, its streams and its errors are those of `nanoinfer serve`."""

import json
import os
import socket
from dataclasses import replace

import httpx2
import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray"), pytest.mark.filterwarnings("ignore:::pydantic")]
pytest.importorskip("ray.serve", reason='ray[serve] is not installed; pip install -e ".[ray-serve]"')

import ray  # noqa: E402
from ray import serve  # noqa: E402

from nanoinfer.cli.ray_serve import build_app  # noqa: E402
from nanoinfer.errors import InvalidValueError  # noqa: E402


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init("local", num_cpus=1, object_store_memory=2**27, include_dashboard=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        sizes = {"kv_cache_memory": "16M", "prefix_cache_size": "512M"}
        serve.run(build_app({"model": "tiny-qwen3", "seed": "0", "threads": 1, "api_key": "secret", **sizes}))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"modle": "tiny-qwen3"}, "modle is not an option of the server; the options are .*, api_key, "),
        ({"max_num_seqs": "many"}, "max_num_seqs: .* got 'many'"),
        ({"api_key": " secret"}, "API key 1 "),
        ({"device": "cuda:1"}, "on Ray --device must be auto, cpu or cuda, got 'cuda:1'"),
    ],
)
def test_options_are_refused_by_name(args, message):
    with pytest.raises(InvalidValueError, match=message):
        build_app(args)


def test_answers_streams_and_errors_are_those_of_the_server(url, llm):
    headers = {"Authorization": "Bearer secret"}

    def post(**body):
        return httpx2.post(f"{url}/v1/completions", json={"prompt": "Once upon a time", **body}, headers=headers, timeout=600)

    params = replace(llm.get_default_sampling_params(), max_tokens=9, seed=5)
    text = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text
    assert post(max_tokens=9, seed=5).json()["choices"][0]["text"] == text
    *events, done = [line.removeprefix("data: ") for line in post(max_tokens=9, seed=5, stream=True).text.splitlines() if line]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
    assert (len(events) > 2, done) == (True, "[DONE]")
    refused = post(temperature=-1)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    headers.clear()
    assert post().status_code == 401
