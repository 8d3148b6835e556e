"""What Triton compiled for sm_80 of every kernel, executed on data (tests/emulated_gpu): values, races and addresses."""

import json

import pytest

from tests.emulated_gpu.process import output_of

pytest.importorskip("triton")

DTYPES = ["bfloat16", "float16", "float32"]
NUM_LAUNCHES = {"attention": 4, "linear": 3, "rotate": 4, "draw": 2, "choose": 6}  # of a case. Others have one


def check(*cases, rest=()):
    """Emulate cases, and return what `rest` makes the command print after them."""
    lines = output_of("--case", *cases, *rest)
    results = [json.loads(line) for line in lines[: len(cases)]]
    assert [result["case"] for result in results] == list(cases)
    for result in results:
        assert result["share_of_tolerance"] <= 1, result
        assert result["num_launches"] == NUM_LAUNCHES.get(result["case"].split()[0], 1)
    return lines[len(cases) :]


@pytest.mark.slow
def test_every_kernel_computes_its_definition_without_a_race():
    cases = (
        "store bfloat16",
        "rms_norm float32",
        "silu_mul float16",
        "rotate bfloat16",
        "copy bfloat16",
        "attention bfloat16 64 window and sinks",
        "linear bfloat16 gated",
        "draw ties",
        "choose ties bfloat16",
    )
    table = check(*cases, rest=("--kernel", "rms_norm"))
    assert sum("`fused_kernels.py:" in row for row in table) == len(table) - 3  # a head of two rows, and the total


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_kernels_of_every_dtype(dtype):
    check(*(f"{kernel} {dtype}" for kernel in ("store", "rms_norm", "silu_mul", "rotate", "copy")))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_linear_layers_of_few_rows(dtype):
    check(*(f"linear {dtype} {option}" for option in ("plain", "bias", "residual", "gated", "gated with bias")))


@pytest.mark.long
def test_draws_from_all_logits_without_ties():
    check("draw spread", *(f"choose spread {dtype}" for dtype in DTYPES))


@pytest.mark.long
def test_offsets_beyond_32_bits():
    check("far rotate bfloat16")


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_every_dtype_size_window_and_sink(dtype, head_dim):
    check(*(f"attention {dtype} {head_dim} {option}" for option in ("plain", "window", "window and sinks")))
