"""A trainer pauses a server, replaces its weights by a folder's, and lets it answer again."""

import os
import re
import shutil
import socket
import stat
import threading

import httpx2
import pytest
from safetensors.torch import load_file, save, save_file

from nanoinfer import AsyncLLM
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.server import updates
from nanoinfer.training import rollouts
from tests.helpers import http_server
from tests.helpers.limited_steps import limited_steps

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
    with http_server.serving(
        lambda: AsyncLLM("tiny-qwen3", seed=0, kv_cache_memory=2**22), enable_weight_update=True
    ) as server:
        yield server


def token_ids(server, body=BODY):
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@pytest.mark.slow
def test_the_weights_of_a_folder_answer_after_a_pause(server, folder):
    assert server.get("/get_world_size").json() == {"world_size": 1}
    before, long_answer = token_ids(server), []
    thread = threading.Thread(target=lambda: long_answer.extend(token_ids(server, LONG)))
    with limited_steps(server.async_llm.engine, 5):
        thread.start()
        server.wait_until_busy()
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
    for path in (folder + "/nowhere", "x" * 10_000):
        assert server.post("/update_weights", {"path": path}).status_code == 400
    assert token_ids(server) == after
    assert server.post("/pause?mode=keep", {}).status_code == 400
    assert [server.post(path, {"mod": "wait"}).status_code for path in ("/pause", "/resume")] == [400] * 2
    assert not server.post("/resume", {}).json()["is_paused"]


def update_by_file(server, content, **headers):
    headers = {"Content-Type": "application/octet-stream"} | headers
    return httpx2.post(server.url + "/update_weights", content=content, headers=headers, timeout=60)


@pytest.mark.slow
def test_the_tensors_of_a_file_in_the_body_replace_weights_and_what_does_not_fit_changes_nothing(server, folder):
    names = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    trained = load_file(folder + "/model.safetensors")
    before = load_file(Checkpoint.open("tiny-qwen3").path / "model.safetensors")
    server.async_llm.llm.update_weights(before.items())
    version, own = server.async_llm.engine.weights_version, token_ids(server)
    refused = [
        (b"not a file of tensors", "truncated or corrupted"),
        (save({"model.norm.weight": trained[names[0]][:-1]}), "misshaped"),
        (save({"norm.of.another.model": trained[names[0]]}), "unexpected"),
        (save({name: trained[name] for name in names})[:-5], "truncated or corrupted"),
        (save({}), "body.safetensors holds no tensors"),
    ]
    for content, words in refused:
        response = update_by_file(server, content)
        assert (response.status_code, re.search(words, response.text) and "fits") == (400, "fits"), response.text
        assert "tmp" not in response.text
    for content_type, status in (("text/plain", 415), ("application/json", 400)):
        assert update_by_file(server, b"{}", **{"Content-Type": content_type}).status_code == status
    assert token_ids(server) == own
    response = update_by_file(server, save({names[0]: trained[names[0]]}))
    assert response.json() == {"weights_version": version + 1, "is_paused": False}
    after = token_ids(server)
    server.async_llm.llm.update_weights_from_path(folder)
    assert token_ids(server) == after != own


def stalled_upload(server):
    head = "POST /update_weights HTTP/1.1\r\nHost: x\r\nContent-Type: application/octet-stream\r\nContent-Length: 9\r\n\r\nx"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(head.encode())
    return connection


def test_a_stalled_upload_ends_and_delays_no_other_and_a_third_is_refused(server, folder, monkeypatch):
    monkeypatch.setattr(updates, "STALLED_AFTER", 1.0)
    content = save({"model.norm.weight": load_file(f"{folder}/model.safetensors")["model.norm.weight"]})
    with stalled_upload(server) as stalled:
        assert update_by_file(server, content).status_code == 200
        with stalled_upload(server) as other:
            refused = update_by_file(server, content)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "2 files already arrive or are read; send this one when they have ended" in refused.text
            for one in (stalled, other):
                assert one.recv(2000).startswith(b"HTTP/1.1 408"), "no part of the body arrived"
    assert update_by_file(server, content).status_code == 200


def test_a_file_is_limited_by_the_size_of_the_model_and_is_private_and_gone_afterwards(server, monkeypatch):
    assert 2**22 < server.app.state.max_file_bytes < 2**28
    seen = []

    def examined(path):
        seen.append((path, stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode), os.path.getsize(path)))

    monkeypatch.setattr(server.async_llm.llm, "update_weights_from_path", examined, raising=False)
    assert update_by_file(server, b"x" * 2**23).status_code == 200, "more than max_body_bytes"
    monkeypatch.setattr(server.app.state, "max_file_bytes", 2**16)
    assert update_by_file(server, b"x" * 2**17).status_code == 413
    assert [one[1:] for one in seen] == [(0o700, 2**23)]
    assert not os.path.exists(seen[0][0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_pause_that_comes_while_a_request_is_prepared_refuses_it(server, monkeypatch, stream):
    inputs, llm = server.async_llm.engine.inputs, server.async_llm.llm
    prepare_prompt = inputs.prepare_prompt

    def prepared_before_the_pause(*args, **kwargs):
        prepared = prepare_prompt(*args, **kwargs)
        rollouts.refuse_requests(llm.engine, "wait")
        return prepared

    monkeypatch.setattr(inputs, "prepare_prompt", prepared_before_the_pause)
    refused = server.post("/v1/completions", BODY | {"stream": stream})
    assert refused.status_code == (200 if stream else 503)
    assert "this LLM is paused; call resume() first" in refused.text
    assert not server.post("/resume", {}).json()["is_paused"]


@pytest.mark.slow
def test_a_pause_may_end_what_runs_and_a_server_without_the_option_has_none_of_it(server):
    with http_server.serving() as plain:
        assert [plain.post(path, {}).status_code for path in ("/pause", "/resume", "/update_weights")] == [404] * 3
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", LONG).json()))
    with limited_steps(server.async_llm.engine, 5):  # so that the answer cannot end by itself
        thread.start()
        server.wait_until_busy()
        assert server.post("/pause?mode=abort", {}).json()["is_paused"]
    thread.join(60)
    assert not server.post("/resume", {}).json()["is_paused"]
    assert "error" in answers[0] or answers[0]["choices"][0]["finish_reason"] == "abort"
