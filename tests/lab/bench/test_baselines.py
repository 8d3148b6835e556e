"""`python -m benchmarks.compare`: engines in their own processes, with a stub in the place of vLLM, and what is refused."""

import json
import os
import shlex
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.baselines.process import ENGINES, Baseline, BaselineProcess, Requirements, parse_baselines
from benchmarks.compare import app
from nanoinfer.errors import NanoinferError
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer_lab.bench.workloads import Workload
from tests.helpers.precompiled import in_new_cache

pytestmark = pytest.mark.slow

STUB = """
import os, threading, time
from types import SimpleNamespace as Record

__version__ = f"1.2 with {os.environ['OMP_NUM_THREADS']} thread"
print("a line on standard output is not an answer")

class SamplingParams(Record):
    pass

class LLM:
    def __init__(self, model, *, dtype, **options):
        if dtype == "float32":
            raise RuntimeError("out of memory")
        threading.Thread(target=self._spin, daemon=True).start()

    def _spin(self):
        while True:
            pass

    def generate(self, prompts, params, use_tqdm):
        missing = max(len(prompt["prompt_token_ids"]) == 4 for prompt in prompts)
        time.sleep(0.01)
        return [Record(outputs=[Record(token_ids=[0] * (one.max_tokens - missing))]) for one in params]
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A package of the name vllm, for this Python's subprocesses, and a new cache."""
    (tmp_path / "vllm.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("NANOINFER_CACHE", str(in_new_cache(tmp_path)))


def start(dtype="bfloat16"):
    return BaselineProcess(
        Baseline("vllm", sys.executable), Checkpoint.open("tiny-gpt2").path, dtype=dtype, device="cpu", num_threads=1,
        max_model_len=64, max_num_seqs=4, num_cache_tokens=256,
    )  # fmt: skip


def workload(*input_lens):
    return Workload(name="small", input_lens=input_lens, output_lens=(5,) * len(input_lens))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_baseline_reports_the_seconds_of_a_workload_and_is_stopped_between_its_turns(stub):
    """The stub has a thread that spins for ever."""
    baseline = start()
    assert baseline.engine == "vLLM 1.2 with 1 thread"
    for _ in range(2):
        deadline = time.perf_counter() + 120
        while (state := Path(f"/proc/{baseline.process.pid}/stat").read_text().rpartition(") ")[2][0]) != "T":
            assert time.perf_counter() < deadline, state
        start_time = time.perf_counter()
        seconds = baseline.run(workload(3, 2), [[1, 2, 3], [4, 5]])
        assert 0.01 <= seconds <= time.perf_counter() - start_time
    with pytest.raises(NanoinferError, match=r"vllm generated \[4, 4\] tokens in workload small, which asks for \[5, 5\]"):
        baseline.run(workload(4, 1), [[1, 2, 3, 4], [5]])
    baseline.close()
    assert baseline.process.returncode is not None


def test_a_baseline_that_fails_is_an_error_with_its_last_line(stub):
    with pytest.raises(NanoinferError, match=r"vllm has failed: RuntimeError: out of memory; its output is in .*log") as found:
        start("float32")
    log = Path(str(found.value).rpartition(" ")[2])
    assert "a line on standard output is not an answer" in log.read_text()


def test_the_ratio_to_another_engine(stub):
    arguments = ["--model", "tiny-gpt2", "--num-prompts", "2", "--input-len", "30", "--output-len", "2-4", "--repeats", "2"]
    arguments += ["--top-k", "3", "--dtype", "bfloat16", "--kv-cache-memory", "16MiB"]
    result = CliRunner().invoke(app, [*arguments, "--engines", f"vllm={sys.executable}", "--json"])
    assert result.exit_code == 0, result.output
    assert "comparing with vLLM 1.2 with 1 thread" in result.stderr
    (found,) = json.loads(result.stdout)
    assert found["ratios"] == {"vllm": pytest.approx(found["speeds"]["nanoinfer"] / found["speeds"]["vllm"])}


def test_a_baseline_has_this_python_and_what_it_cannot_do_is_one_sentence(stub, monkeypatch):
    monkeypatch.setitem(ENGINES, "llama.cpp", Requirements(("missing_module",), "pip install llama-cpp-python"))
    assert parse_baselines("transformers,vllm") == [Baseline("transformers", sys.executable), Baseline("vllm", sys.executable)]
    this = shlex.quote(sys.executable)
    for arguments, sentence in (
        ("--engines sglang", "engines must be some of transformers, openvino, vllm, llama.cpp, nano-vllm, with commas, got"),
        ("--engines vllm,vllm", "engines must name each engine once, got 'vllm' twice"),
        ("--engines vllm=/no/python", "'/no/python' is not a Python that runs"),
        ("--engines llama.cpp", "(no module missing_module); install it in its own environment, pip install llama-cpp-python"),
        ("--num-prompts 1 --request-rate 2", "other engines take all requests at once; leave out request_rate=2.0"),
        (f"--dtype half --engines vllm={this}", "vllm requires device=cpu and dtype bfloat16 or float32, got cpu"),
    ):
        result = CliRunner().invoke(app, ["--model", "tiny-gpt2", *shlex.split(arguments)])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert sentence in result.stderr
