"""The same promises on lesser processors: libraries can be told to use an older instruction set than this machine has.

Each runs in a process of its own, since the libraries read the settings once. By default one does: with the processor's own
instructions test_invariance.py, test_readme.py and fast/test_batch_independence.py have the same promises.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INSTRUCTION_SETS = {  # oneDNN's, torch's own kernels', and those of the kernels in C++
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "KERNELS_CXX": "g++ -mno-avx512f"},
    "AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    "AVX512_CORE_BF16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "its own": {},
}
CODE = """
import os
import sys
import torch
from tests import fuzz
from tests.docs import test_readme

is_all = sys.argv[1] == "all"
cases = [("float32", "gpt2"), ("bfloat16", "qwen3"), ("float32", "qwen3"), ("bfloat16", "gpt2")]
for dtype, family in cases if is_all else cases[:1]:
    torch.set_num_threads(1 if dtype == "float32" else 2)
    given = ["--part=bits", "--requests=4", "--seed=0", "--dtype", dtype, "--family", family, "--enforce-eager"]
    assert fuzz.main(given) == 0
for page in test_readme.PAGES if is_all else ():
    test_readme.run_the_session(page)
os.environ["CXX"] = os.environ.get("KERNELS_CXX", "g++")  # of the kernels in bfloat16, which nothing has loaded yet
assert fuzz.main(["--part=bits", "--requests=8", "--seed=0", "--dtype=bfloat16"]) == 0
"""


@pytest.mark.parametrize(
    ("name", "how_many"),
    [("AVX2", "few"), *(pytest.param(name, "all", marks=pytest.mark.long) for name in INSTRUCTION_SETS)],
)
def test_requests_get_the_same_bits_alone_and_together_and_the_sessions_hold(name, how_many, tmp_path):
    """The sessions' texts are fp32 of the bundled models; test_readme.py shows how far each draw is from another token."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, how_many],
        env=os.environ | INSTRUCTION_SETS[name] | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,  # the sessions write a file
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("0 differ: ") == (5 if how_many == "all" else 2), done.stdout
