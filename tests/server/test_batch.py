"""A batch job: the requests are answered once each, however often the job is interrupted, and the bytes do not depend on it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from openai.types.chat import ChatCompletion
from typer.testing import CliRunner

from nanoinfer.cli.main import app as commands
from nanoinfer.errors import EngineDeadError, InvalidValueError
from nanoinfer.loading.checkpoint import file_digests
from nanoinfer.server.app import create_app
from nanoinfer.server.async_llm import AsyncLLM
from nanoinfer.server.batch import BatchRequest, Manifest, ResultFile, answer_all, check_requests, manifest_path, request_seed
from nanoinfer.server.settings import ServerSettings

pytestmark = pytest.mark.slow

SEED = 7


class Interrupted(Exception):
    pass


def request(custom_id, **body):
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write_requests(path, requests):
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return path


def some_requests(num):
    return [request(f"row {i}", prompt=f"Once upon a time, {i % 7}", max_tokens=3 + i % 5, temperature=0.8) for i in range(num)]


def manifest_of(path, **changes):
    digest, num = check_requests(path)
    return Manifest(**{"input_digest": digest, "num_requests": num, "model": {}, "options": {}, "seed": SEED} | changes)


def run(path, output, *, stop_after=None, num_concurrent=8, **options):
    """Go on with a job. It is interrupted after so many results."""
    result_file = ResultFile(output, manifest_of(path), **options)
    requests = result_file.unanswered(path)
    left = [stop_after]

    def write(result):
        if left[0] == 0:
            raise Interrupted
        result_file.append(result)
        left[0] = left[0] and left[0] - 1

    async def answer():
        async_llm = AsyncLLM("tiny-qwen3", kv_cache_memory=2**24, seed=0)
        try:
            app = create_app(async_llm, ServerSettings(served_model_name=("tiny",)))
            await answer_all(app, requests, seed=SEED, num_concurrent=num_concurrent, write=write)
        finally:
            await async_llm.shutdown()
            assert not async_llm.engine.num_unfinished

    try:
        asyncio.run(answer())
    except Interrupted:
        pass
    finally:
        result_file.close()
    return result_file


def results(path):
    return {result["custom_id"]: result for result in map(json.loads, path.read_bytes().splitlines())}


@pytest.fixture
def files(tmp_path):
    """The input of three requests, and the path of the output."""
    return write_requests(tmp_path / "in.jsonl", some_requests(3)), tmp_path / "out.jsonl"


def test_an_interrupted_job_has_the_bytes_of_an_undisturbed_one(tmp_path):
    path = write_requests(tmp_path / "in.jsonl", some_requests(20))
    whole, output, partial = (tmp_path / name for name in ("whole.jsonl", "out.jsonl", "out.jsonl.partial"))
    assert run(path, whole).is_complete
    for stop_after in (1, 7):
        run(path, output, stop_after=stop_after, num_concurrent=5)
        assert not output.exists()
        with partial.open("ab") as file:
            file.write(b'{"custom_id": "row 19", "respo')  # what a power failure leaves
    assert run(path, output).num_finished == 20
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    assert not partial.exists()
    assert run(path, output).is_complete  # nothing is left to do
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())


def test_a_request_without_a_seed_has_the_tokens_of_one_made_of_its_id(llm, tmp_path):
    messages, more = [{"role": "user", "content": "Once"}], {"max_tokens": 9, "return_token_ids": True}
    requests = [request("a", prompt="Once upon", **more), request("b", messages=messages, **more)]
    path, output = write_requests(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    run(path, output)
    found = {key: result["response"]["body"] for key, result in results(output).items()}
    for custom_id, prompt in (("a", "Once upon"), ("b", llm.render_chat(messages))):
        params = replace(llm.get_default_sampling_params(), max_tokens=9, seed=request_seed(SEED, custom_id))
        assert (
            found[custom_id]["choices"][0]["token_ids"] == llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        )
    assert len({request_seed(SEED, "a"), request_seed(SEED, "b"), request_seed(SEED + 1, "a")}) == 3
    ChatCompletion.model_validate(found["b"], strict=True)


def test_errors_are_results_and_can_be_tried_again(tmp_path):
    more = {"stream": {"stream": True}, "bad": {"temperature": -1}, "model": {"model": "gpt-4o"}}
    requests = [request("good", prompt="Once", max_tokens=2)]
    requests += [request(name, prompt="Once", **fields) for name, fields in more.items()]
    path, output = write_requests(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    assert run(path, output).num_errors == 3
    before = results(output)
    assert before["good"]["error"] is None
    assert {key: (result["response"]["status_code"], result["error"]) for key, result in before.items() if result["error"]} == {
        "stream": (400, {"code": "400", "message": "stream is not supported in a batch; leave it out"}),
        "bad": (400, {"code": "400", "message": "temperature must be finite and >= 0, got -1.0; 0 is greedy"}),
        "model": (404, {"code": "model_not_found", "message": "the model 'gpt-4o' is not served; this server has tiny"}),
    }
    result_file = ResultFile(output, manifest_of(path), retry_errors=True)
    assert (result_file.num_finished, result_file.num_errors, result_file.is_complete) == (1, 0, False)
    result_file.close()
    assert not output.exists()
    assert run(path, output).num_errors == 3
    assert results(output) == before


def test_rows_that_a_dead_engine_has_not_answered_are_unfinished():
    async def dead(scope, receive, send):
        await send({"type": "http.response.start", "status": 503})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "the engine is dead", "code": null}}'})

    requests, written = iter([BatchRequest(**one) for one in some_requests(20)]), []
    with pytest.raises(EngineDeadError, match="the engine is dead"):
        asyncio.run(answer_all(dead, requests, seed=SEED, num_concurrent=4, write=written.append))
    assert written == []


def test_an_input_is_checked_before_anything_is_computed_and_ten_problems_are_listed(tmp_path):
    path, line = tmp_path / "in.jsonl", {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    for lines, message in (
        ("", "has no requests; write one JSON object per line"),
        ("\n\n", "has no requests"),
        ("{\n", "line 1 is not JSON"),
        ("[1]\n", "line 1: "),
        ({name: line[name] for name in line if name != "body"}, "line 1: body: Field required"),
        (line | {"url": "/v1/embeddings"}, "got '/v1/embeddings'"),
        (line | {"method": "GET"}, "line 1: method: "),
        (line | {"custom_id": 1}, "line 1: custom_id: "),
        (json.dumps(line) + "\n" + json.dumps(line) + "\n", "line 2 has the custom_id of line 1, 'a'"),
        ("{\n" * 1000, "line 10 is not JSON"),
    ):
        path.write_text(lines if isinstance(lines, str) else json.dumps(lines) + "\n")
        with pytest.raises(InvalidValueError, match=message) as caught:
            check_requests(path)
    assert len(str(caught.value).splitlines()) == 11


def test_the_results_of_another_job_are_refused_and_not_touched(files, tmp_path):
    path, output = files
    ResultFile(output, manifest_of(path)).close()
    before = sorted(tmp_path.iterdir())
    for change in ({"seed": 8}, {"model": {"config.json": "other"}}, {"options": {"dtype": "bfloat16"}}):
        with pytest.raises(
            InvalidValueError, match=f"belongs to a job with another {next(iter(change))}; choose another output"
        ):
            ResultFile(output, manifest_of(path, **change))
    write_requests(path, some_requests(4))
    with pytest.raises(InvalidValueError, match="with another input_digest and num_requests"):
        ResultFile(output, manifest_of(path))
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_is_no_output_of_a_job_is_never_overwritten(files):
    path, output = files
    output.write_text("precious")
    for _ in range(2):  # without a manifest, and with one that cannot be read
        with pytest.raises(InvalidValueError, match="exists and has no manifest of a batch job"):
            ResultFile(output, manifest_of(path))
        manifest_path(output).write_text("{")
    assert output.read_text() == "precious"


def test_a_corrupted_line_is_named(files):
    path, output = files
    run(path, output)
    output.write_bytes(b"{}\n" + output.read_bytes())
    with pytest.raises(InvalidValueError, match=r"out.jsonl is corrupted in line 1; remove that line"):
        ResultFile(output, manifest_of(path))


def test_a_second_process_is_refused(files):
    pytest.importorskip("fcntl", reason="locks of this kind are POSIX's")
    path, output = files
    first = ResultFile(output, manifest_of(path))
    with pytest.raises(InvalidValueError, match="another process is writing"):
        ResultFile(output, manifest_of(path))
    first.close()
    ResultFile(output, manifest_of(path)).close()


def test_the_command_draws_a_seed_once_and_goes_on_with_it(files, tmp_path):
    path, output = files

    def invoke(*options, output=output):
        done = CliRunner().invoke(commands, ["batch", str(path), "-o", str(output), *options])
        return done.exit_code, done.output

    code, text = invoke()
    assert (code, text.endswith(f"{output}: 3 requests, 0 of them errors\n")) == (0, True), text
    before = output.read_bytes()
    assert invoke() == (0, f"3 of 3 requests were finished before\n{output}: 3 requests, 0 of them errors\n")
    assert output.read_bytes() == before
    code, text = invoke("--seed", "1")
    assert (code, "belongs to a job with another seed" in text.replace("\n", " ")) == (1, True)
    code, text = invoke(output=tmp_path / "nowhere" / "out.jsonl")  # before anything is loaded
    assert (code, "there is no such folder; give another path" in text) == (1, True)


def test_the_manifest_has_the_files_of_a_folder_or_a_gguf_file(tmp_path):
    for name in ("config.json", "model.safetensors", "model.gguf", "notes.md"):
        (tmp_path / name).write_text("same")
    of_folder = file_digests(tmp_path)
    assert list(of_folder) == ["config.json", "model.gguf", "model.safetensors"]
    assert file_digests(tmp_path / "model.gguf") == {"model.gguf": of_folder["model.gguf"]}
    (tmp_path / "config.json").write_text("other")
    assert [name for name, digest in file_digests(tmp_path).items() if digest != of_folder[name]] == ["config.json"]


@pytest.mark.long
def test_twenty_kills_lose_and_double_nothing(tmp_path):
    path = write_requests(tmp_path / "in.jsonl", some_requests(10_000))

    def start(output):
        command = [sys.executable, "-m", "nanoinfer", "batch", str(path), "-o", str(output), "--seed", str(SEED)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    assert start(whole := tmp_path / "whole.jsonl").wait() == 0
    output, num_kills = tmp_path / "out.jsonl", 0
    while num_kills < 20 and not output.exists():
        process = start(output)
        size, partial = 0, tmp_path / "out.jsonl.partial"
        size = partial.stat().st_size if partial.exists() else 0
        while process.poll() is None and (not partial.exists() or partial.stat().st_size < size + 1000):
            time.sleep(0.001)
        time.sleep(0.01 * num_kills)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            num_kills += 1
        process.wait()
    assert num_kills == 20
    assert start(output).wait() == 0
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
