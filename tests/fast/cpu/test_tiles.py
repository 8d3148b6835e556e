"""Products in tiles, whose instructions are emulated: what they add, and the promises of each kernel that uses them."""

import os
import shlex
import shutil
import subprocess

import pytest
import torch
from torch import nn

from nanoinfer.fast.cpu import native, program
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.cpu.linear import KernelLinear, PackedLinear
from nanoinfer.fast.fuse import FusedLinear
from tests.fast.cpu import test_linear, test_quantized
from tests.helpers.paged_cases import compare
from tests.kernel_drivers import EMULATED

pytestmark = pytest.mark.slow

SOURCES = {"tile_linear": [], "paged_prefill": ["-DHEAD_DIM=64"], "quantized_linear": []}


@pytest.fixture
def emulated(monkeypatch):
    """A kernel that is loaded in this test multiplies in tiles."""
    compiler = shutil.which("g++") or pytest.skip("there is no g++")
    emulate = shlex.quote(f"-D{EMULATED[-1]}")
    monkeypatch.setenv("CXX", f"{os.environ.get('CXX') or compiler} {emulate}")  # with the options of `make sanitize`
    caches = native.load, program._library, program.has_tiles
    for cache in caches:
        cache.cache_clear()
    assert program.has_tiles()
    yield
    for cache in caches:
        cache.cache_clear()


@torch.inference_mode()
def test_each_32_inputs_add_the_sum_of_the_even_products_and_that_of_the_odd_ones(emulated):
    """The order that Intel's manual gives for TDPBF16PS. A product of two bfloat16 numbers is exact in fp32."""
    torch.manual_seed(0)
    layer = nn.Linear(96, 40, bias=False).bfloat16()
    x = torch.randn(37, 96).bfloat16()
    packed = PackedLinear(FusedLinear(layer))
    products = x.double()[:, None] * layer.weight.double()  # [rows, outputs, inputs]
    sums = torch.zeros(37, 40)
    for step in products.split(32, dim=2):
        even, odd = torch.zeros(37, 40), torch.zeros(37, 40)
        for i in range(0, 32, 2):  # a sum in fp64 rounded to fp32 is what a fused multiply-add gives
            even, odd = (even + step[..., i]).float(), (odd + step[..., i + 1]).float()
        sums += even + odd
    assert torch.equal(KernelLinear(packed)(x), sums.bfloat16())


@pytest.mark.parametrize("kind", test_linear.KINDS)
@pytest.mark.parametrize(("num_in", "num_out"), [(64, 96), (32, 1), (96, 131)])
def test_a_row_has_the_same_bits_in_any_batch(num_in, num_out, kind, emulated, monkeypatch):
    check = test_linear.test_the_kernel_gives_a_row_the_same_bits_in_any_batch_and_with_any_number_of_threads
    check(num_in, num_out, torch.bfloat16, kind, monkeypatch)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", test_quantized.SIZES)
def test_a_row_of_integers_has_the_bits_that_other_instructions_give(size, bits, emulated):
    test_quantized.test_a_layer_computes_its_definition_and_a_row_has_the_same_bits_alone_and_in_any_batch(
        size, "silu", True, bits
    )


@torch.inference_mode()
@pytest.mark.parametrize(
    ("head_dim", "group"), [(64, 3), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((32, 1), (128, 2)))]
)
def test_prompts_attend_in_tiles(head_dim, group, emulated, monkeypatch):
    if "__AVX512BF16__" not in native.find_compiler().macros:
        pytest.skip("these kernels multiply no pairs of bfloat16 numbers, as every processor with tiles does")
    load, given = native.load, []
    monkeypatch.setattr(native, "load", lambda *args, **structures: given.append(args) or load(*args, **structures))
    lengths = [(10, 1), (0, 70), (33, 65), (5, 30)]
    sizes = {"block_size": 16, "num_kv_heads": 2, "group": group, "head_dim": head_dim, "dtype": torch.bfloat16}
    assert compare(KernelBackend, lengths, **sizes) < 0.01
    assert any("TILES" in args for args in given)
    assert program.tile_definitions(torch.bfloat16, 40) == []  # no multiple of what an instruction multiplies


@pytest.mark.parametrize("source", [pytest.param(one, marks=[pytest.mark.long] * (one != "tile_linear")) for one in SOURCES])
def test_the_instructions_themselves_compile_without_a_warning(source, tmp_path):
    compiler = shutil.which("g++") or pytest.skip("there is no g++")
    if subprocess.run([compiler, "-march=sapphirerapids", "-E", "-x", "c++", "/dev/null"], capture_output=True).returncode:
        pytest.skip("this compiler does not know a processor with tiles")
    # GCC 12 warns about variables in its own headers that are not initialised on purpose
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized"]
    given = ["-DTILES", "-DBF16", "-DSTREAMED=3", *SOURCES[source], *warnings]
    path, out = native.HEADERS / f"{source}.cpp", tmp_path / "kernel.s"
    command = [compiler, *native.OPTIONS, "-march=sapphirerapids", *given, "-S", str(path), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("tdpbsud" if source == "quantized_linear" else "tdpbf16ps") in out.read_text()
