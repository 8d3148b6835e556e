"""A trainer pauses a server, replaces its weights by a folder's, and lets it answer again."""

import shutil
import threading
from functools import partial

import pytest
from safetensors.torch import load_file, save, save_file

from nanoinfer import AsyncLLM
from nanoinfer.features.training.methods import refuse_requests
from nanoinfer.loading.checkpoint import Checkpoint
from tests.helpers import http_server
from tests.helpers.limited_steps import limited_steps

BODY = {"prompt": "Once upon", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
KEY = {"Authorization": "Bearer second"}
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
    load = partial(AsyncLLM, "tiny-qwen3", seed=0, kv_cache_memory=2**22)
    with http_server.serving(load, enable_weight_update=True) as running:
        yield running


def token_ids(server, body=BODY):
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


@pytest.fixture
def own(server):
    """The tokens of the model's own weights, which the server has again, and their version."""
    server.async_llm.llm.update_weights(load_file(Checkpoint.open("tiny-qwen3").path / "model.safetensors").items())
    return token_ids(server), server.async_llm.engine.weights_version


@pytest.mark.slow
def test_the_weights_of_a_folder_answer_after_a_pause(server, folder, own):
    assert server.get("/get_world_size").json() == {"world_size": 1}
    (before, version), long_answer = own, []
    thread = threading.Thread(target=lambda: long_answer.extend(token_ids(server, LONG)))
    with limited_steps(server.async_llm.engine, 5):
        thread.start()
        server.wait_until_busy()
    assert server.post("/pause", {}).json() == {"weights_version": version, "is_paused": True}
    thread.join(600)
    assert len(long_answer) == 200, "what runs is answered to the end"
    refused = server.post("/v1/completions", BODY)
    assert (refused.status_code, "call resume() first" in refused.text) == (503, True)
    assert server.get("/health").status_code == 200
    assert server.post("/update_weights", {"path": folder}).json() == {"weights_version": version + 1, "is_paused": True}
    assert server.post("/resume", {}).json() == {"weights_version": version + 1, "is_paused": False}
    after = token_ids(server)
    assert after != before
    for path in (folder + "/nowhere", "x" * 10_000):
        assert server.post("/update_weights", {"path": path}).status_code == 400
    assert token_ids(server) == after
    assert server.post("/pause?mode=keep", {}).status_code == 400
    assert [server.post(path, {"mod": "wait"}).status_code for path in ("/pause", "/resume")] == [400] * 2
    assert not server.post("/resume", {}).json()["is_paused"]


@pytest.mark.slow
def test_the_tensors_of_a_file_replace_weights_and_what_does_not_fit_changes_nothing(server, folder, own, tmp_path):
    name, file = "model.norm.weight", tmp_path / "some.safetensors"
    trained = load_file(folder + "/model.safetensors")
    before, version = own
    cut = save({name: trained[name][:-1]})
    for content, words in ((b"not a file of tensors", "truncated or corrupted"), (cut, "misshaped")):
        file.write_bytes(content)
        response = server.post("/update_weights", {"path": str(file)})
        assert (response.status_code, words in response.text) == (400, True), response.text
    assert token_ids(server) == before
    file.write_bytes(save({name: trained[name]}))
    assert server.post("/update_weights", {"path": str(file)}).json() == {"weights_version": version + 1, "is_paused": False}
    assert token_ids(server) != before
    octets = {"Content-Type": "application/octet-stream"}
    assert server.post("/update_weights", content=b"{}", headers=octets).status_code == 415


@pytest.mark.parametrize("stream", [False, True])
def test_a_pause_that_comes_while_a_request_is_prepared_refuses_it(server, monkeypatch, stream):
    inputs, llm = server.async_llm.engine.inputs, server.async_llm.llm
    prepare_prompt = inputs.prepare_prompt

    def prepared_before_the_pause(*args, **kwargs):
        prepared = prepare_prompt(*args, **kwargs)
        refuse_requests(llm.engine, "wait")
        return prepared

    monkeypatch.setattr(inputs, "prepare_prompt", prepared_before_the_pause)
    refused = server.post("/v1/completions", BODY | {"stream": stream})
    assert refused.status_code == (200 if stream else 503)
    assert "this LLM is paused; call resume() first" in refused.text
    assert not server.post("/resume", {}).json()["is_paused"]


@pytest.mark.slow
def test_a_pause_may_end_what_runs_and_a_server_without_the_option_has_none_of_it(server, guarded):
    assert [guarded.post(path, {}, headers=KEY).status_code for path in ("/pause", "/resume", "/update_weights")] == [404] * 3
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", LONG).json()))
    with limited_steps(server.async_llm.engine, 5):  # so that the answer cannot end by itself
        thread.start()
        server.wait_until_busy()
        assert server.post("/pause?mode=abort", {}).json()["is_paused"]
    thread.join(600)
    assert not server.post("/resume", {}).json()["is_paused"]
    assert "error" in answers[0] or answers[0]["choices"][0]["finish_reason"] == "abort"
