"""The process for work that may never end: it does not start, or it is busy. What it does is tested where it is used."""

import time

import pytest

from nanoinfer.errors import NanoinferError, QueueFullError
from nanoinfer.system.helper_process import HelperProcess


def test_a_process_that_does_not_start_is_an_error_that_says_how_to_see_why():
    helper = HelperProcess("nanoinfer.no_such_module", "new grammars", max_wait=1.0)
    for _ in range(2):
        with pytest.raises(NanoinferError, match=r"for new grammars did not start; `.* -m nanoinfer.no_such_module` shows why"):
            helper.ask("{}")


def test_a_request_waits_for_others_no_longer_than_max_wait():
    helper = HelperProcess("nanoinfer.no_such_module", "new grammars", max_wait=0.05)
    with helper._lock:
        start = time.perf_counter()
        with pytest.raises(QueueFullError, match="too many new grammars wait already; try again later"):
            helper.ask("{}")
        assert time.perf_counter() - start >= 0.05
