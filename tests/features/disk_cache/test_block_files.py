"""Files of blocks: what comes back, what is not believed, what is removed, and who may read them."""

import fcntl
import logging
import os
import shutil
import time
from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.errors import InvalidValueError
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.features.disk_cache import block_files
from nanoinfer.features.disk_cache.block_files import HEADER_BYTES, BlockFiles
from nanoinfer.features.hybrid.cache import HybridCache, make_states
from nanoinfer.features.training.loaded_weights import LoadedWeights
from nanoinfer.system import disk_cache

NUM_BLOCKS, CONTENT_BYTES = 8, 2 * 2 * 4 * 2 * 8 * 4  # layers, keys and values, tokens, heads, head_dim, fp32
FILE_BYTES = HEADER_BYTES + CONTENT_BYTES


def new_cache(dtype=torch.float32, layout="HND"):
    sizes = {"num_layers": 2, "num_blocks": NUM_BLOCKS, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
    cache = KVCache(**sizes, dtype=dtype, layout=layout)
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        for pages in cache.layer(layer):
            pages.view(torch.uint8).copy_(torch.randint(0, 256, pages.view(torch.uint8).shape, generator=generator))
    return cache


class CacheRunner(ModelRunner):
    """A runner that has a cache and runs no model."""

    def __init__(self, cache):
        self.cache, self.weights = cache, LoadedWeights()


def new_files(folder, max_bytes=2**20, cache=None):
    return BlockFiles(CacheRunner(cache or new_cache()), str(folder), max_bytes, bytes(32), 100)


def entry(key, group=0):
    """An entry whose key is a number."""
    return key.to_bytes(32, "big"), group


def keep(folder, *keys, **more):
    """Keep block key % NUM_BLOCKS under each key, and return the files' paths."""
    files = new_files(folder, **more)
    for key in keys:
        files.keep(entry(key), key % NUM_BLOCKS, wait=True)
    files.close()
    return [path_of(folder, key) for key in keys]


def path_of(folder, key, group=0):
    return folder / f"{key:064x}{group:02x}.kv"


def names(folder):
    return {path.name for path in folder.iterdir()} - {"lock"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_another_store_writes_the_same_bytes_into_another_block(folder, dtype, layout):
    cache = new_cache(dtype, layout)
    keep(folder, 2**255 + 3, 5, cache=cache)
    other = new_cache(dtype, layout)
    for layer in range(2):
        for pages in other.layer(layer):
            pages.zero_()
    files = new_files(folder, cache=other)
    files.fill(0, 1, files.find(entry(2**255 + 3)))
    files.fill(0, 0, files.find(entry(5)))
    assert files.find(entry(6)) is None
    files.close()
    for layer in range(2):
        for pages, expected in zip(other.layer(layer), cache.layer(layer), strict=True):
            assert torch.equal(pages[:2].view(torch.uint8), expected[torch.tensor([5, 3])].view(torch.uint8))
            assert not pages[2:].view(torch.uint8).any()


DAMAGE = {
    "empty": lambda data: b"",
    "cut in the header": lambda data: data[: HEADER_BYTES - 1],
    "cut behind the header": lambda data: data[:HEADER_BYTES],
    "cut by a byte": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "zeros": lambda data: bytes(len(data)),
    "the end lost": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
}
CHANGED = 0, 7, 8, 39, 40, 41, 72, 73, FILE_BYTES // 2, FILE_BYTES - 1


def test_a_corrupted_file_is_removed_and_not_believed(folder, caplog):
    damages = [*DAMAGE.values()]
    damages += [lambda data, i=i: data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in CHANGED]
    *paths, whole = keep(folder, *range(len(damages) + 1))
    for damage, path in zip(damages, paths, strict=True):
        path.write_bytes(damage(path.read_bytes()))
    files = new_files(folder)
    assert [key for key in range(len(damages) + 1) if files.find(entry(key)) is not None] == [len(damages)]
    files.close()
    assert names(folder) == {whole.name}
    told = [record.message for record in caplog.records if record.name == block_files.__name__]
    assert [f"{path} is corrupted" in message for path, message in zip(paths, told, strict=True)] == [True] * len(damages)


def test_a_file_under_the_name_of_another_and_a_fifo_are_not_believed(folder):
    path, second = keep(folder, 3, 5)
    shutil.copy(path, path_of(folder, 4))
    second.unlink()
    os.mkfifo(second)
    files = new_files(folder)
    assert [files.find(entry(key)) is None for key in (3, 4, 5)] == [False, True, True]
    files.keep(entry(5), 5, wait=True)
    files.close()
    assert second.is_file()


def test_files_that_vanish_are_not_found_and_can_be_kept_again(folder):
    [path] = keep(folder, 3)
    files = new_files(folder)
    content = files.find(entry(3))
    os.truncate(path, 0)  # a mapped file could not be read now
    path.unlink()
    assert files.find(entry(3)) is None
    assert content.sum() > 0  # what was found stays readable
    files.touch([entry(3)])
    files.discard(entry(3))
    files.keep(entry(3), 3, wait=True)
    files.close()
    assert names(folder) == {path.name}


def test_the_least_recently_used_files_make_room_and_the_limit_holds_at_any_time(folder, monkeypatch):
    max_bytes = 4 * FILE_BYTES
    sizes = []
    stamp = disk_cache.stamp

    def spying(path):
        sizes.append(sum(path.stat().st_size for path in folder.glob("*.kv")))
        stamp(path)

    keep(folder, 1, 2, 3, max_bytes=max_bytes)
    files = new_files(folder, max_bytes)
    files.touch([entry(2), entry(1)])
    monkeypatch.setattr(disk_cache, "stamp", spying)  # called when a file has been written, before it has its name
    for key in (4, 5, 6):
        files.keep(entry(key), 0, wait=True)
    files.close()
    assert len(sizes) == 3
    assert max(sizes) + FILE_BYTES <= max_bytes
    assert {path_of(folder, key).name for key in (5, 6)} <= names(folder)
    assert path_of(folder, 3).name not in names(folder)  # it was used longest ago
    assert len(names(folder)) <= 4


def test_two_stores_share_a_folder_and_its_limit(folder):
    stores = [new_files(folder, 5 * FILE_BYTES) for _ in range(2)]
    for key in range(40):
        stores[key % 2].keep(entry(key), 0, wait=True)
        assert len(names(folder) - {"writing"}) <= 5
    stores[0].close()
    assert 0 < len(names(folder)) <= 5
    stores[1].keep(entry(40), 0, wait=True)
    stores[1].close()
    other = new_files(folder, 5 * FILE_BYTES)
    assert other.find(entry(40)) is not None
    other.close()


def test_a_process_that_keeps_the_lock_delays_close_once(folder, monkeypatch):
    """It may be stopped, or be on another machine. On this clock only waiting for the lock takes time."""
    waited = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(waited), sleep=waited.append, time_ns=time.time_ns)
    monkeypatch.setattr(block_files, "WAITING_BYTES", 2 * FILE_BYTES)
    keep(folder, 100)
    monkeypatch.setattr(disk_cache, "time", clock)
    files = new_files(folder)
    with (folder / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for key in range(9):
            files.keep(entry(key), 0, wait=True)
        files.close()
    assert disk_cache.LOCK_SECONDS <= sum(waited) < 2 * disk_cache.LOCK_SECONDS


def test_what_a_killed_process_left_is_removed_and_foreign_files_are_left_alone(folder):
    keep(folder, 3)
    (folder / "writing").write_bytes(b"half")
    (folder / "notes.txt").write_bytes(bytes(10 * FILE_BYTES))
    (folder / "lock").write_text("not a number")
    keep(folder, 4, max_bytes=2 * FILE_BYTES)
    assert names(folder) == {path_of(folder, 3).name, path_of(folder, 4).name, "notes.txt"}
    assert int((folder / "lock").read_text()) == 2 * FILE_BYTES


def test_only_the_user_can_read_the_files_and_other_folders_are_refused(folder):
    before = os.umask(0)
    try:
        [path] = keep(folder, 3)
    finally:
        os.umask(before)
    assert [one.stat().st_mode & 0o777 for one in (folder, path, folder / "lock")] == [0o700, 0o600, 0o600]
    folder.chmod(0o750)
    for place, max_bytes, words in (
        (folder, 2**20, r"only you can read and write, .* with mode 750; name a new folder, or use chmod"),
        (path / "below", 2**20, "prefix_cache_dir must be a folder that can be made"),
        (folder, FILE_BYTES - 1, f"prefix_cache_size must be at least {FILE_BYTES} bytes"),
    ):
        with pytest.raises(InvalidValueError, match=words):
            new_files(place, max_bytes)


def test_a_state_and_blocks_of_two_groups_with_one_key_are_three_entries(folder):
    def new(seed):
        sizes = {"num_layers": 1, "num_blocks": NUM_BLOCKS, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
        states = make_states(2, 3, ((2, 5), (4,)))
        cache = HybridCache(num_groups=2, states=states, **sizes)
        generator = torch.Generator().manual_seed(seed)
        for tensor in cache.tensors():
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
        return cache

    cache, other = new(0), new(1)
    files = new_files(folder, cache=cache)
    for group, block in enumerate((5, 6, 2)):
        files.keep(entry(3, group), block, wait=True)
    files.close()
    assert names(folder) == {path_of(folder, 3, group).name for group in range(3)}
    files = new_files(folder, cache=other)
    assert [files.has(entry(*one)) for one in ((3, 0), (3, 1), (3, 2), (4, 0))] == [True] * 3 + [False]
    assert files.max_entries(0) == files.max_entries(1) != files.max_entries(2)
    for group, block in enumerate((0, 1, 0)):
        files.fill(group, block, files.find(entry(3, group)))
    files.close()
    assert all(torch.equal(new[:2], old[5:7]) for new, old in zip(other.pages, cache.pages, strict=True))
    assert all(torch.equal(new[0], old[2]) for new, old in zip(chain(*other.states), chain(*cache.states), strict=True))
    assert not torch.equal(other.states[0][0][1], cache.states[0][0][1])  # the other slots stay


def test_blocks_are_left_out_rather_than_waited_for_while_the_disk_is_slow(folder, monkeypatch):
    monkeypatch.setattr(block_files, "WAITING_BYTES", 3 * FILE_BYTES)
    keep(folder, 100)
    with (folder / "lock").open() as other:  # another process writes, for as long as this takes
        fcntl.flock(other, fcntl.LOCK_EX)
        files = new_files(folder)
        for key in range(50):
            files.keep(entry(key), 0)
        assert files.find(entry(0)) is not None  # what waits is found, too
        assert not names(folder) & {path_of(folder, 0).name}
        files.discard(entry(2))
        fcntl.flock(other, fcntl.LOCK_UN)
    files.close()
    assert {path_of(folder, key).name for key in (0, 1)} <= names(folder)
    assert path_of(folder, 2).name not in names(folder)
    assert len(names(folder)) <= 1 + 3 + 1  # three waited, and one more may have been on its way


def test_a_folder_that_cannot_be_written_is_reported_once_and_stops_nothing(folder, caplog):
    files = new_files(folder)
    files.keep(entry(1), 0, wait=True)
    while files.counts["prefix_cache_written_bytes"] == 0:
        pass
    shutil.rmtree(folder)
    for key in range(2, 9):
        files.keep(entry(key), 0, wait=True)
    assert files.find(entry(1)) is None
    files.close()
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "blocks cannot be kept in" in record.message


def test_a_forked_process_keeps_nothing(folder, monkeypatch):
    files = new_files(folder)
    assert files.is_open
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not files.is_open
    files.close()
    monkeypatch.undo()
    assert files.is_open
    files.close()
    assert not files.is_open
