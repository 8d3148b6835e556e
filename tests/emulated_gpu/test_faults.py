"""The emulator finds what is injected in kernels and in their PTX (faults.py). Each test would pass if nobody emulated."""

import json

import pytest
import torch

pytest.importorskip("triton")

from tests.emulated_gpu.faults import FAULTS, InSource
from tests.emulated_gpu.process import output_of

HIDDEN = [name for name, fault in FAULTS.items() if isinstance(fault, InSource) and fault.hidden_from]
QUICK = [
    "decode: no wait for the keys", "prefill: exchanged fragments of an mma", "merge: no barrier in the sum over splits",
    "store: a mask that is always true", "rms_norm: a weight that is read without its mask",
    "rotate: an int32 offset that overflows",
]  # fmt: skip


def check(names):
    results = [json.loads(line) for line in output_of("--fault", *names)]
    assert {result["fault"]: result["found"] for result in results} == {name: FAULTS[name].found for name in names}


@pytest.mark.slow
def test_injected_faults_are_found():
    check(QUICK)


@pytest.mark.long
def test_all_injected_faults_are_found():
    check([name for name in FAULTS if name not in QUICK])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
@pytest.mark.parametrize("name", HIDDEN)
def test_the_interpreter_does_not_see_a_fault(name):
    with FAULTS[name].injected():
        assert FAULTS[name].hidden_from() <= 1
