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
        ("short prompts start first", "        return waiting\n",
            "        return sorted(waiting, key=lambda seq: seq.num_tokens)\n"),
        ("less is kept free for a running sequence", "seq.num_tokens + self.block_manager.block_size,", "seq.num_tokens,"),
        ("chunks are cut at no multiples", "grid - start % grid)", "grid)"),
        ("a chunk that waits is passed", "selection.budget = 0  # it waits", "pass  # it waits"),
        ("a preempted sequence waits at the end", "self.waiting.appendleft(seq)", "self.waiting.append(seq)"),
        ("forks are the youngest", "index = self.running.index(parent) + 1", "index = len(self.running)"),
        ("no block is kept free for forks", "sum([self.num_reserved_blocks(seq) + len(seq.forks) for",
            "sum([self.num_reserved_blocks(seq) for"),
        ("none starts beside others", "if self.waiting and not selection.preempted:",
            "if self.waiting and not selection.preempted and not selection.scheduled:"),
        ("decode steps take of the budget", "selection.budget -= num_new_tokens if num_new_tokens > 1 else 0",
            "selection.budget -= num_new_tokens"),
        ("forks without room wait at the end", "self.waiting.extendleft(reversed(too_many))", "self.waiting.extend(too_many)"),
        ("a failed step turns the order round", "for seq in self.running[::-1]:", "for seq in self.running[:]:"),
        ("a fork less starts", "num_startable = self.config.max_num_seqs - len(self.running)",
            "num_startable = max(self.config.max_num_seqs - len(self.running) - 1, 0)"),
        ("what starts in a step keeps nothing free",
            "selection.num_kept_free += self.num_reserved_blocks(seq) + len(seq.forks)", "pass"),
    ],
    "scheduling/block_manager.py": [
        ("the newest block is evicted", "return next(iter(candidates))", "return next(reversed(candidates))"),
        ("the first block is freed first", "drop(reversed(seq.block_table))", "drop(list(seq.block_table))"),
        ("beams need a block more", "return num_shared + num_forks", "return num_shared + 1 + num_forks"),
        ("a prefix in use counts as free", "sum(block in self.blocks.reusable for _, block in prefix)", "len(prefix)"),
        ("at most one block is kept free", "num_needed + num_kept_free <= self.num_free_blocks",
            "num_needed + min(num_kept_free, 1) <= self.num_free_blocks"),
        ("a block is cached a token later", "num_full = num_tokens // self.block_size if",
            "num_full = (num_tokens - 1) // self.block_size if"),
        ("a sequence seems to hold a block less", "return len(seq.block_table)\n", "return max(len(seq.block_table) - 1, 0)\n"),
        ("a reset turns the order round", "in list(self.index.ids.values()):", "in list(self.index.ids.values())[::-1]:"),
    ],
    "scheduling/pool.py": [
        ("the last block is taken first", "deque(range(size))", "deque(reversed(range(size)))"),
        ("empty blocks are a stack", "self.empty.popleft()", "self.empty.pop()"),
        ("a forgotten block is taken next", "self.empty.append(forgotten)", "self.empty.appendleft(forgotten)"),
    ],
    "scheduling/prefix_index.py": [
        ("a lookup ends a block earlier", "max(len(token_ids) - 1, 0) // self.block_size",
            "max(len(token_ids) - 1 - self.block_size, 0) // self.block_size"),
    ],
    "features/hybrid/prefix_index.py": [
        ("a hit is a block shorter", "range(len(keys), 0, -1)", "range(len(keys) - 1, 0, -1)"),
    ],
    "features/hybrid/block_manager.py": [
        ("the first blocks are freed first", "zip(*map(reversed, tables), strict=True)", "zip(*tables, strict=True)"),
    ],
    "features/hybrid/state_slots.py": [
        ("the last free slot is for no checkpoint", "keeps and self.pool.num_free:", "keeps and self.pool.num_free > 1:"),
        ("the newest checkpoint is taken", "next(iter(self.pool.reusable))", "next(reversed(self.pool.reusable))"),
    ],
    "features/disk_cache/stored_blocks.py": [
        ("what was read is held the other way round", "sorted(held, reverse=True)", "sorted(held)"),
        ("the store loses the start of a prompt", "for key, _ in reversed(prefix)", "for key, _ in prefix"),
        ("a step reads more", "self.num_tokens_read += self.block_size if missing else 0",
            "self.num_tokens_read += 1 if missing else 0"),
    ],
    "scheduling/policies.py": [
        ("the oldest of equals is preempted", "max(reversed(running), key=lambda seq: seq.priority)",
            "max(running, key=lambda seq: seq.priority)"),
    ],
}  # fmt: skip
CHANGES = changes_of(INJECTED)


def test_each_injected_change_is_of_one_place_and_twenty_are_of_the_scheduler_and_the_block_manager():
    check_places(CHANGES)
    assert len(INJECTED["scheduling/scheduler.py"]) + len(INJECTED["scheduling/block_manager.py"]) >= 20


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder with a copy of the package."""
    folder = tmp_path_factory.mktemp("tree")
    copy_package(folder)
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
    assert (done.returncode, done.stderr) == (1, ""), what
    assert "other plans than those of plans.txt" in done.stdout
