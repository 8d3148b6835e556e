"""What was measured is kept for the machine. It is measured again on another machine, and when the file is damaged."""

import json

import pytest
import torch

from nanoinfer.devices.machine_checks import cache_path, verdict, verdicts


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "cache"))


def never():
    raise AssertionError("it was measured before")


def test_a_check_is_made_once():
    assert verdict("a", lambda: "yes") == "yes"
    assert verdict("a", never) == "yes"
    assert verdict("b", lambda: "no") == "no"
    assert verdicts() == {"a": "yes", "b": "no"}


@pytest.mark.parametrize(
    "name", ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_DEFAULT_FPMATH_MODE", "MKL_CBWR", "OPENBLAS_CORETYPE", "CXX"]
)
def test_another_setting_of_the_libraries_is_another_machine(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    verdict("a", lambda: "yes")
    monkeypatch.setenv(name, "AVX2")
    assert verdict("a", lambda: "no") == "no"
    monkeypatch.delenv(name)
    assert verdict("a", never) == "yes"


def test_so_is_another_number_of_threads():
    verdict("a", lambda: "yes")
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert verdict("a", lambda: "no") == "no"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"machine": 3}', "null"])
def test_a_damaged_file_is_written_anew(text):
    cache_path().parent.mkdir()
    cache_path().write_text(text)
    assert verdict("a", lambda: "yes") == "yes"
    assert verdict("a", never) == "yes"
    assert "yes" in json.dumps(json.loads(cache_path().read_text()))


def test_where_nothing_can_be_written_it_is_measured_every_time(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "file" / "below"))
    assert verdict("a", lambda: "yes") == "yes"
    assert verdict("a", lambda: "again") == "again"


def test_a_check_that_fails_leaves_nothing():
    def broken():
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        verdict("a", broken)
    assert verdicts() == {}
    assert not cache_path().exists()


def test_without_a_home_of_its_own_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.delenv("NANOINFER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path() == tmp_path / "nanoinfer" / "machine_checks.json"
