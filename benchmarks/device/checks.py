"""Parts that run programs: `nanoinfer doctor`, the tests of a GPU, the sanitizer, the report. And the machine's name."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.device.parts import Results, Setup
from nanoinfer.system import environment

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/attention/test_triton.py",
    "tests/attention/test_flash.py",
    "tests/end_to_end/test_gpu.py",
    "tests/fast/cuda/test_layouts.py",
    "tests/fast/cuda/test_cuda_compile.py",
    "tests/fast/cuda/test_decode_kernels.py",
    "tests/fast/cuda/test_experts.py",
    "tests/fast/cuda/test_quantized.py",
    "tests/fast/cuda/test_lora.py",
    "tests/fast/cuda/test_invariant.py",
    "tests/fast/sampling/test_few_logits.py",
    "tests/execution/test_model_runner.py",
    "tests/system/test_transfer.py",
)
CORES_PER_PROCESS = 4  # of the tests, which mostly compile kernels
# A few tests of the linear kernel and of the draw, because the sanitizer is slow.
SANITIZED = (
    "tests/fast/cuda/test_layouts.py",
    "tests/fast/sampling/test_few_logits.py",
    "-k",
    "same_bits or in_place or tie_at",
)
REPORT = ("--random-model", "qwen3-0.6b", "--device", "cuda", "--workload", "A,C,E,F")


def machine(simulate: bool) -> dict[str, str]:
    """Name the GPU, its driver, the versions, and those that are below what pyproject.toml asks for. CUDA is not started."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    needed = {found[1]: found[2] for text in asked if (found := re.match(r"([\w-]+)\S*>=([\d.]+)", text))}
    installed = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    met = {name: installed[name] for name in ("torch", "transformers", "triton") if name in installed}
    below = [f"{name} {version} is below {needed[name]}, which pyproject.toml asks for" for name, version in met.items()
             if numbers(version) < numbers(needed[name])]  # fmt: skip
    has_driver, gpus = run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    about = environment.versions() | met | {"CPU": f"{environment.cpu_name()}, {os.cpu_count()} cores"}
    what = "a simulated device" if simulate else gpus.splitlines()[0] if has_driver else "no GPU"
    return {"what": what, "text": "\n".join([*(f"{name} {value}" for name, value in about.items()), *below])}


def numbers(version: str) -> list[int]:
    """Return the numbers of a version such as 2.11.0+cu130, without what follows the plus sign."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def run(*command: str) -> tuple[bool, str]:
    """Run a program in the repository. Returns: whether it succeeded, and what it printed, with its errors if it failed."""
    try:
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return False, str(error)
    output = done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"
    return done.returncode == 0, output.strip() or f"exit status {done.returncode}"


def doctor(setup: Setup) -> Results:
    passed, output = run(sys.executable, "-m", "nanoinfer", "doctor", "--kernels")
    yield {"what": "nanoinfer doctor --kernels", "passed": passed, "text": output}


def tests(setup: Setup) -> Results:
    """Run the files at the same time, and yield each when it has ended. On the simulated device: the last file."""
    with ThreadPoolExecutor(max((os.cpu_count() or 1) // CORES_PER_PROCESS, 1)) as pool:
        files = TESTS[-1:] if setup.is_simulated else TESTS
        running = {pool.submit(run, sys.executable, "-m", "pytest", file): file for file in files}
        for done in as_completed(running):
            yield tested(running[done], *done.result())


def tested(what: str, passed: bool, output: str) -> dict[str, Any]:
    """Return the last line of pytest, and the tests that failed."""
    lines = output.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "========= "))]
    return {"what": what, "passed": passed, "result": lines[-1], "text": "" if passed else "\n".join(failed or lines[-12:])}


def sanitizer(setup: Setup) -> Results:
    """Run a few tests of kernels under NVIDIA's compute-sanitizer. On the simulated device: without it."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None and not setup.is_simulated:
        yield {"what": "compute-sanitizer", "result": "not run: it is not installed; it is a part of NVIDIA's CUDA toolkit"}
        return
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor is an allocation, whose bounds are checked
    for tool in ("memcheck",) if setup.is_simulated else ("memcheck", "racecheck"):
        under = [] if setup.is_simulated else [str(program), "--tool", tool, "--error-exitcode", "9"]
        yield tested(tool, *run(*under, sys.executable, "-m", "pytest", *SANITIZED))


def report(setup: Setup) -> Results:
    """Compare with transformers and with the roofline (report.py)."""
    arguments = ("--model", setup.model, "--device", "cpu", "--workload", "A") if setup.is_simulated else REPORT
    passed, output = run(sys.executable, "-m", "benchmarks.report", *arguments)
    yield {"what": "python -m benchmarks.report", "passed": passed, "text": output}
