"""On a CUDA machine: the tests of a GPU, `nanoinfer doctor` and report.py, as a block of Markdown. `make gpu` runs it.

Each part runs in its own process, because a kernel that fails makes the GPU unusable for its process. The block says what
failed, and the other parts run nevertheless. It is printed, and added to BENCHMARKS.md, which says how to read it.
"""

import datetime
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

PAGE = Path(__file__).parents[1] / "BENCHMARKS.md"
TESTS = (
    "tests/attention/test_triton.py",
    "tests/end_to_end/test_gpu.py",
    "tests/fast/cuda/test_fused_kernels.py",
    "tests/fast/cuda/test_linear_kernel.py",
    "tests/fast/cuda/test_layouts.py",
    "tests/fast/cuda/test_cuda_compile.py",
    "tests/fast/sampling/test_few_logits.py",
    "tests/execution/test_model_runner.py",
    "tests/system/test_transfer.py",
)
REPORT = ("benchmarks.report", "--random-model", "qwen3-0.6b", "--device", "cuda", "--workload", "A,C,E,F")
LIMIT_S = 600  # of a process
CORES_PER_PROCESS = 4  # of the tests, which mostly compile kernels


def run(*command: str) -> tuple[bool, str]:
    """Run a program in the repository, and show on stderr what a failed one printed.

    Returns: whether it succeeded, and what it printed, with its errors if it failed.
    """
    print("$", *command, file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, cwd=PAGE.parent, capture_output=True, text=True, errors="replace", timeout=LIMIT_S)
    except OSError as error:
        return False, str(error)
    except subprocess.TimeoutExpired:
        return False, f"stopped after {LIMIT_S} s"
    if done.returncode == 0:
        return True, done.stdout.strip()
    output = f"{done.stdout}{done.stderr}".strip()
    print(output, file=sys.stderr, flush=True)
    return False, output or f"exit status {done.returncode}"


def run_python(*arguments: str) -> tuple[bool, str]:
    return run(sys.executable, "-m", *arguments)


def lines_of(path: str, succeeded: bool, output: str) -> list[str]:
    """Return a list item: the file, what pytest printed last, and below it the names of tests that failed."""
    lines = output.splitlines()
    failed = [f"  - {line}" for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return [f"- {'' if succeeded else '**failed** '}`{path}`: {lines[-1]}", *failed]


def main() -> int:
    """Print the block and add it to BENCHMARKS.md. Returns: 1 if a part failed, or else 0."""
    if not torch.cuda.is_available():
        sys.exit("make gpu needs a CUDA device, and torch sees none; `nanoinfer doctor` shows which torch this is")
    _, driver = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    _, commit = run("git", "describe", "--always", "--dirty")
    with ThreadPoolExecutor(max((os.cpu_count() or 1) // CORES_PER_PROCESS, 1)) as pool:
        tests = list(pool.map(lambda path: run_python("pytest", path), TESTS))
    (examined, machine), (measured, report) = run_python("nanoinfer", "doctor", "--kernels"), run_python(*REPORT)
    lines = [f"## {torch.cuda.get_device_name()}, {datetime.date.today()}", ""]
    for path, (succeeded, output) in zip(TESTS, tests, strict=True):
        lines += lines_of(path, succeeded, output)
    lines += ["", f"`nanoinfer doctor`{'' if examined else ' **failed**'}, driver {driver}, commit {commit}:"]
    lines += ["", "```text", machine, "```", ""]
    lines += [report] if measured else ["`benchmarks.report` **failed**:", "", "```text", *report.splitlines()[-20:], "```"]
    block = "\n".join(lines) + "\n"
    with PAGE.open("a", encoding="utf-8") as page:
        page.write("\n" + block)
    print(block)
    return int(not all(succeeded for succeeded, _ in (*tests, (examined, ""), (measured, ""))))


if __name__ == "__main__":
    sys.exit(main())
