"""The same promises on lesser processors: libraries can be told to use an older instruction set than this machine has.

Each runs in a process of its own, since the libraries read the settings once. With the processor's own instructions
test_invariance.py, test_readme.py and fast/test_batch_independence.py have the same promises, and kernels/test_bits.py has each
kernel's bits on other processors.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
INSTRUCTION_SETS = {  # oneDNN's, torch's own kernels', and those of the kernels in C++
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "KERNELS_CXX": "g++ -mno-avx512f"},
    "AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    "AVX512_CORE_BF16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "its own": {},
}
CODE = """
import os
import torch
from tests import fuzz
from tests.docs import test_readme

for dtype, family in ("float32", "gpt2"), ("bfloat16", "qwen3"), ("float32", "qwen3"), ("bfloat16", "gpt2"):
    torch.set_num_threads(1 if dtype == "float32" else 2)
    given = ["--part=bits", "--requests=4", "--seed=0", "--dtype", dtype, "--family", family, "--enforce-eager"]
    assert fuzz.main(given) == 0
for page in test_readme.PAGES:
    test_readme.run_the_session(page)
os.environ["CXX"] = os.environ.get("KERNELS_CXX", "g++")  # of the kernels in bfloat16, which nothing has loaded yet
assert fuzz.main(["--part=bits", "--requests=8", "--seed=0", "--dtype=bfloat16"]) == 0
"""


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_requests_get_the_same_bits_alone_and_together_and_the_sessions_hold(name, tmp_path):
    """The sessions' texts are fp32 of the bundled models; test_readme.py shows how far each draw is from another token."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | INSTRUCTION_SETS[name] | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,  # the sessions write a file
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("0 differ: ") == 5, done.stdout
