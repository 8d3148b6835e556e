"""one_file/engine.py in a process and a server of its own: it needs torch, safetensors and tokenizers."""

import ast
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from tests.one_file.compare import assert_nothing_is_left
from tests.one_file.module import FILE, load

PROMPT = "Once upon a time"
# Runs a script that cannot import what only the package needs.
ALONE = "import runpy, sys; sys.modules.update(dict.fromkeys(('nanoinfer', 'transformers', 'jaxtyping', 'numpy', 'triton'))); "
ALONE += "sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
THREE_PACKAGES = {"torch", "safetensors", "tokenizers", "flash_attn"}  # and one on a GPU, if it is there


def test_it_imports_three_packages_and_pythons_own():
    nodes = list(ast.walk(ast.parse(FILE.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == THREE_PACKAGES


@pytest.mark.slow
def test_the_command_writes_the_packages_text(tmp_path):
    text = output_of("-c", ALONE, FILE, PROMPT, "--max-tokens", "20", "--seed", "4", cwd=tmp_path)
    with LLM(dtype="float32", enforce_eager=True, attention_backend="reference", kv_cache_memory=2**22) as llm:
        [output] = llm.generate([PROMPT], SamplingParams(temperature=0.7, max_tokens=20, seed=4), use_tqdm=False)
    assert text == f"{PROMPT}{output.outputs[0].text}\n"


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_two_processes_share_the_head(tmp_path):
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    alone, both = (output_of(*launcher, FILE, PROMPT, "--max-tokens", "20", cwd=tmp_path) for launcher in ([], ranks))
    assert both == alone != ""


def test_the_parts_of_the_head_give_all_logits(monkeypatch):
    engine, weight, hidden, parts = load(), torch.randn(11, 6), torch.randn(3, 6), []
    monkeypatch.setattr(engine.dist, "all_reduce", parts.append)
    for rank in range(3):
        engine.VocabularyHead(weight, rank, 3)(hidden)
    torch.testing.assert_close(sum(parts), hidden @ weight.T)


def output_of(*arguments, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def server():
    """The module, and a function that posts fields to its server."""
    engine = load()
    engine.Completions.llm = engine.LLM()
    engine.Completions.log_message = lambda *args: None
    http = ThreadingHTTPServer(("127.0.0.1", 0), engine.Completions)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()

    def post(path="/v1/completions", **fields):
        request = urllib.request.Request(f"http://127.0.0.1:{http.server_port}{path}", json.dumps(fields).encode())
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.read().decode()

    yield engine, post
    http.shutdown()
    thread.join()
    http.server_close()
    assert_nothing_is_left(engine.Completions.llm)


def test_the_server_answers_at_once_and_as_a_stream(server):
    engine, post = server
    body = {"prompt": PROMPT, "seed": 3, "max_tokens": 20, "stop": ["day"], "model": "any"}
    params = engine.SamplingParams(seed=3, max_tokens=20, stop=["day"])
    [output] = engine.LLM().generate([PROMPT], params)
    expected = output.outputs[0]
    [choice] = json.loads(post(**body))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    *events, done = [line.removeprefix("data: ") for line in post(**body, stream=True).splitlines() if line]
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == expected.text
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [expected.finish_reason]
    assert len(choices) > 5
    assert done == "[DONE]"


def test_clients_of_the_server_share_its_steps_and_each_gets_its_own_text(server):
    engine, post = server
    bodies = [{"prompt": PROMPT, "seed": i, "max_tokens": 20} for i in range(6)]
    outputs = engine.LLM().generate([PROMPT] * 6, [engine.SamplingParams(seed=i, max_tokens=20) for i in range(6)])
    with ThreadPoolExecutor(6) as pool:
        texts = [json.loads(answer)["choices"][0]["text"] for answer in pool.map(lambda body: post(**body), bodies)]
    assert texts == [output.outputs[0].text for output in outputs]


def test_the_server_refuses_what_it_cannot_do(server):
    for fields in ({"top_p": 2}, {"n": 2}, {"unknown": 1}, {"path": "/v1/else"}, {"prompt": []}, {"seed": "1"}):
        with pytest.raises(urllib.error.HTTPError, match="400") as error:
            server[1](**{"prompt": PROMPT, "max_tokens": 2} | fields)
        assert json.loads(error.value.read())["error"]["message"], fields
