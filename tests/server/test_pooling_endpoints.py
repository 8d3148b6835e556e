"""/v1/embeddings, /v1/score and /v1/rerank: OpenAI's client, the fields of vLLM and Jina, and the limits of all endpoints."""

import base64
from array import array
from threading import Semaphore

import pytest

from nanoinfer import LLM, AsyncLLM
from nanoinfer.features.embedding.pooling import Pooling, PoolingParams
from tests.helpers import http_server

SETTINGS = {"dtype": "float32", "kv_cache_memory": 2**22, "seed": 0}
TEXTS = ["Once upon a time", "a little dog", "The ball was red."]
QUERY, DOCUMENTS = "little dog", ["yes", "The dog was happy.", "a little dog", "It was a ball."]
PAIRS = {"query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def embedder(embedding_path):
    with http_server.serving(lambda: AsyncLLM(embedding_path, max_num_seqs=4, max_num_queued_requests=4, **SETTINGS)) as one:
        yield one


@pytest.fixture(scope="module")
def reranker(reranker_path):
    with http_server.serving(lambda: AsyncLLM(reranker_path, scheduling_policy="priority", **SETTINGS)) as one:
        yield one


@pytest.fixture(scope="module")
def wanted(embedding_path):
    with LLM(embedding_path, **SETTINGS) as llm:
        short = llm.embed(TEXTS, use_tqdm=False, pooling_params=PoolingParams(dimensions=8))
        return [[one.outputs.embedding for one in outputs] for outputs in (llm.embed(TEXTS, use_tqdm=False), short)]


@pytest.fixture(scope="module")
def scores(reranker_path):
    with LLM(reranker_path, **SETTINGS) as llm:
        return [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]


@pytest.mark.slow
def test_openais_client_gets_the_embeddings_of_llm_embed(embedder, wanted):
    with http_server.new_client(embedder, strict=True) as strict, http_server.new_client(embedder, strict=False) as client:
        for options in ({}, {"encoding_format": "base64"}, {"encoding_format": "float"}):
            # The client's types exclude what it asks for by default.
            found = (strict if options.get("encoding_format") == "float" else client).embeddings.create(
                model="tiny-qwen3", input=TEXTS, **options
            )
            vectors = [one.embedding for one in found.data]
            if options == {"encoding_format": "base64"}:
                vectors = [array("f", base64.b64decode(one)).tolist() for one in vectors]
            assert vectors == wanted[0]
        assert [one.index for one in found.data] == [0, 1, 2]
        short = client.embeddings.create(model="alias", input=TEXTS[1], dimensions=8)
        assert ([one.embedding for one in short.data], short.model) == ([wanted[1][1]], "alias")
        ids = embedder.async_llm.llm.get_tokenizer()(TEXTS)["input_ids"]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        for given in (ids, ids[2]):
            found = client.embeddings.create(model="tiny-qwen3", input=given)
            assert found.data[-1].embedding == wanted[0][2]


def test_embeddings_are_the_same_beside_chats_and_leave_nothing(embedder, wanted):
    chats = [embedder.open_stream({"prompt": "Once", "max_tokens": 60, "stream": True}) for _ in range(2)]
    found = embedder.post("/v1/embeddings", {"input": TEXTS}).json()
    assert [one["embedding"] for one in found["data"]] == wanted[0]
    for chat in chats:
        assert chat.recv(1)  # it has come, so waiting waits for it
        chat.close()
    embedder.wait_until_idle()


ERRORS = [
    ("/v1/embeddings", {"input": "a " * 2000}, "context_length_exceeded", "input", "maximum context length is 512 tokens"),
    ("/v1/embeddings", {"input": []}, None, "input", "the prompt has no tokens"),
    ("/v1/embeddings", {"input": "a", "dimensions": 49}, None, "dimensions", "at most the model's 48, got 49"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, None, "truncate_prompt_tokens", "-1, or >= 1"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, None, "encoding_format", "'float' or 'base64'"),
    ("/v1/embeddings", {"input": "a", "encoding": "float"}, "unknown_parameter", "encoding", "did you mean encoding_format"),
    ("/v1/embeddings", {"input": "a", "priority": 1}, None, "priority", "has no effect with this scheduler"),
    ("/v1/embeddings", {"input": ["a"] * 9}, None, None, "9 answers are requested, and at most 8 may run or wait"),
    ("/v1/embeddings", {"messages": []}, None, "input", "Field required"),
    ("/v1/score", {"queries": "a"}, None, "documents", "documents: Field required"),
    ("/v1/score", {"queries": [], "documents": "a"}, None, None, "one query, or one for each document"),
    ("/v1/score", {"queries": "a", "documents": []}, None, None, "one query, or one for each document"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, None, None, "one query, or one for each document"),
    ("/v1/rerank", PAIRS | {"instruction": "x"}, None, "instruction", "instruction is for rerankers"),
    ("/v1/rerank", PAIRS | {"documents": [{"title": "x"}]}, None, "documents", "valid string"),
    ("/v1/rerank", PAIRS | {"documents": ["a " * 2000]}, "context_length_exceeded", "documents", "maximum context length"),
]


def test_a_wrong_request_gets_400_and_says_which_field(embedder):
    for path, body, code, param, words in ERRORS:
        response = embedder.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, code, param), error
        assert words in error["message"]


def test_the_files_of_a_checkpoint_are_read_by_the_first_request_alone(embedder, monkeypatch):
    bodies = {"/v1/embeddings": {"input": "a"}, "/v1/score": {"queries": "a", "documents": "b"}}
    first = {path: embedder.post(path, body).json()["data"] for path, body in bodies.items()}
    monkeypatch.setattr(Pooling, "of", None)
    assert {path: embedder.post(path, body).json()["data"] for path, body in bodies.items()} == first


def test_a_wrong_model_is_not_found_and_a_paused_engine_answers_503(embedder):
    assert embedder.post("/v1/embeddings", {"input": "a", "model": "x"}).json()["error"]["code"] == "model_not_found"
    embedder.async_llm.llm.pause()
    refused = embedder.post("/v1/embeddings", {"input": "a"})
    embedder.async_llm.llm.resume()
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")


@pytest.mark.slow
def test_score_has_vllms_fields(reranker, scores):
    for body in ({"queries": QUERY, "documents": DOCUMENTS}, {"text_1": [QUERY] * 4, "text_2": DOCUMENTS, "priority": -1}):
        for path in ("/v1/score", "/score"):
            found = reranker.post(path, body | {"model": "tiny-qwen3"}).json()
            assert found["data"] == [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
            assert found.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert reranker.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS[2]}).json()["data"][0]["score"] == scores[2]
    assert reranker.post("/score", {"queries": "", "documents": ""}).status_code == 200
    judged = reranker.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS[2], "instruction": "Judge"}).json()["data"]
    assert judged[0]["score"] != scores[2]


def test_rerank_has_vllms_and_jinas_fields(reranker, scores):
    order = sorted(range(4), key=lambda i: -scores[i])
    found = reranker.post("/v1/rerank", PAIRS | {"model": "alias"}).json()
    assert [one["index"] for one in found["results"]] == order != [0, 1, 2, 3]
    first = {"index": order[0], "document": {"text": DOCUMENTS[order[0]]}, "relevance_score": scores[order[0]]}
    assert found["results"][0] == first
    assert found["usage"]["total_tokens"] > 100
    jina = {"documents": [{"text": one} for one in DOCUMENTS], "top_n": 2, "return_documents": False}
    for path in ("/rerank", "/v2/rerank"):
        found = reranker.post(path, PAIRS | jina).json()["results"]
        assert found == [{"index": i, "relevance_score": scores[i]} for i in order[:2]]
    assert len(reranker.post("/rerank", PAIRS | {"top_n": 0}).json()["results"]) == 4


def test_a_reader_that_leaves_and_one_that_is_too_late_leave_nothing(embedder, monkeypatch):
    are_added, add = Semaphore(0), embedder.async_llm.engine.scheduler.add
    monkeypatch.setattr(embedder.async_llm.engine.scheduler, "add", lambda seq: (add(seq), are_added.release()))
    connection = embedder.open_stream({"input": ["a little dog " * 100] * 8}, "/v1/embeddings")
    assert all(are_added.acquire(timeout=600) for _ in range(8))
    connection.close()
    embedder.wait_until_idle()
    late = embedder.post("/v1/embeddings", {"input": "a little dog", "timeout": 1e-9})
    assert (late.status_code, "longer than its timeout" in late.text) == (504, True)
    assert embedder.post("/v1/embeddings", {"input": "a"}).status_code == 200


def test_no_score_is_above_1(embedder):
    """Rounding makes some cosines of equal texts larger, which the texts of this test show."""
    texts = [f"{one} {i}" for i, one in enumerate(TEXTS * 8)]
    found = []
    for start in range(0, len(texts), 2):
        body = {"queries": texts[start : start + 2], "documents": texts[start : start + 2], "add_special_tokens": True}
        found += [one["score"] for one in embedder.post("/v1/score", body).json()["data"]]
    assert len(found) == 24
    assert max(found) <= 1
