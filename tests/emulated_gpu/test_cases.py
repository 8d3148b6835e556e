"""What Triton compiled of every kernel for sm_80 and sm_90, executed on data: values, races, addresses. Faults are found.

The emulator runs in a process of its own, because tests run where Triton's interpreter is on.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.emulated_gpu.faults import FAULTS, InSource

DTYPES = ["bfloat16", "float16", "float32"]
NUM_LAUNCHES = {  # of a case. Others have one
    "attention": 4, "decode": 3, "linear": 3, "rms_norm": 2, "gate": 2, "rotate": 6, "draw": 9,
    "choose": 6, "decode_linear": 4, "decode_attention": 2, "drafts": 2, "paged_drafts": 3, "experts": 8, "large_experts": 4,
    "route": 2, "lora": 4, "integer_linear": 4, "widen": 2, "invariant": 3, "invariant_decode": 12,
}  # fmt: skip
# By the number of rows, of two steps of two layers: 5 and 9 a layer, angles, the last norm. Gemma 3 has 2 more a layer, and
# angles twice.
NUM_IN_STEP = {1: 24, 3: 24, 6: 40}
OF_GEMMA = {1: 34, 3: 34, 6: 50}


def output_of(*arguments):
    """Run `python -m tests.emulated_gpu`, and return the lines that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.emulated_gpu", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check(*cases, archs=(80,), faults=(), rest=()):
    """Emulate cases and faults, and return what `rest` makes the command print after them."""
    lines = output_of("--arch", *map(str, archs), "--case", *cases, *(["--fault", *faults] if faults else []), *rest)
    results = [json.loads(line) for line in lines if line.startswith("{")]
    num_cases = len(cases) * len(archs)
    assert [result.get("case") or result["fault"] for result in results] == [*cases * len(archs), *faults]
    for result in results[:num_cases]:
        assert result["share_of_tolerance"] <= 1, result
        kernel, *_, last = result["case"].split()
        in_step = (OF_GEMMA if "gemma3" in result["case"] else NUM_IN_STEP).get(int(last)) if kernel == "step" else None
        assert result["num_launches"] == (in_step or NUM_LAUNCHES.get(kernel, 1)), result
    assert {result["fault"]: result["found"] for result in results[num_cases:]} == {name: FAULTS[name].found for name in faults}
    return lines[len(results) :]


QUICK_FAULTS = [
    "prefill: exchanged fragments of an mma", "decode: no barrier after the block table", "store: a mask that is always true",
    "PDL: no wait", "attention: the scales of another KV head", "experts: one tile of each expert",
    "decode_attention: a merge that nothing orders",
]  # fmt: skip


@pytest.mark.slow
def test_kernels_compute_their_definition_without_a_race_and_injected_faults_are_found():
    cases = (
        "store bfloat16", "store_int8 float32", "rms_norm float32", "rotate bfloat16",
        "attention bfloat16 64 window and sinks",
        "linear bfloat16 gated", "decode_linear float16 gated with norm", "decode_attention bfloat16 64 window and sinks",
        "draw ties", "experts bfloat16 clamped with bias",
    )  # fmt: skip
    table = check(*cases, faults=QUICK_FAULTS, rest=("--kernel", "rms_norm"))
    assert sum("`fused_kernels.py:" in row for row in table) == len(table) - 3  # a head of two rows, and the total


@pytest.mark.slow
def test_the_kernels_of_a_decode_step_compute_their_definition_as_compiled_for_sm_90():
    check(
        "linear bfloat16 int8 gated with bias",
        "decode bfloat16 64 int8",
        "decode_attention bfloat16 64 int8",
        "decode_attention 16 splits",
        "choose ties bfloat16",
        "step qwen3 3",
        archs=(90,),
    )


ATTENTION = [f"{{}} {dtype} {{}} {option}" for dtype in DTYPES for option in ("plain", "window", "window and sinks", "int8")]
LINEAR = ("plain", "bias", "residual", "split residual", "gated", "gated with bias", "gated by gelu")
DECODE_LINEAR = ("residual", "norm and bias", "gated with norm", "gated by gelu with zero-centred norm")
DRAFTS = ("together", "alone", "together int8", "alone int8")
SMALL = ("store", "store_int8", "rms_norm", "gate", "rotate", "copy", "angles", "lora", "route")
LONG = {  # what -> cases
    "small kernels": [f"{name} {dtype}" for dtype in DTYPES for name in SMALL],
    "linear layers of few rows": [f"linear {dtype} {option}" for dtype in DTYPES[:2] for option in LINEAR],
    "linear layers of the fewest rows": [f"decode_linear {dtype} {option}" for dtype in DTYPES for option in DECODE_LINEAR],
    "linear layers in 8 and 4 bits": [
        case.format(dtype=dtype, bits=bits)
        for dtype in DTYPES[:2]
        for bits in (8, 4)
        for case in (
            *(f"integer_linear {{dtype}} int{{bits}} {option}" for option in DECODE_LINEAR),
            "widen {dtype} int{bits}",
            *(f"linear {{dtype}} int{{bits}} {option}" for option in ("split residual", "gated with bias")),
        )
    ],
    "drafts": [
        *(f"drafts {dtype} {option}" for dtype in DTYPES[:2] for option in DRAFTS),
        *(f"paged_drafts {dtype}" for dtype in DTYPES),
    ],
    "experts": [f"experts {dtype} {option}" for dtype in DTYPES for option in ("silu", "clamped with bias")],
    "linear layers of any number of rows": [
        f"invariant {dtype} {option}" for dtype in DTYPES for option in ("split residual", "gated with bias")
    ],
    "decodes with a fixed split": [f"invariant_decode {dtype}" for dtype in DTYPES],
    "steps": [f"step {family} {num_rows}" for family in ("qwen3", "qwen2", "llama", "gemma3") for num_rows in (1, 3, 6)],
    "decodes with more splits than two": ["decode_attention 8 splits", "decode_attention 16 splits"],
    "draws from all logits without ties": ["draw spread", *(f"choose spread {dtype}" for dtype in DTYPES)],
    "offsets beyond 32 bits": ["far rotate bfloat16"],
    **{
        f"{kernel} of {head_dim}": [
            case.format(kernel, head_dim) for case in ATTENTION if kernel == "decode" or "float32" not in case
        ]
        for kernel in ("decode", "decode_attention")
        for head_dim in (64, 128, 256)
    },
}


@pytest.mark.long
@pytest.mark.parametrize("cases", LONG.values(), ids=LONG)
def test_every_dtype_option_and_size(cases):
    check(*cases, archs=(80, 90))


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prompts_and_decodes_in_a_step(head_dim):
    """On sm_90 four warps multiply a prompt's tiles together, which is not emulated."""
    check(*(case.format("attention", head_dim) for case in ATTENTION))


@pytest.mark.long
def test_experts_with_many_pairs():
    """As for prompts, sm_90's code is not emulated."""
    check("large_experts bfloat16", "large_experts float16")


@pytest.mark.long
def test_all_injected_faults_are_found():
    check("store bfloat16", faults=[name for name in FAULTS if name not in QUICK_FAULTS])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if isinstance(fault, InSource) and fault.hidden_from])
def test_the_interpreter_does_not_see_a_fault(name):
    with FAULTS[name].injected():
        assert FAULTS[name].hidden_from() <= 1
