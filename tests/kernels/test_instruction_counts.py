"""The instructions of the C++ kernels, which are counted by valgrind and compared with tests/counts/kernel_instructions.json.

Counts of one compiler are equal on every machine, where times are not. `python -m tests.kernel_drivers` renews the file.
"""

import pytest

from tests.helpers import recorded_counts
from tests.kernel_drivers import DRIVERS, count_instructions, why_not_counted

RENEWAL = "python -m tests.kernel_drivers"


@pytest.fixture(scope="module")
def comparable():
    if reason := why_not_counted():
        pytest.skip(reason)


# A driver is compiled and run for 2 s of CPU. By default, those that take most of a decode step are counted.
COUNTED = [name for name, driver in DRIVERS.items() if driver.counted_rows]
BY_DEFAULT = ("dense_linear",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.long]) for name in COUNTED]
)
def test_a_kernel_takes_the_instructions_that_are_recorded(name, comparable):
    counts = recorded_counts.read("kernel_instructions")[1]
    recorded = {key: count for key, count in counts.items() if key.startswith(f"{name}, ")}
    assert recorded
    assert not recorded_counts.complaints(recorded, count_instructions(name), RENEWAL)


def test_three_percent_more_and_ten_percent_less_are_found():
    def complaints(count):
        return recorded_counts.complaints({"kernel": 1000}, {"kernel": count}, RENEWAL)

    assert complaints(1030) == complaints(900) == []
    [message] = complaints(1031)
    assert message == f"kernel was 1,000 and is 1,031. If there is a reason, which the commit says: {RENEWAL}"
    [message] = complaints(899)
    assert message == f"kernel was 1,000 and is only 899, which a new record keeps: {RENEWAL}"
    assert recorded_counts.complaints({"gone": 1}, {"new": 1}, RENEWAL) == [
        f"gone is recorded and not counted: {RENEWAL}", f"new is not recorded: {RENEWAL}"
    ]  # fmt: skip
