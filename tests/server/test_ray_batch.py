"""A batch job on Ray: an actor that dies loses and doubles nothing, and a request that kills every actor becomes an error."""

import os

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray"), pytest.mark.filterwarnings("ignore:::pydantic")]
pytest.importorskip("ray", reason='ray is not installed; pip install -e ".[ray]"')
from ray.exceptions import RayError  # noqa: E402

from nanoinfer import AsyncLLM  # noqa: E402
from nanoinfer.errors import EngineDeadError, NanoinferError  # noqa: E402
from nanoinfer.server.batch import ResultFile, read_requests  # noqa: E402
from nanoinfer.server.ray_batch import answer_all_on_ray, connected  # noqa: E402
from nanoinfer.server.settings import ServerSettings  # noqa: E402
from tests.server.test_batch import SEED, manifest_of, request, results, run, some_requests, write_requests  # noqa: E402

RESOURCES = {"num_cpus": 1, "num_gpus": 0}


@pytest.fixture(scope="module")
def cluster():
    with connected("local", num_cpus=2):
        yield


def loader(marker):
    """A function that Ray sends to the actors. The request "poison" always ends its process, "once" only the first time."""

    def load():
        async_llm = AsyncLLM("tiny-qwen3", seed=0, kv_cache_memory=2**24, streaming=False)
        submit = async_llm.engine.submit

        def deadly_submit(prepared, **options):
            if "poison" in prepared.prompt or ("once" in prepared.prompt and not marker.exists()):
                marker.touch()
                os._exit(1)
            return submit(prepared, **options)

        async_llm.engine.submit = deadly_submit
        return async_llm

    return load


def test_actors_that_die_lose_and_double_nothing(cluster, tmp_path):
    requests = [*some_requests(20), *(request(name, prompt=name, max_tokens=4) for name in ("once", "poison"))]
    path, whole = write_requests(tmp_path / "in.jsonl", requests), tmp_path / "whole.jsonl"
    run(path, whole)
    result_file, marker = ResultFile(tmp_path / "out.jsonl", manifest_of(path)), tmp_path / "has died once"
    settings = ServerSettings(served_model_name=("tiny",))
    options = {"seed": SEED, "num_replicas": 2, "batch_size": 4, "resources": RESOURCES, "write": result_file.append}
    answer_all_on_ray(read_requests(path), loader(marker), settings, **options)
    result_file.close()
    assert marker.exists()
    expected, found = results(whole), results(tmp_path / "out.jsonl")
    assert found.pop("poison")["error"] == {
        "code": "500",
        "message": "4 processes died while they answered this request, in the last 2 cases with no other request running",
    }
    del expected["poison"]
    assert found == expected
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == len(requests)


def failing_loaders():
    """Functions of a function, which Ray sends as they are: it imports a module's own, and tests are no modules there."""

    def load_nothing():
        return AsyncLLM("./nowhere")

    def load_dead():
        def prepare_prompt(*arguments, **options):
            raise EngineDeadError("3 steps in a row have failed")

        async_llm = AsyncLLM("tiny-qwen3", seed=0, kv_cache_memory=2**24)
        async_llm.engine.inputs.prepare_prompt = prepare_prompt
        return async_llm

    def load_broken():
        raise LookupError("no driver")

    return [
        (load_nothing, NanoinferError, "there is no folder './nowhere'"),
        (load_dead, NanoinferError, "3 steps in a row have failed"),
        (load_broken, RayError, "LookupError: no driver"),
    ]


@pytest.mark.parametrize(("load", "error", "message"), failing_loaders())
def test_an_error_of_an_actor_ends_the_job_with_its_own_message(load, error, message, cluster, tmp_path):
    path = write_requests(tmp_path / "in.jsonl", some_requests(3))
    settings = ServerSettings(served_model_name=("tiny",))
    options = {"seed": SEED, "num_replicas": 1, "batch_size": 4, "resources": RESOURCES, "write": pytest.fail}
    with pytest.raises(error, match=message):
        answer_all_on_ray(read_requests(path), load, settings, **options)
