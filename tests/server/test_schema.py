"""schemathesis makes requests from /openapi.json, valid ones and broken ones: no 5xx, every 4xx in OpenAI's shape, and only
statuses and content types that the schema has.
"""

from collections import Counter

import pytest

from nanoinfer import AsyncLLM
from tests.helpers import http_server, pooling_cases
from tests.helpers.lora_adapters import linear_shapes, write_adapter
from tests.helpers.tool_cases import QUESTION, TEMPLATE

schemathesis = pytest.importorskip("schemathesis", reason='schemathesis is not installed; pip install -e ".[test]"')
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

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
def full(adapter):
    """With every endpoint but those of a trainer, and short answers."""
    more = {"enable_lora": True, "max_loras": 1, "scheduling_policy": "priority", "kv_cache_memory": 2**22}
    options = {"enable_lora_update": True, "max_stored_responses": 5, "lora_modules": [f"first={adapter}"]}
    base = adapter.parent / "base"
    with http_server.serving(lambda: AsyncLLM(base, max_model_len=160, seed=0, **more), **options) as running:
        yield running


def as_served(case, server, bodies):
    """A request that is served, but for some fields of this one that are added to it."""
    if case.path in bodies:
        fields = st.sampled_from([{}, *({name: value} for name, value in sorted(case.body.items()))])
        return st.builds(lambda one, other: with_body(case, bodies[case.path] | one | other), fields, fields)
    if "response_id" in case.path_parameters:
        case.path_parameters["response_id"] = server.post("/v1/responses", bodies["/v1/responses"]).json()["id"]
    elif "model" in case.path_parameters:
        case.path_parameters["model"] = "first"
    return st.just(case)


def with_body(case, body):
    case.body = body
    return case


@pytest.mark.slow
# Hypothesis sees that the state of `random` has changed, which the server's threads do while a case is drawn.
@pytest.mark.filterwarnings("ignore:Do not use the:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize("num_examples", [5, pytest.param(600, marks=pytest.mark.long)])
def test_no_request_of_the_schema_gets_a_5xx_or_what_it_does_not_describe(full, adapter, num_examples):
    bodies = SERVED | {LOAD: SERVED[LOAD] | {"lora_path": str(adapter)}}
    assert {path: full.post(path, body).status_code for path, body in bodies.items()} == dict.fromkeys(SERVED, 200)
    schema = schemathesis.openapi.from_url(full.url + "/openapi.json")
    statuses = Counter()

    for result in schema.get_all_operations():
        operation = result.ok()
        valid, broken = (operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)
        served = valid.flatmap(lambda case: as_served(case, full, bodies))

        @settings(max_examples=num_examples, deadline=None, database=None, derandomize=True)
        @given(case=served | valid | broken)
        def check(case):
            response = case.call(timeout=120)
            documented = case.operation.definition.raw["responses"]
            assert str(response.status_code) in documented
            contents = documented[str(response.status_code)].get("content", {"": {}})
            assert response.headers.get("content-type", [""])[0].partition(";")[0] in contents
            statuses[case.operation.label, response.status_code] += 1
            is_late = response.status_code == 504 and "timeout" in case.body
            assert response.status_code < 500 or is_late, response.text
            if response.status_code >= 400:
                assert response.json()["error"].keys() == {"message", "type", "param", "code"}

        check()
    print(dict(statuses))
    assert {200, 400, 404} <= {status for _, status in statuses}
