"""The plans of the random loads are those that plans.txt has, on every machine."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from nanoinfer.scheduling.block_manager import BlockManager
from tests.golden import __main__ as command
from tests.golden import records
from tests.golden.loads import KINDS, NAMES, make_load
from tests.golden.plans import record_of

HINT = "python -m tests.golden compare --only plans; a commit that changes a plan says why (docs/contributing.md)"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_each_step_of_a_fifth_of_the_loads_plans_what_it_did_before(kind):
    names = [name for name in NAMES[::5] if name.startswith(f"{kind}/")]
    assert len(names) >= 20
    assert records.different(names) == [], HINT


@pytest.mark.long
def test_each_step_of_all_loads_plans_what_it_did_before_and_reads_what_it_should():
    assert len(NAMES) == 2000
    assert records.different(check=True) == [], HINT


def test_the_file_has_every_load_once_and_no_two_have_the_same_plans():
    assert [*records.written()] == NAMES
    assert len(set(records.written().values())) == len(NAMES)


def test_requests_of_every_kind_are_preempted_forked_aborted_and_evict_and_hit_what_others_cached():
    text = records.FILE.read_text(encoding="utf-8")
    for kind in KINDS:
        [summary] = re.findall(rf"^\[{kind}\].*$", text, re.MULTILINE)
        counts = {what: int(number) for number, what in re.findall(r"(\d+) ([a-z ]+)", summary)}
        assert all(counts[what] >= 25 for what in ("preempted", "hits", "evicted", "forked", "copied", "aborted")), summary


@pytest.mark.slow
def test_a_plan_depends_on_no_hash():
    names = ["states/3", "adapters/2", "store/1", "windows/5"]
    command_line = [sys.executable, command.__file__, "show", *names]
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = os.environ | {"PYTHONHASHSEED": other, "PYTHONPATH": str(command.ROOT)}
    shown = subprocess.run(command_line, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [line for name in names for line in record_of(name).lines]


def test_another_block_or_another_order_is_another_digest():
    load = make_load("fcfs/16")
    expected = record_of(load)
    assert expected.digest == records.written()[load.name]
    assert expected.counts["evicted"] > 10
    assert expected.counts["preempted"] > 0
    for change in {"evicts": "last"}, {"policy": "patient"}, {"chunk_size": load.chunk_size + 1}, {"prefix_caching": False}:
        assert record_of(replace(load, **change)).digest != expected.digest, change


def test_a_step_that_reads_another_block_is_found(monkeypatch):
    record_of("forks/0", check=True)
    allocate = BlockManager.allocate
    monkeypatch.setattr(BlockManager, "allocate", lambda *arguments: allocate(*arguments)[:0])  # shared blocks are not copied
    with pytest.raises(AssertionError, match="other keys and values"):
        record_of("forks/0", check=True)
