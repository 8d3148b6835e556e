"""A kernel prints the same digests from every compiler and for every processor, those of ARM under qemu's emulation."""

import itertools
import shutil
from dataclasses import dataclass, replace
from functools import cache

import pytest

from tests.kernel_drivers import DRIVERS, Driver, build, can_build, digests_of, run

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Target:
    compiler: str
    options: tuple[str, ...]
    emulator: tuple[str, ...] = ()

    def digests(self, driver, *options):
        program = build(driver, *self.options, *options, compiler=self.compiler)
        done = run(self.emulator[0], str(program), "short") if self.emulator else run(program, "short")
        assert done.returncode == 0, done.stderr
        return digests_of(done.stdout)


@cache
def why_not(target):
    """Why this machine cannot compile for a target or run what is compiled, or None."""
    for program in (target.compiler, *target.emulator):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if not target.emulator and not can_build(*target.options, compiler=target.compiler):
        return f"{target.compiler} does not compile for {' '.join(target.options)}, or the processor does not run it"
    return None


HERE = Target("g++", ("-march=native",))
TARGETS = {
    "no FMA": Target("g++", ("-march=x86-64-v3", "-mno-fma")),
    "clang": Target("clang++", ("-march=native",)),
    "ARM": Target("aarch64-linux-gnu-g++", ("-static",), ("qemu-aarch64",)),
    "AVX2": Target("g++", ("-march=native", "-mno-avx512f")),
    "SSE2": Target("g++", ("-march=x86-64",)),
    "clang SSE2": Target("clang++", ("-march=x86-64",)),
}


def in_float32(name, *definitions):
    driver = DRIVERS[name]
    return replace(driver, definitions=(*(text for text in driver.definitions if text != "BF16"), *definitions))


KERNELS = {
    **{name: in_float32(name) for name in ("layers", "dense_linear", "sampling", "paged_decode", "paged_prefill", "delta")},
    "layers in float16": in_float32("layers", "FP16"),
    "paged_decode with pages in 8 bits": in_float32("paged_decode", "INT8_PAGES"),
    "layers in bfloat16": DRIVERS["layers"],
    "quantized_linear": DRIVERS["quantized_linear"],
    "rounding": DRIVERS["rounding"],
}
# A pair takes 5 s of CPU, most of which are the compilers'.
BY_DEFAULT = [("layers", "no FMA"), ("sampling", "ARM")]
CASES = [
    pytest.param(
        KERNELS[name], TARGETS[target], id=f"{name}, {target}", marks=[] if (name, target) in BY_DEFAULT else [pytest.mark.long]
    )
    for name, target in itertools.product(KERNELS, TARGETS)
]


@pytest.mark.parametrize(("kernel", "target"), CASES)
def test_a_kernel_has_the_same_bits_on_another_processor(kernel: Driver, target: Target):
    if reason := why_not(HERE) or why_not(target):
        pytest.skip(reason)
    here = HERE.digests(kernel)
    assert here
    assert target.digests(kernel) == here


def test_contracted_products_have_other_bits():
    if not can_build("-march=x86-64-v3"):
        pytest.skip("the processor has no fused multiply-add of x86")
    assert HERE.digests(KERNELS["layers"], "-ffp-contract=fast") != HERE.digests(KERNELS["layers"])
