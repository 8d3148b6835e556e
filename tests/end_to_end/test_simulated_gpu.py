"""Every kernel of a step is compiled for a GPU, without one. Registers and shared memory suffice, and arguments fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# A kernel that would read behind a tensor's end, and one that gets 32-bit slots.
WRONG = """
import torch
from tests import simulated_gpu
from tests.simulated_gpu import Launch

k = torch.empty(4, 2, 8, device="meta")
slots = torch.empty(4, dtype=torch.int64)
good = {"k": k, "v": k, "slots": slots, "k_stride": 16, "v_stride": 16, "KV_HEADS": 2, "HEAD_DIM": 8}
Launch("_store_kernel", (4,), good, None).check(torch.float32)
for change in ({"k_stride": 24}, {"v": k[:3]}, {"slots": slots.int()}):
    try:
        Launch("_store_kernel", (4,), good | change, None).check(torch.float32)
    except AssertionError as error:
        print(error)
simulated_gpu.main()
"""


def lines_of(*arguments):
    """What a process without the interpreter prints: the refusals of wrong arguments, and a table."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WRONG, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("model", "arch", "dtype", "num_kernels"),
    [
        ("Qwen3-0.6B", "90 --quantization int4", "bfloat16", 24),
        *(pytest.param("Qwen3-0.6B", arch, "bfloat16", 24, marks=pytest.mark.long) for arch in ("86", "89", "90", "120")),
        pytest.param("Llama-3.2-1B", "75", "float16", 21, marks=pytest.mark.long),  # a T4: from 5 rows on torch's products
        pytest.param("Gemma-3-1B", "80", "float32", 19, marks=pytest.mark.long),
        # Experts have six kernels, and the gate is in one of them.
        pytest.param("gpt-oss-20b", "100", "bfloat16", 27, marks=pytest.mark.long),
        *(
            pytest.param("Qwen3-30B-A3B", arch, "bfloat16", 27, marks=pytest.mark.long)
            for arch in ("80", "86", "89", "90", "120")
        ),
        *(
            pytest.param(model, "75", dtype, num if model != "gpt-oss-20b" else 24, marks=pytest.mark.long)
            for model in ("Qwen3-0.6B", "Mistral-7B-v0.1", "head_dim 80", "Gemma-3-1B", "gpt-oss-20b")
            for dtype, num in (("float16", 21), ("float32", 19))
        ),
    ],
)
def test_kernels_compile_within_an_architectures_limits_and_wrong_arguments_are_refused(model, arch, dtype, num_kernels):
    lines = lines_of("--arch", *arch.split(), "--dtype", dtype, "--model", model)
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == num_kernels
    assert all(f"| {dtype} | {model} |" in row for row in rows)
    assert lines[0] == "_store_kernel reads 88 elements of k, which has 64"
    assert "of v, which has 48" in lines[1]
    assert "int32" in lines[2]
