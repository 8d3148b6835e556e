"""The golden plans find changes of one line that leave every text right: that is what they are for.

In: INJECTED, lines of the package and what replaces them. A line that the package no longer has fails, and must be replaced by
another one that does the same. `--check` shows that a change is of plans only: every step still reads what it should.
"""

import os
import subprocess
import sys

import pytest

from tests.golden import __main__ as command
from tests.helpers.injected import changes_of, check_places, copy_package, injected

# file -> what changes there, the line or a part of it, and what replaces it
INJECTED = {
    "scheduling/scheduler.py": [
        ("the oldest is preempted", "return running[-1]", "return running[0]"),
        ("less is kept free for a running sequence", "seq.num_tokens + self.block_manager.block_size,", "seq.num_tokens,"),
        ("chunks are cut at no multiples", "grid - start % grid)", "grid)"),
        ("a chunk that waits is passed", "selection.budget = 0  # it waits", "pass  # it waits"),
        ("a preempted sequence waits at the end", "self.waiting.appendleft(seq)", "self.waiting.append(seq)"),
        ("forks are the youngest", "index = self.running.index(parent) + 1", "index = len(self.running)"),
        ("forks without room wait at the end", "self.waiting.extendleft(reversed(too_many))", "self.waiting.extend(too_many)"),
        ("a failed step turns the order round", "for seq in self.running[::-1]:", "for seq in self.running[:]:"),
    ],
    "scheduling/block_manager.py": [
        ("the newest block is evicted", "return next(iter(candidates))", "return next(reversed(candidates))"),
        ("the first block is freed first", "drop(reversed(seq.block_table))", "drop(list(seq.block_table))"),
        ("beams need a block more", "return num_shared + num_forks", "return num_shared + 1 + num_forks"),
        ("a prefix in use counts as free", "sum(block in self.blocks.reusable for _, block in prefix)", "len(prefix)"),
        ("a sequence seems to hold a block less", "return len(seq.block_table)\n", "return max(len(seq.block_table) - 1, 0)\n"),
        ("a reset turns the order round", "in list(self.index.ids.values()):", "in list(self.index.ids.values())[::-1]:"),
    ],
    "scheduling/pool.py": [("empty blocks are a stack", "self.empty.popleft()", "self.empty.pop()")],
    "features/hybrid/prefix_index.py": [("a hit is a block shorter", "range(len(keys), 0, -1)", "range(len(keys) - 1, 0, -1)")],
    "features/hybrid/block_manager.py": [
        ("the first blocks are freed first", "zip(*map(reversed, tables), strict=True)", "zip(*tables, strict=True)")
    ],
    "features/hybrid/state_slots.py": [
        ("the newest checkpoint is taken", "next(iter(self.pool.reusable))", "next(reversed(self.pool.reusable))")
    ],
    "features/disk_cache/stored_blocks.py": [
        ("the store loses the start of a prompt", "for key, _ in reversed(prefix)", "for key, _ in prefix")
    ],
    "scheduling/policies.py": [
        (
            "the oldest of equals is preempted",
            "max(reversed(running), key=lambda seq: seq.priority)",
            "max(running, key=lambda seq: seq.priority)",
        )
    ],
}
CHANGES = changes_of(INJECTED)


def test_each_injected_change_is_of_one_place():
    check_places(CHANGES)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder with a copy of the package."""
    folder = tmp_path_factory.mktemp("tree")
    copy_package(folder)
    assert check_plans(folder).returncode == 0  # as it is, it has the same plans
    return folder


def check_plans(tree, *, every=7):
    """Compare each such load's plans, with the package of a tree. Returns the finished process."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = [sys.executable, command.__file__, "plans", "--every", str(every), "--check"]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize(("file", "what", "old", "new"), CHANGES, ids=[what for _, what, _, _ in CHANGES])
def test_an_injected_change_is_found_in_plans_although_each_step_reads_what_it_should(tree, file, what, old, new):
    with injected(tree, file, old, new):
        done = check_plans(tree)
        if done.returncode == 0:  # only few loads have what this change is about
            done = check_plans(tree, every=1)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), (what, done.stderr)
    assert "other plans than those of plans.txt" in done.stdout
