"""What is measured in tests, made small: their figures are read by nobody."""

import pytest

from tests.helpers.prepared import prepare

prepare()

from nanoinfer_lab.bench import roofline  # noqa: E402


@pytest.fixture(autouse=True)
def small_roofline(monkeypatch):
    monkeypatch.setitem(roofline.READ_BYTES, "cpu", 2**24)
    monkeypatch.setitem(roofline.GEMM_SIZE, "cpu", 256)
    monkeypatch.setitem(roofline.STEPS, "cpu", ((1, 127), (1, 16), (4, 16), (8, 16), (4, 100)))
