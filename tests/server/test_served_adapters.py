"""A request's model may be the name of an adapter, which clients load and drop while others are answered."""

import shutil
from functools import partial

import pytest

from nanoinfer import LLM, AsyncLLM
from nanoinfer.cli.options import EngineOptions
from nanoinfer.cli.serve import ServerOptions, load_server_llm
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.features.adapters.adapters import Adapters
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server import app, protocol
from nanoinfer.server.protocol import to_sampling_params
from nanoinfer.server.settings import ServerSettings
from tests.helpers import http_server
from tests.helpers.doors import CHATS, post
from tests.helpers.lora_adapters import linear_shapes, write_adapter

TEXT = "Once upon a time"
BODY = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    for name, seed in (("first", 1), ("second", 2)):
        write_adapter(path / name, linear_shapes(BUNDLED / "tiny-qwen3"), seed=seed, lora_alpha=16)
    return path


@pytest.fixture(scope="module")
def texts(folders):
    """The texts of the plain model and of the merged ones."""
    params = SamplingParams(max_tokens=8, temperature=0)
    loras = {"tiny-qwen3": None, "first": folders / "first", "second": folders / "second"}
    texts = {}
    for name, lora in loras.items():
        with LLM(lora=lora, kv_cache_memory=2**22) as llm:
            texts[name] = llm.generate(TEXT, params, use_tqdm=False)[0].outputs[0].text
    assert len(set(texts.values())) == 3
    return texts


@pytest.fixture(scope="module")
def server(folders):
    def load():
        return AsyncLLM("tiny-qwen3", seed=0, enable_lora=True, max_loras=1, kv_cache_memory=2**22)

    with http_server.serving(load, lora_modules=[f"first={folders / 'first'}"], enable_lora_update=True) as running:
        yield running


def answer(server, model, path="/v1/completions", body=BODY):
    return server.post(path, body | {"model": model})


def names(server):
    return {card["id"]: card.get("parent") for card in server.get("/v1/models").json()["data"]}


@pytest.mark.slow
def test_the_model_of_a_request_chooses_its_adapter(server, texts):
    for name in ("tiny-qwen3", "first", "alias", "first"):
        response = answer(server, name).json()
        assert (response["model"], response["choices"][0]["text"]) == (name, texts.get(name, texts["tiny-qwen3"]))
    assert names(server) == {"tiny-qwen3": None, "alias": None, "first": "tiny-qwen3"}
    assert server.get("/v1/models/first").json()["parent"] == "tiny-qwen3"
    refused = answer(server, "second")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "this server has tiny-qwen3, alias, first" in refused.text


def test_every_api_takes_the_name_of_an_adapter_but_embeddings_do_not(server):
    for door in CHATS:
        bodies = [door.body("Hello", max_tokens=6, temperature=0, model=name) for name in ("alias", "first")]
        plain, adapted = (post(server, door.path, body) for body in bodies)
        assert (plain["model"], adapted["model"]) == ("alias", "first")
        assert door.read(plain).texts != door.read(adapted).texts
    refused = answer(server, "first", "/v1/embeddings", {"input": "Hello"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert answer(server, "tiny-qwen3", "/v1/embeddings", {"input": "Hello"}).status_code == 200


@pytest.mark.slow
def test_adapters_are_loaded_and_dropped_while_the_server_runs(server, folders, texts):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    second, first = ({"lora_name": "second", "lora_path": str(folders / name)} for name in ("second", "first"))
    loaded = server.post(load, second)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert answer(server, "second").json()["choices"][0]["text"] == texts["second"]
    for body, sentence in (
        (second, "the name 'second' is taken"),
        (second | {"lora_name": "alias"}, "the name 'alias' is taken"),
        (second | {"lora_name": "third", "lora_path": "/no/such/folder"}, "no folder"),
        (second | {"lora_name": ""}, "lora_name is empty"),
        ({"lora_name": "third"}, "lora_path"),
        (second | {"path": "a"}, "path is an unknown field"),
    ):
        refused = server.post(load, body)
        assert (refused.status_code, sentence in refused.text) == (400, True), refused.text
    assert server.post(load, first | {"load_inplace": True}).status_code == 200
    assert answer(server, "second").json()["choices"][0]["text"] == texts["first"]
    dropped = server.post(unload, {"lora_name": "second"})
    assert (dropped.status_code, dropped.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
    assert [server.post(unload, {"lora_name": "second"}).status_code, answer(server, "second").status_code] == [404] * 2
    assert list(names(server)) == ["tiny-qwen3", "alias", "first"]


def test_an_adapter_that_is_dropped_while_a_request_waits_answers_it_and_is_forgotten(server, folders, texts, monkeypatch):
    shutil.copytree(folders / "second", folders / "gone")
    assert server.post("/v1/load_lora_adapter", {"lora_name": "gone", "lora_path": str(folders / "gone")}).status_code == 200
    known = next(feature for feature in server.async_llm.engine.inputs.features if isinstance(feature, Adapters))
    get, ids = known.get, []
    monkeypatch.setattr(known, "get", lambda request: (ids.append(request.lora_int_id), get(request))[1])

    def drop_first(*arguments):
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "gone"}).status_code == 200
        shutil.rmtree(folders / "gone")
        return to_sampling_params(*arguments)

    monkeypatch.setattr(protocol, "to_sampling_params", drop_first)  # in the thread that prepares the request
    assert answer(server, "gone").json()["choices"][0]["text"] == texts["second"]
    monkeypatch.undo()
    assert ids
    assert not any(known.remove(number) for number in ids)
    assert answer(server, "gone").json()["error"]["code"] == "model_not_found"


@pytest.mark.slow
def test_adapters_are_read_before_the_first_request_and_without_the_option_there_are_no_such_endpoints(folders, texts):
    shutil.copytree(folders / "first", folders / "early")
    modules = [f"early={folders / 'early'}"]
    with http_server.serving(partial(AsyncLLM, enable_lora=True, kv_cache_memory=2**22), lora_modules=modules) as running:
        shutil.rmtree(folders / "early")
        assert answer(running, "early").json()["choices"][0]["text"] == texts["first"]
        body = {"lora_name": "first", "lora_path": str(folders / "first")}
        assert running.post("/v1/load_lora_adapter", body).status_code == 404


def test_wrong_modules_end_the_start_with_a_sentence(folders):
    for modules in (["first"], ["=path"], ["a=b", "a=c"]):
        with pytest.raises(InvalidValueError, match="--lora-modules must be NAME=PATH with a new name"):
            app.Models(ServerSettings(lora_modules=modules))
    engine = EngineOptions(model="tiny-qwen3", kv_cache_memory=2**22)
    for given, sentence in (
        ({"lora_modules": [f"first={folders / 'first'}"]}, "^--lora-modules and --enable-lora-update need --enable-lora"),
        ({"cache_salt_by_key": True}, "^--cache-salt-by-key has no effect without API keys"),
        ({"enable_lora_update": True}, "need --enable-lora; add it, or leave them out"),
        ({"enable_lora": True, "lora_modules": ["first=/no/such/folder"]}, "^there is no folder '/no/such/folder'"),
    ):
        with pytest.raises(NanoinferError, match=sentence):
            app.create_app(*load_server_llm(engine, ServerOptions(**given)))
