"""A batch job on Ray: an actor that dies loses and doubles nothing, and a request that kills every actor becomes an error."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

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


def actors_of(driver):
    """The process ids of the actors that a job on a local cluster has now. They are descendants of its process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family, num_known = {driver}, 0
    while len(family) > num_known:
        num_known = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    actors = []
    for pid in family:
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::BatchReplica"):
                actors.append(pid)
    return actors


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the actors in /proc")
def test_twenty_killed_actors_change_no_byte(tmp_path):
    path = write_requests(tmp_path / "in.jsonl", some_requests(10_000))
    command = [sys.executable, "-m", "nanoinfer", "batch", str(path), "--seed", str(SEED), "-o"]
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert subprocess.run([*command, whole]).returncode == 0
    process, partial = subprocess.Popen([*command, output, "--ray", "local", "--replicas", "2"]), tmp_path / "out.jsonl.partial"
    num_kills, num_results, draw = 0, 0, random.Random(0)
    while num_kills < 20 and process.poll() is None:
        time.sleep(0.5 * draw.random())
        size = partial.stat().st_size if partial.exists() else 0
        actors = actors_of(process.pid)
        if actors and size >= num_results:
            with suppress(ProcessLookupError):
                os.kill(draw.choice(actors), signal.SIGKILL)
                num_kills, num_results = num_kills + 1, size + 1
    assert process.wait() == 0
    assert num_kills == 20
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
