"""schemathesis makes requests from /openapi.json, valid ones and broken ones: no 5xx, every 4xx in OpenAI's shape, and only
statuses and content types that the schema has.
"""

import http_server
import pytest

from nanoinfer import AsyncLLM

schemathesis = pytest.importorskip("schemathesis", reason='schemathesis is not installed; pip install -e ".[test]"')
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


@pytest.fixture(scope="module")
def short():
    """No answer is long."""
    with http_server.serving(lambda: AsyncLLM("tiny-qwen3", max_model_len=24, seed=0)) as running:
        yield running


@pytest.mark.slow
# Hypothesis sees that the state of `random` has changed, which the server's threads do while a case is drawn.
@pytest.mark.filterwarnings("ignore:Do not use the:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize("num_examples", [8, pytest.param(300, marks=pytest.mark.long)])
def test_no_request_of_the_schema_gets_a_5xx_or_what_it_does_not_describe(short, num_examples):
    schema = schemathesis.openapi.from_url(short.url + "/openapi.json")
    statuses = set()

    for operation in schema.get_all_operations():
        strategy = st.one_of(*(operation.ok().as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode))

        @settings(max_examples=num_examples, deadline=None, database=None, derandomize=True)
        @given(case=strategy)
        def check(case):
            response = case.call(timeout=120)
            documented = case.operation.definition.raw["responses"]
            assert str(response.status_code) in documented
            contents = documented[str(response.status_code)].get("content", {"": {}})
            assert response.headers.get("content-type", [""])[0].partition(";")[0] in contents
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert response.json()["error"].keys() == {"message", "type", "param", "code"}

        check()
    assert {200, 400} <= statuses
