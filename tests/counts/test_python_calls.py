"""The Python calls of decode steps and requests are those of the record, and a call more would be seen."""

import json
from pathlib import Path

import pytest

from tests.counts import python_calls
from tests.counts.python_calls import complaints
from tests.helpers import forked

ROOT = Path(__file__).parents[2]
RECORD = json.loads(python_calls.RECORD.read_text(encoding="utf-8"))

# The second count is that of a scheduler which calls 25 functions more, about 5% of a step.
SCRIPT = """
import json, sys
sys.path.insert(0, ROOT)
from tests.counts import python_calls
from nanoinfer import LLM
from nanoinfer.scheduling.scheduler import Scheduler

has_server = python_calls.find_spec("fastapi") is not None
counted = python_calls.totals(python_calls.count_all(has_server))
schedule = Scheduler.schedule

def slower(self):
    for _ in range(24):
        len(())
    return schedule(self)

Scheduler.schedule = slower
llm = LLM("tiny-qwen3", **python_calls.settings())
print(json.dumps([counted, python_calls.count_step(llm, "A").total()]))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Numbers of calls by environment and name, and those of the slower scheduler's step. In a process without shape checks."""
    path = tmp_path_factory.mktemp("counts") / "script.py"
    path.write_text(f"ROOT = {str(ROOT)!r}\n{SCRIPT}", encoding="utf-8")
    ended = forked.run_script(path, cwd=path.parent)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1], ids=["own", "with the libraries of HTTP"])
def test_no_count_of_calls_has_changed_without_its_record(counted, place):
    environments = list(counted[0].items())
    if place == len(environments):
        pytest.skip('fastapi is not installed; pip install -e ".[test]"')
    changed, unknown = complaints(dict([environments[place]]), RECORD)
    assert not changed, "\n".join(changed)
    if unknown:
        pytest.skip(unknown[0])


@pytest.mark.slow
def test_25_calls_more_in_each_step_are_seen(counted):
    [(where, counts), *_] = counted[0].items()
    assert counted[1] == counts["LLM A step"] + 25
    changed, _ = complaints({where: {"LLM A step": counted[1]}}, {where: counts})
    assert changed[0].startswith(f"LLM A step was {counts['LLM A step']:,} and is {counted[1]:,}. If there is a reason")
    assert complaints({"elsewhere": {"LLM A step": counted[1]}}, {where: counts})[0] == []  # it has no record


def test_a_call_of_python_and_one_of_c_count_once_each_and_calls_outside_do_not():
    def inner():
        return len("abc")

    def outer():
        return inner() + inner() + max(1, 2)

    calls = python_calls.Calls()
    assert calls.of(outer)() == 8
    inner()
    python, c = (sorted(num for code, num in calls.items() if isinstance(code, str) == is_c) for is_c in (False, True))
    assert (python, c) == ([1, 2], [1, 2])  # outer, inner; max, len
    assert calls.own().total() == 0


def test_the_environment_in_which_the_counts_are_compared_has_a_record():
    """CI runs Python 3.11 on Linux with the torch of constraints.txt."""
    [torch] = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    where = f"Python 3.11, torch {torch.removeprefix('torch==').rpartition('.')[0]}, Linux x86_64, with kernels"
    assert where in RECORD, f"to add it: {python_calls.RENEW}"
