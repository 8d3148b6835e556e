"""What was measured is kept for the machine. It is measured again on another machine, and when the file is damaged."""

import json
import os

import pytest
import torch

from nanoinfer.devices.machine_checks import cache_path, machine_key, verdict, verdicts


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


def another_process_writes(checks):
    """Replace the file, as a second process does: a temporary file, renamed."""
    path = cache_path()
    path.parent.mkdir(exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[machine_key()] = kept.get(machine_key(), {}) | checks
    temporary = path.with_name("another")
    temporary.write_text(json.dumps(kept))
    os.replace(temporary, path)


def test_the_file_is_parsed_once_and_again_only_when_it_was_replaced(monkeypatch):
    verdict("a", lambda: "yes")
    verdict("b", lambda: "no")
    verdicts()
    parsed, load = [], json.load
    monkeypatch.setattr(json, "load", lambda file: parsed.append(1) or load(file))
    for _ in range(5):
        assert verdict("a", never) == "yes"
        assert verdict("b", never) == "no"
    assert len(parsed) == 0
    another_process_writes({"c": "new"})
    for _ in range(5):
        assert verdict("c", never) == "new"
    assert len(parsed) == 1


def test_two_processes_that_write_by_turns_keep_each_others_verdicts():
    verdict("a", lambda: "ours")
    another_process_writes({"b": "theirs"})
    verdict("c", lambda: "ours")
    another_process_writes({"d": "theirs"})
    assert verdicts() == {"a": "ours", "b": "theirs", "c": "ours", "d": "theirs"}
    assert verdicts() == json.loads(cache_path().read_text())[machine_key()]


def test_a_verdict_written_while_ours_was_measured_is_kept():
    assert verdict("a", lambda: another_process_writes({"b": "theirs"}) or "ours") == "ours"
    assert verdicts() == {"a": "ours", "b": "theirs"}


def test_a_deleted_file_is_forgotten():
    verdict("a", lambda: "yes")
    assert verdict("a", never) == "yes"
    cache_path().unlink()
    assert verdict("a", lambda: "again") == "again"


def test_two_caches_do_not_mix(monkeypatch, tmp_path):
    verdict("a", lambda: "first")
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "second"))
    assert verdict("a", lambda: "second") == "second"


@pytest.mark.parametrize("failing", ["replace", "dump"])
def test_a_write_that_fails_leaves_no_temporary_file(failing, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    verdict("a", lambda: "yes")
    before = cache_path().read_text()
    monkeypatch.setattr(*{"replace": (os, "replace"), "dump": (json, "dump")}[failing], fail)
    assert verdict("b", lambda: "no") == "no"
    assert list(cache_path().parent.iterdir()) == [cache_path()]
    assert cache_path().read_text() == before


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
