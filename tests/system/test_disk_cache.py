"""A folder of kept files: whose it must be, and how long its lock is waited for."""

import os
import sys
from types import SimpleNamespace

import pytest

from nanoinfer.errors import InvalidValueError
from nanoinfer.system import disk_cache
from nanoinfer.system.disk_cache import DiskCache, private_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs the modes and locks of POSIX")


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    folder = private_folder(tmp_path / "mine", "the folder")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(InvalidValueError, match=f"the folder must be .* of user {owner} with mode 700; name a new folder"):
        private_folder(folder, "the folder")


def test_a_lock_that_is_not_given_back_is_waited_for_once(tmp_path, monkeypatch):
    clock = SimpleNamespace(
        now=0.0, monotonic=lambda: clock.now, sleep=lambda seconds: setattr(clock, "now", clock.now + seconds)
    )
    monkeypatch.setattr(disk_cache, "time", clock)
    stuck, waiting = (DiskCache(tmp_path, 100, "*") for _ in range(2))

    def seconds_until_refused():
        start = clock.now
        with pytest.raises(TimeoutError, match=r"has locked the folder for 5 s"), waiting.locked():
            pass
        return clock.now - start

    for _ in range(2):
        with stuck.locked():
            assert seconds_until_refused() >= disk_cache.LOCK_SECONDS
            assert seconds_until_refused() < 0.1
        with waiting.locked():
            pass
    stuck.close()
    waiting.close()
