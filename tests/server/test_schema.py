"""schemathesis makes requests from /openapi.json, valid ones and broken ones: no 5xx, every 4xx in OpenAI's shape, only
content types that the schema has, errors with the fields that it describes and no others, and answers with those
of answer_schemas.py.
"""

from collections import Counter
from functools import partial
from itertools import product

import jsonschema
import pytest
import requests
from pydantic import TypeAdapter

from nanoinfer import AsyncLLM
from tests.helpers import http_server, pooling_cases
from tests.helpers.answer_schemas import ANSWERS
from tests.helpers.lora_adapters import linear_shapes, write_adapter
from tests.helpers.tool_cases import QUESTION, TEMPLATE

schemathesis = pytest.importorskip("schemathesis", reason='schemathesis is not installed; pip install -e ".[test]"')
from hypothesis import given, settings  # noqa: E402

LOAD = "/v1/load_lora_adapter"
# A body of each path that is served. Random ones seldom are, since many fields exclude each other.
SERVED = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 3},
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 3},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": QUESTION},
    "/v1/responses": {"input": "How warm?", "max_output_tokens": 3},
    "/v1/embeddings": {"input": ["Oslo", "Rome"]},
    "/v1/score": {"queries": "Warm?", "documents": ["Oslo", "Rome"]},
    "/v1/rerank": {"query": "Warm?", "documents": ["Oslo", "Rome"]},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [5, 6]},
    LOAD: {"lora_name": "second", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "second"},
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    base = pooling_cases.save_reranker(tmp_path_factory.mktemp("schema") / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_adapter(base.parent / "adapter", linear_shapes(base), lora_alpha=16)
    return base.parent / "adapter"


@pytest.fixture(scope="module")
def training(adapter):
    """With the endpoints of a trainer, which pause the server."""
    load = partial(AsyncLLM, adapter.parent / "base", seed=0, kv_cache_memory=2**22)
    with http_server.serving(load, enable_weight_update=True) as running:
        yield running


@pytest.fixture(scope="module")
def full(adapter):
    """With every endpoint but those of a trainer, and short answers."""
    more = {"enable_lora": True, "max_loras": 1, "scheduling_policy": "priority", "kv_cache_memory": 2**22}
    options = {"enable_lora_update": True, "max_stored_responses": 5, "lora_modules": [f"first={adapter}"]}
    base = adapter.parent / "base"
    with http_server.serving(lambda: AsyncLLM(base, max_model_len=160, seed=0, **more), **options) as running:
        yield running


def variants(case, server, bodies):
    """Yield a request, and requests that are served but for one or two fields of this one that are added to them."""
    yield case
    given, path = case.body, case.path_parameters
    if isinstance(given, dict) and case.path in bodies:
        case.body, fields = bodies[case.path], [*given.items()]
        yield case
        for start, size in product(range(len(fields)), (1, 2)):
            case.body = bodies[case.path] | dict(fields[start : start + size])
            yield case
    elif "response_id" in path:
        path["response_id"] = server.post("/v1/responses", bodies["/v1/responses"]).json()["id"]
        yield case
    elif "model" in path:
        path["model"] = "first"
        yield case


def closed(schema):
    """A schema whose objects have no fields that it does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if "properties" in schema and "additionalProperties" not in schema else {}
    return {name: closed(one) for name, one in schema.items()} | more


def check_requests(server, bodies, num_examples, is_checked=lambda path: True):
    """Send requests to each path that is checked. Returns how often each had each status."""
    schema, statuses = schemathesis.openapi.from_url(server.url + "/openapi.json"), Counter()
    components = closed(server.get("/openapi.json").json()["components"])

    def check_answer(response, operation):
        documented = operation.definition.raw["responses"]
        contents = documented["200" if response.status_code == 200 else "default"].get("content", {"": {}})
        kind = response.headers.get("content-type", [""])[0].partition(";")[0]
        assert kind in contents
        if kind:
            assert "schema" in contents[kind]
        if kind == "application/json":
            described = closed(contents[kind]["schema"]) | {"components": components}
            if response.status_code == 200:
                described = closed(TypeAdapter(ANSWERS[operation.label]).json_schema())
            jsonschema.Draft202012Validator(described).validate(response.json())

    for result in schema.get_all_operations():
        operation = result.ok()
        if not is_checked(operation.path):
            continue
        valid, broken = (operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)

        @settings(max_examples=num_examples, deadline=None, database=None, derandomize=True)
        @given(case=valid | broken)
        def check(case):
            for sent in variants(case, server, bodies):
                response = sent.call(timeout=120, session=session)
                statuses[sent.operation.label, response.status_code] += 1
                check_answer(response, sent.operation)
                is_late = response.status_code == 504 and "timeout" in sent.body
                assert response.status_code < 500 or is_late, response.text

        with requests.Session() as session:
            check()
    return statuses


@pytest.mark.slow
# Hypothesis sees that the state of `random` has changed, which the server's threads do while a case is drawn.
@pytest.mark.filterwarnings("ignore:Do not use the:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize("num_examples", [2, pytest.param(130, marks=pytest.mark.long)])
def test_no_request_of_the_schema_gets_a_5xx_or_what_it_does_not_describe(full, adapter, num_examples):
    bodies = SERVED | {LOAD: SERVED[LOAD] | {"lora_path": str(adapter)}}
    assert {path: full.post(path, body).status_code for path, body in bodies.items()} == dict.fromkeys(SERVED, 200)
    statuses = check_requests(full, bodies, num_examples)
    assert {200, 400, 404} <= {status for _, status in statuses}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Do not use the:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize("num_examples", [2, pytest.param(1100, marks=pytest.mark.long)])
def test_a_trainers_requests_get_what_the_schema_describes(training, adapter, num_examples):
    bodies = {"/pause": {}, "/resume": {}, "/update_weights": {"path": str(adapter.parent / "base")}}
    statuses = check_requests(training, bodies, num_examples, lambda path: path in {*bodies, "/get_world_size"})
    for path in ("/pause", "/resume", "/update_weights"):
        assert {200, 400} <= {status for label, status in statuses if label == f"POST {path}"}
