"""The C++ kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, and in memory before a guard page.

Drivers without Python call every function with buffers of exactly the size that its contract states (driver.h).
"""

import re
import shutil
import signal
from functools import cache
from typing import NamedTuple

import pytest

from tests import kernel_drivers
from tests.kernel_drivers import DRIVERS, GUARDED, MORE_DRIVERS, ONE_TARGET, PACKAGE, SANITIZED, THREADED, build, run

pytestmark = pytest.mark.slow


class Fault(NamedTuple):
    """A fault that is injected by replacing a text that occurs once in a file of the package."""

    file: str
    text: str
    replacement: str
    driver: str


FAULTS = [
    Fault("features/distributed/exchange.cpp", "(buffer, source, num_bytes)", "(buffer, source, num_bytes + 1)", "exchange"),
    Fault("fast/sampling/kernels.cpp", "(LANES, stop - i)", "(LANES, stop - i + 1)", "sampling"),
    Fault("fast/sampling/kernels.cpp", "i < num; i++) {", "i <= num; i++) {", "sampling"),
    Fault("fast/cpu/dense_linear.cpp", "+ first, num_terms, ahead", "+ first, num_terms + 1, ahead", "dense_linear"),
    Fault("fast/cpu/dense_linear.cpp", "1, NUM, weight, num_terms,", "1, NUM, weight, num_terms + 1,", "dense_linear"),
    Fault("fast/cpu/tile_linear.cpp", "step < num_steps; step++) {", "step <= num_steps; step++) {", "tile_linear"),
    Fault("fast/cpu/tiles.h", "rows[tile] = num_rows;", "rows[tile] = num_rows + 1;", "tile_linear"),
    Fault("fast/cpu/quantized_linear.cpp", "i < group_size; i += LANES", "i <= group_size; i += LANES", "quantized_linear"),
    Fault("fast/cpu/integers.h", "&shifted, sizeof bits)", "&shifted, sizeof bits + 1)", "screen"),
    Fault("fast/cpu/rounding.cpp", "row < batch.num_rows", "row <= batch.num_rows", "rounding"),
    Fault("fast/cpu/screen.cpp", "unit < num_units(*call) && call->", "unit <= num_units(*call) && call->", "screen"),
    Fault("fast/cpu/linear.h", "load(call.bias + first, num)", "load(call.bias + first)", "dense_linear"),
    Fault("fast/cpu/lora.h", "i < change.rank", "i <= change.rank", "tile_linear"),
    Fault("fast/cpu/vectors.h", "memcpy(&part, from, num *", "memcpy(&part, from, (num + 1) *", "layers"),
    Fault("fast/cpu/layers.cpp", "(LANES, size - i)", "(LANES, size - i + 1)", "layers"),
    Fault("fast/cpu/pages.h", "= load(head + i * LANES,", "= load(head + 8 + i * LANES,", "paged_decode"),
    Fault("fast/cpu/paged_decode.cpp", "SPAN, rows.seq_lens[row])", "SPAN, rows.seq_lens[row] + 1)", "paged_decode"),
    Fault("fast/cpu/paged_prefill.cpp", "token < num_zeros + places", "token <= num_zeros + places", "paged_prefill"),
    Fault("fast/cpu/delta.cpp", "i < BEFORE; i++, weight", "i <= BEFORE; i++, weight", "delta"),
    Fault("fast/cpu/program.cpp", "call < end", "call <= end", "program"),
    Fault("fast/cpu/team.h", "(index + 1) / num_threads}", "(index + 1) / num_threads + 1}", "layers"),
    Fault("fast/cpu/program.h", "+ first + row * stride", "+ first + (row + 1) * stride", "layers"),
]
# Where a member no longer waits for the others: every call of wait, and the orders of memory that make it a barrier.
RACES = [
    Fault("fast/cpu/team.h", "count.load(std::memory_order_acquire)", "count.load(std::memory_order_relaxed)", "program"),
    Fault("fast/cpu/team.h", "fetch_add(1, std::memory_order_acq_rel)", "fetch_add(1, std::memory_order_relaxed)", "program"),
]
for file, driver in {fault.file: fault.driver for fault in FAULTS}.items():
    waits = re.findall(r"(?m)^(?=(.*\n.*me\.wait\(\);\n.*))", (PACKAGE / file).read_text(encoding="utf-8"))
    RACES += [Fault(file, lines, lines.replace("me.wait();", ";"), driver) for lines in waits]


@cache
def needs(*options):
    if not kernel_drivers.can_build(*options):
        pytest.skip(f"the compiler or the processor does not support {' '.join(options)}")


def check(driver, size, *options):
    """A driver must end without a report, and print one digest for each case."""
    needs(*options)
    done = run(build(driver, *options), size)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    digests = kernel_drivers.digests_of(done.stdout)
    assert digests
    assert not {case: found for case, found in digests.items() if len(found) > 1}


def by_default(*quick, among=DRIVERS):
    """All kernels, of which only the quick ones are tried by default."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n not in quick)) for n in among])


@by_default("paged_decode")
def test_the_sanitizers_report_nothing_and_no_result_depends_on_the_number_of_threads(name):
    check(DRIVERS[name], "short", *SANITIZED)


@by_default("program")  # calls in a row
def test_no_team_has_a_data_race(name):
    check(DRIVERS[name], "short", *THREADED, *ONE_TARGET)


# The kernels have instructions of their own, which are not instrumented. test_instruction_counts.py runs the same programs.
@by_default("dense_linear", among=[name for name, driver in DRIVERS.items() if driver.counted_rows])
def test_no_kernel_as_it_is_used_touches_the_page_behind_its_memory(name):
    check(DRIVERS[name], "short", *GUARDED, *ONE_TARGET)


@pytest.mark.long
@pytest.mark.parametrize("target", ["-march=native", *ONE_TARGET])
@pytest.mark.parametrize("name", MORE_DRIVERS)
def test_the_sanitizers_report_nothing_for_any_size_dtype_and_target(name, target):
    check(MORE_DRIVERS[name], "full", *SANITIZED, target)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_DRIVERS)
def test_no_kernel_of_any_size_and_dtype_touches_the_page_behind_its_memory(name):
    check(MORE_DRIVERS[name], "full", *GUARDED)


def injected(fault, folder):
    """A copy of the package's sources with the fault."""
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".cpp", ".h"):
            copy = folder / path.relative_to(PACKAGE)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    text = (folder / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.text) == 1, f"{fault.text!r} occurs {text.count(fault.text)} times in {fault.file}"
    (folder / fault.file).write_text(text.replace(fault.text, fault.replacement), encoding="utf-8")
    return folder


def marked(faults):
    return [pytest.param(fault, id=fault.file, marks=[pytest.mark.long] * (fault is not faults[0])) for fault in faults]


@pytest.mark.parametrize("fault", marked(FAULTS))
def test_an_injected_read_out_of_range_is_reported(fault, tmp_path):
    needs(*SANITIZED)
    done = run(build(DRIVERS[fault.driver], *SANITIZED, package=injected(fault, tmp_path)), "short")
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr or "runtime error:" in done.stderr, done.stderr


@pytest.mark.parametrize("fault", marked(RACES))
def test_a_wait_that_is_taken_out_is_reported(fault, tmp_path):
    needs(*THREADED, *ONE_TARGET)
    done = run(build(DRIVERS[fault.driver], *THREADED, *ONE_TARGET, package=injected(fault, tmp_path)), "short")
    assert done.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in done.stderr, done.stderr


def test_an_injected_read_of_what_is_mapped_meets_the_guard_page(tmp_path):
    needs(*GUARDED, *ONE_TARGET)
    done = run(build(DRIVERS["exchange"], *GUARDED, *ONE_TARGET, package=injected(FAULTS[0], tmp_path)), "short")
    assert done.returncode == -signal.SIGSEGV


def test_every_source_of_a_kernel_has_an_injected_fault_and_a_driver():
    sources = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.suffix in (".cpp", ".h")}
    assert {fault.file for fault in FAULTS} == sources
    driven = {driver.source for driver in DRIVERS.values()} | {"fast/cpu/program.cpp"}  # which every driver includes
    assert driven >= {source for source in sources if source.endswith(".cpp")}


def test_digests_that_differ_between_numbers_of_threads_are_found():
    assert kernel_drivers.digests_of("a | 1 | 00\na | 2 | 01\nb | 1 | 00\nsomething else\n") == {"a": {"00", "01"}, "b": {"00"}}
