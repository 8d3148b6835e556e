"""What several commands' tests need."""

import signal

import pytest


@pytest.fixture
def python_handles_ctrl_c():
    """A job in the background begins with Ctrl-C ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
