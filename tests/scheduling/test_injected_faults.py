"""The tests of this folder find faults of one line in the modules of the block manager: that is what they are for.

In: FAULTS, as INJECTED of golden/test_injected_changes.py, which has changes that leave every text right. These here lose
blocks, give one to two sequences, or let a sequence read what it should not.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.injected import changes_of, check_places, copy_package, injected

ROOT = Path(__file__).parents[2]
FILES = [
    *(f"tests/scheduling/test_{name}.py" for name in ("block_manager", "prefix_index", "scheduler")),
    *(f"tests/features/hybrid/test_{name}.py" for name in ("kv_groups", "state_slots")),
    "tests/features/disk_cache/test_stored_blocks.py",
]
# file -> what is wrong then, the line or a part of it, and what replaces it
FAULTS = {
    "scheduling/pool.py": [
        ("a block is freed although another has it", "ref_counts[dropped] == 0:", "ref_counts[dropped] <= 1:"),
        ("a reference is kept", "ref_counts[held] += 1", "ref_counts[held] += 2"),
        ("a taken block has no reference", "self.ref_counts[taken] = 1", "self.ref_counts[taken] = 0"),
        ("a held block can be evicted", "reusable.pop(held, None)", "pass"),
        ("a forgotten block is free twice", "            del self.reusable[forgotten]\n", ""),
        ("a forgotten block is lost", "self.empty.append(forgotten)", "pass"),
        ("a cached block is taken as an empty one", "if self.contents[dropped]:", "if False:"),
    ],
    "scheduling/block_manager.py": [
        ("a copied block keeps its reference", "self.blocks.drop([shared])", "pass"),
        ("a shared block is written", "self.blocks.ref_counts[table[index]] > 1:", "self.blocks.ref_counts[table[index]] > 2:"),
        ("a prefix is not held", "hold(seq.block_table)", "hold([])"),
        ("a fork holds nothing", "hold(child.block_table)", "hold([])"),
        ("an evicted block is still found", "self.index.remove(block)", "self.blocks.forget(block)"),
        ("what failed stays in the cache", "self.evict(self.index.ids[key])", "pass"),
        ("a freed sequence keeps its table", "seq.block_table.clear()", "pass"),
        ("a prefix needs no free block", "len(prefix) + num_revived", "len(prefix)"),
        ("a copy needs no free block", " + num_copied <= self.num_free_blocks", " <= self.num_free_blocks"),
        ("a decode writes a shared block", "[table[start // block_size]] == 1", "[table[start // block_size]] >= 1"),
        ("a full block has a slot", "start < len(table) * block_size and", "start <= len(table) * block_size and"),
        ("two tokens are one", "seq.num_tokens != start + 1", "seq.num_tokens < start + 1"),
        ("more blocks are taken than are free", "found.count(False) <= self.num_free_blocks", "True"),
    ],
    "scheduling/prefix_index.py": [
        ("an equal block replaces the other", ".setdefault(key, block) == block", ".update({key: block}) is None"),
        ("a salt separates nobody", '(cache_salt or "").encode', '"".encode'),
        ("a key outlives its block", "self.keys.pop(", "self.keys.get("),
    ],
    "features/hybrid/prefix_index.py": [
        ("an equal block replaces the other of its group", ".setdefault(key, block) == block", ".update({key: block}) is None"),
        ("a salt separates nobody with groups", '(cache_salt or "").encode', '"".encode'),
        ("a key outlives its blocks", "del self.keys[pool.contents[removed]]", "pass"),
        ("a window reaches a token less", "max(position - window + 1, 0)", "max(position - window + 2, 0)"),
        ("what is in memory is read from the store", "IN_STORE if i < 0 and is_stored", "IN_STORE if is_stored"),
    ],
    "features/hybrid/block_manager.py": [
        ("a shared block of a group is written", "ref_counts[table[index]] > 1:", "ref_counts[table[index]] > 2:"),
        ("a prefix of groups is not held", "self.blocks.hold(self._blocks_of(prefix))", "pass"),
        ("a fork with groups holds nothing", "self.blocks.hold(held)", "pass"),
        ("what a window leaves is freed twice", "table[index:first] = [NO_BLOCK] * (first - index)", "pass"),
        ("what a window leaves is never free", "self.blocks.drop(released)", "pass"),
        ("what failed stays in a group's cache", "self.evict(group.ids[key])", "pass"),
        ("a freed sequence keeps its tables", "table.clear()", "pass"),
        ("a reset turns the order of a group round", "in list(group.ids.values()):", "in list(group.ids.values())[::-1]:"),
        ("a prefix of groups needs no free block", "len(blocks), 0) + num_revived", "len(blocks), 0)"),
        ("a copy in a group needs no free block", "num_missing += ref_counts[block] > 1", "num_missing += 0"),
    ],
    "features/hybrid/state_slots.py": [
        ("the slot of the step before stays held", "self.pool.drop([slot for slot in slots if", "([slot for slot in slots if"),
        ("a checkpoint stays while it is written", "self.forget(self._index.keys[self.pool.contents[slot]])", "pass"),
        ("a shared state is written", "slot == NO_SLOT or self.pool.ref_counts[slot] > 1 or (", "slot == NO_SLOT or ("),
    ],
    "features/disk_cache/stored_blocks.py": [
        ("a state is read from another group", "self.store.find((key, group))", "self.store.find((key, 0))"),
        ("what is hit is not held while others are read", "groups[group].pool.hold([block])", "pass"),
        ("what was read stays held", "groups[group].pool.drop([block])", "pass"),
        ("what failed stays in the store", "self.store.discard((key, group))", "pass"),
        (
            "what is evicted is in no tier",
            "_keep(self.store, self.index, self.index.keys[self.blocks.contents[evicted]])",
            "pass",
        ),
        ("a block is kept under another group", "keep((key, number), group.ids", "keep((key, 1 - number), group.ids"),
    ],
}
CHANGES = changes_of(FAULTS)


def test_each_injected_fault_is_of_one_place_and_there_are_twenty():
    check_places(CHANGES)
    assert len(CHANGES) >= 20


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder with a copy of the package and of the tests in FILES."""
    folder = tmp_path_factory.mktemp("tree")
    copy_package(folder)
    shutil.copytree(ROOT / "tests/helpers", folder / "tests/helpers", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(tree, file=""):
    """Run the tests with the package of a tree, a file's own first, up to one that fails. Returns the finished process."""
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-p", "no:cacheprovider"]
    files = sorted(FILES, key=lambda name: Path(file).parent.name not in name)
    return subprocess.run([*arguments, *files], env=environment, cwd=tree, capture_output=True, text=True)


@pytest.mark.long
def test_a_copy_of_the_package_passes(tree):
    done = run_tests(tree)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("file", "what", "old", "new"), CHANGES, ids=[what for _, what, _, _ in CHANGES])
def test_an_injected_fault_is_found(tree, file, what, old, new):
    with injected(tree, file, old, new):
        done = run_tests(tree, file)
    assert done.returncode == 1, f"{what}: {done.stdout}"
