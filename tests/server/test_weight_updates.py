"""A trainer pauses a server, replaces its weights by a folder's, and lets it answer again."""

import shutil
import threading

import http_server
import pytest
from safetensors.torch import load_file, save_file

from nanoinfer import AsyncLLM
from nanoinfer.loading.checkpoint import Checkpoint

BODY = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
LONG = BODY | {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny-qwen3 with other weights in its last norm."""
    path = tmp_path_factory.mktemp("trained") / "model"
    shutil.copytree(Checkpoint.open("tiny-qwen3").path, path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.norm.weight": -tensors["model.norm.weight"]}, path / "model.safetensors", {"format": "pt"})
    return str(path)


@pytest.fixture(scope="module")
def server():
    with http_server.serving(lambda: AsyncLLM("tiny-qwen3", seed=0, kv_cache_memory=2**22), weight_updates=1) as server:
        yield server


def token_ids(server, body=BODY):
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def test_the_weights_of_a_folder_answer_after_a_pause(server, folder):
    assert server.get("/get_world_size").json() == {"world_size": 1}
    before, long_answer = token_ids(server), []
    thread = threading.Thread(target=lambda: long_answer.extend(token_ids(server, LONG)))
    thread.start()
    while not server.num_unfinished():
        pass
    assert server.post("/pause", {}).json() == {"weights_version": 0, "is_paused": True}
    thread.join(60)
    assert len(long_answer) == 200, "what runs is answered to the end"
    refused = server.post("/v1/completions", BODY)
    assert (refused.status_code, "call resume() first" in refused.text) == (503, True)
    assert server.get("/health").status_code == 200
    assert server.post("/update_weights", {"path": folder}).json() == {"weights_version": 1, "is_paused": True}
    assert server.post("/resume", {}).json() == {"weights_version": 1, "is_paused": False}
    after = token_ids(server)
    assert after != before
    assert server.post("/update_weights", {"path": folder + "/nowhere"}).status_code == 400
    assert token_ids(server) == after
    assert server.post("/pause?mode=keep", {}).status_code == 400


def test_a_pause_may_end_what_runs_and_a_server_without_the_option_has_none_of_it(server):
    with http_server.serving() as plain:
        assert [plain.post(path, {}).status_code for path in ("/pause", "/resume", "/update_weights")] == [404] * 3
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", LONG).json()))
    thread.start()
    while not server.num_unfinished():
        pass
    assert server.post("/pause?mode=abort", {}).json()["is_paused"]
    thread.join(60)
    assert server.post("/resume", {}).json() == {"weights_version": 1, "is_paused": False}
    assert "error" in answers[0] or answers[0]["choices"][0]["finish_reason"] == "abort"
