"""`python -m benchmarks.compare`: engines in their own processes, with a stub in the place of vLLM, and what is refused."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.baselines.process import ENGINES, Baseline, BaselineProcess, Requirements, parse_baselines
from benchmarks.compare import app
from nanoinfer.errors import InvalidValueError, NanoinferError
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

# what the engine uses of nano-vllm, and a GPU of which 30,000 bytes are taken
NANO_VLLM_STUB = {
    "nano_vllm-0.2.dist-info/METADATA": "Name: nano-vllm\nVersion: 0.2\n",
    "nanovllm/config.py": """
from types import SimpleNamespace as Record
import torch

class Config(Record):
    hf_config = Record(dtype=torch.bfloat16, num_hidden_layers=2, num_key_value_heads=1, head_dim=2)

    def __init__(self, model, **options):
        super().__init__(**options)
""",
    "nanovllm/engine/model_runner.py": """
import torch

torch.cuda.mem_get_info = lambda: (70_000, 100_000)
torch.cuda.memory_stats = lambda: {"allocated_bytes.all.peak": 9_000, "allocated_bytes.all.current": 4_000}

class ModelRunner:
    def __init__(self, config):
        self.config = config
        self.allocate_kv_cache()

    def allocate_kv_cache(self):
        free, total = torch.cuda.mem_get_info()
        block_bytes = 2 * 2 * 256 * 1 * 2 * 2
        num_blocks = int(total * self.config.gpu_memory_utilization - (total - free) - 9_000 + 4_000) // block_bytes
        print(f"{num_blocks} blocks")
""",
    "nanovllm/engine/llm_engine.py": "",
    "nanovllm/__init__.py": """
from types import SimpleNamespace as Record
from nanovllm.config import Config
from nanovllm.engine import llm_engine
from nanovllm.engine.model_runner import ModelRunner

def SamplingParams(temperature, max_tokens, ignore_eos):
    assert temperature > 0 and ignore_eos
    return Record(max_tokens=max_tokens)

class LLM:
    def __init__(self, model, **options):
        assert options["max_num_seqs"] % 16 == 0
        ModelRunner(Config(model, **options))
        self.tokenizer = llm_engine.AutoTokenizer.from_pretrained(model, use_fast=True)

    def generate(self, prompts, params, use_tqdm):
        assert all(type(token_id) is int for prompt in prompts for token_id in prompt)
        tokens = [[self.tokenizer.eos_token_id] * one.max_tokens for one in params]
        return [{"text": self.tokenizer.decode(token_ids), "token_ids": token_ids} for token_ids in tokens]
""",
}


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Packages of the names vllm and nanovllm, for this Python's subprocesses, and a new cache."""
    write_stubs(tmp_path, monkeypatch)


def write_stubs(folder, monkeypatch):
    (folder / "vllm.py").write_text(STUB)
    for name, text in NANO_VLLM_STUB.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setitem(ENGINES, "nano-vllm", replace(ENGINES["nano-vllm"], modules=("nanovllm",)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("NANOINFER_CACHE", str(in_new_cache(folder)))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The result of a comparison with both stubs, and its folder."""
    folder = tmp_path_factory.mktemp("compared")
    arguments = ["--model", "tiny-gpt2", "--num-prompts", "2", "--input-len", "300", "--output-len", "2-4", "--repeats", "2"]
    arguments += ["--top-k", "3", "--dtype", "bfloat16", "--kv-cache-memory", "16MiB"]
    with pytest.MonkeyPatch.context() as patch:
        write_stubs(folder, patch)
        patch.setitem(ENGINES, "nano-vllm", replace(ENGINES["nano-vllm"], device="cpu"))  # as if this were a GPU
        result = CliRunner().invoke(app, [*arguments, "--engines", f"nano-vllm,vllm={sys.executable}", "--json"])
    assert result.exit_code == 0, result.output
    return result, folder


@pytest.fixture
def baseline(stub):
    process = start(dtype="bfloat16")
    yield process
    process.close()


def start(dtype, engine="vllm"):
    return BaselineProcess(
        Baseline(engine, sys.executable),
        Checkpoint.open("tiny-gpt2").path,
        dtype=dtype,
        device="cpu",
        num_threads=1,
        max_model_len=64,
        max_num_seqs=4,
        num_cache_tokens=256,
    )


def workload(*input_lens):
    return Workload(name="small", input_lens=input_lens, output_lens=(5,) * len(input_lens))


def test_a_baseline_reports_the_seconds_of_a_workload(stub):
    baseline = start(dtype="bfloat16")
    assert baseline.engine == "vLLM 1.2 with 1 thread"
    for _ in range(2):
        start_time = time.perf_counter()
        seconds = baseline.run(workload(3, 2), [[1, 2, 3], [4, 5]])
        assert 0.01 <= seconds <= time.perf_counter() - start_time
    baseline.close()
    assert baseline.process.returncode is not None


def test_a_baseline_that_generates_too_few_tokens_is_refused(baseline):
    with pytest.raises(NanoinferError, match=r"vllm generated \[4, 4\] tokens in workload small, which asks for \[5, 5\]"):
        baseline.run(workload(4, 1), [[1, 2, 3, 4], [5]])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_baseline_is_stopped_between_its_turns(baseline):
    """The stub has a thread that spins for ever."""
    for _ in range(2):
        deadline = time.perf_counter() + 120
        while (state := Path(f"/proc/{baseline.process.pid}/stat").read_text().rpartition(") ")[2][0]) != "T":
            assert time.perf_counter() < deadline, state
        baseline.run(workload(1), [[1]])


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_stopped_baseline_ends_with_a_killed_parent(stub):
    code = f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); "
    code += "from tests.lab.bench.test_baselines import start; "
    code += "print(start('bfloat16').process.pid, flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    process = Path(f"/proc/{int(killed.stdout)}")
    deadline = time.perf_counter() + 120
    while process.exists() and "Z" not in (process / "stat").read_text().rpartition(") ")[2][0]:
        assert time.perf_counter() < deadline


def test_a_baseline_that_fails_is_an_error_with_its_last_line(stub):
    with pytest.raises(
        NanoinferError, match=r"vllm has failed: RuntimeError: out of memory; its output is in .*vllm\.log"
    ) as found:
        start(dtype="float32")
    log = Path(str(found.value).rpartition(" ")[2])
    assert "a line on standard output is not an answer" in log.read_text()


def test_the_ratios_to_several_engines(compared):
    result, _ = compared
    assert "comparing with vLLM 1.2 with 1 thread" in result.stderr
    (found,) = json.loads(result.stdout)
    assert list(found["speeds"]) == ["nanoinfer", "nano-vllm", "vllm"]
    for name, ratio in found["ratios"].items():
        assert ratio == pytest.approx(found["speeds"]["nanoinfer"] / found["speeds"][name])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "sglang",
            r"engines must be some of transformers, openvino, vllm, llama\.cpp, nano-vllm, with commas, got 'sglang'",
        ),
        ("vllm,vllm", "engines must name each engine once, got 'vllm' twice"),
        ("vllm=/no/python", "'/no/python' is not a Python that runs .*; write vllm=/environment/bin/python"),
        (
            "llama.cpp",
            r"llama\.cpp is not installed for .* \(no module missing_module\); install it in its own environment, pip",
        ),
    ],
)
def test_a_baseline_that_cannot_run_is_refused_with_a_hint(stub, monkeypatch, text, sentence):
    monkeypatch.setitem(ENGINES, "llama.cpp", Requirements(("missing_module",), "pip install llama-cpp-python"))
    with pytest.raises(InvalidValueError, match=sentence):
        parse_baselines(text)


def test_the_default_python_of_a_baseline_is_this_one(stub):
    assert parse_baselines("transformers,vllm") == [Baseline("transformers", sys.executable), Baseline("vllm", sys.executable)]


def test_other_engines_take_all_requests_at_once():
    result = CliRunner().invoke(app, ["--num-prompts", "1", "--request-rate", "2"])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "other engines take all requests at once; leave out request_rate=2.0" in result.stderr


@pytest.mark.parametrize(
    ("engine", "dtype", "sentence"),
    [
        (
            "vllm",
            "half",
            "vllm requires device=cpu and dtype bfloat16 or float32, got cpu and float16; leave it out of engines",
        ),
        (
            "nano-vllm",
            "bfloat16",
            "nano-vllm requires device=cuda and dtype bfloat16 or float16, got cpu and bfloat16; leave it",
        ),
    ],
)
def test_an_engine_refuses_other_devices_and_dtypes(stub, engine, dtype, sentence):
    result = CliRunner().invoke(app, ("--model", "tiny-gpt2", "--dtype", dtype, "--engines", f"{engine}={sys.executable}"))
    assert result.exit_code == 1
    assert sentence in result.stderr


def test_all_engines_sample_as_nano_vllm_does(compared):
    result, _ = compared
    assert "comparing with nano-vllm 0.2" in result.stderr
    (found,) = json.loads(result.stdout)
    assert found["workload"] == "yours, temperature 0.6"


def test_nano_vllm_has_a_cache_of_the_given_size(compared):
    _, folder = compared
    (log,) = folder.rglob("nano-vllm.log")
    assert log.read_text() == "32 blocks\n"  # of 256 tokens of 2 KiB: 16 MiB


def test_nano_vllm_refuses_another_dtype_than_the_checkpoint_has(stub):
    with pytest.raises(NanoinferError, match=r"computes in the checkpoint's dtype, torch.bfloat16, got dtype=float16"):
        start(dtype="float16", engine="nano-vllm")
