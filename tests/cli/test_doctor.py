"""`nanoinfer doctor` reports the machine and the engine's choices, and detects a backend that computes wrongly."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import chain

import pytest
import torch
from typer.testing import CliRunner

import nanoinfer
from nanoinfer.attention.base import BACKENDS
from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.cli import doctor
from nanoinfer.cli.bits import compare
from nanoinfer.cli.main import app
from nanoinfer.loading.folders import bundled_models
from tests.helpers import tiny_models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "available_cpu_memory", lambda: 3 * 2**29)  # such as a container's limit leaves
        return doctor.examine()


def test_it_reports_what_the_machine_has_and_what_will_be_used(report):
    machine, engine = report.machine, report.engine
    assert machine["torch"] == torch.__version__
    assert machine["nanoinfer"].startswith(nanoinfer.__version__)
    names = ("system", "Python", "CPU", "CPU threads torch uses", "C++ compiler", "kernels are kept in")
    assert all(machine[name] for name in names)
    assert machine["memory"].endswith(" GiB, of which 1.5 GiB are available")
    assert [machine[name].endswith(" files") for name in ("compiled kernels", "packed weights")] == [True] * 2
    assert engine["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert engine["attention"]
    if not torch.cuda.is_available():
        assert engine["layers and attention computed by"].startswith(("C++ kernels", "torch, slowly: "))
        assert engine["threads of the kernels"] == f"{torch.get_num_threads()}; those that wait spin briefly, then sleep"
    checks = {check.backend: check for check in report.checks}
    assert set(checks) - {"cpu, C++ kernels"} == {"reference", "cpu", "flash", "triton"}
    assert checks["reference"].difference == 0
    assert not any(check.failed for check in checks.values())
    if not torch.cuda.is_available():
        assert 0 < checks["cpu"].difference < 1e-4
        assert 0 < checks["cpu, C++ kernels"].difference < 1e-4
        assert checks["flash"].result.startswith("cannot be used: ")


def test_clear_removes_what_is_kept_and_nothing_else(tmp_path, monkeypatch):
    cache, prefixes = tmp_path / "cache", tmp_path / "kv"
    monkeypatch.setenv("NANOINFER_CACHE", str(cache))
    kept = {
        "compiled kernels": [cache / "kernels" / f"layers-{'0' * 16}-{'f' * 16}.so", cache / f"layers-{'0' * 16}.so"],
        "packed weights": [cache / "packed" / f"{'a' * 32}.weights"],
        f"prefixes in {prefixes}": [prefixes / f"{'b' * 66}.kv"],
    }
    others = [cache / "kernels" / "mine.so", cache / "packed" / "lock", prefixes / "notes.kv"]
    for path in (*chain(*kept.values()), *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(2**20))
    listed = {name: f"{len(paths)}.0 MiB in {len(paths)} files" for name, paths in kept.items()}
    assert doctor.sizes(doctor.cached_files(str(prefixes))) == listed
    assert f"prefixes in {prefixes}" not in doctor.cached_files(None)
    result = CliRunner().invoke(app, ["doctor", "--clear", "--prefix-cache-dir", str(prefixes), "--json"])
    assert (result.exit_code, json.loads(result.stdout)) == (0, listed)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(others)
    assert "packed weights    0.0 MiB in 0 files" in CliRunner().invoke(app, ["doctor", "--clear"]).stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cpu backend is not run where there is a GPU")
def test_a_backend_that_computes_wrongly_or_raises_is_reported_and_the_exit_code_is_1(monkeypatch):
    begin_step = CPUBackend.begin_step

    def wrong(self, cache, metadata):
        attend = begin_step(self, cache, metadata)
        return lambda *args: attend(*args) * 1.01

    def broken(self, cache, metadata):
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(doctor, "BACKENDS", {name: BACKENDS[name] for name in ("reference", "cpu")})
    for fault, words in ((wrong, "WRONG in float32"), (broken, "failed: no kernel image is available")):
        monkeypatch.setattr(CPUBackend, "begin_step", fault)
        result = CliRunner().invoke(app, ["doctor"])
        assert result.exit_code == 1
        assert words in result.output


def test_json_has_what_the_tables_have_and_the_tables_are_short(report, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda *given, **more: report)
    monkeypatch.setenv("COLUMNS", "80")
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout) == asdict(report)
    short, result = (CliRunner().invoke(app, ["doctor", *options]) for options in ((), ("--kernels",)))
    lines = short.stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert not any("off by" in line for line in lines)  # --kernels has the comparisons
    assert any("--kernels" in line for line in lines)
    assert result.exit_code == 0, "the machine is healthy"
    words = ("this machine", "what the engine will use", "layers and attention computed by", "compared with the reference")
    assert [word for word in words if word not in result.output] == []


def test_the_compiler_is_the_one_that_would_be_used(monkeypatch, tmp_path):
    script = tmp_path / "my-compiler"
    script.write_text("#!/bin/sh\necho version 7 $1\necho more\n")
    script.chmod(0o755)
    for command, shown in (
        ("/nonexistent", "none: no C++ compiler works (there is no /nonexistent); install g++ or clang++, or name one in CXX"),
        (f"{script} -m64", f"{script}: version 7 -m64, with -m64 -std=c++17 -O3 "),
    ):
        monkeypatch.setenv("CXX", command)
        assert doctor._machine(torch.device("cpu"))["C++ compiler"].startswith(shown)
    assert doctor._machine(torch.device("cpu"))["C++ compiler"].endswith(" -m64")


def test_the_environment_is_shown_without_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    shown = doctor._machine(torch.device("cpu"))["environment"].split()
    assert ("hidden" in shown, {"HF_TOKEN", "OMP_NUM_THREADS=2"} <= set(shown)) == (False, True)


def test_a_model_is_reported_with_what_was_compiled_and_what_was_not_and_why(report, tmp_path, monkeypatch):
    path = tiny_models.save("qwen2_moe", tmp_path)
    found = doctor.examine_model(str(path))
    monkeypatch.setattr(doctor, "examine", lambda *given, **more: replace(report, model=found))
    result = CliRunner().invoke(app, ["doctor", "--model", str(path)])
    assert result.exit_code == 0
    assert "what was compiled of the model" in result.output
    assert "runs as it is: it cannot be traced" in result.output
    assert found["the model"].startswith("compiled, ")
    assert found["layers.1.mlp"].startswith("runs as it is: it cannot be traced")
    assert found["layers.1.mlp.experts.0"] == "compiled, 3 kernel calls"
    assert found["a row's bits"] == "the same in any batch"


def bits(**environment):
    command = [sys.executable, "-m", "nanoinfer", "doctor", "--bits", "--json"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)["bits"]


needs_kernels = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@needs_kernels
def test_a_seed_gives_the_published_tokens_and_log_probabilities():
    assert set(compare().values()) == {"the published bits"}


@pytest.mark.long
@needs_kernels
def test_torch_without_vectors_gives_the_published_bits_too():
    assert bits(ATEN_CPU_CAPABILITY="default") == (0, dict.fromkeys(bundled_models(), "the published bits"))


@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize("compiler", ["g++ -mno-avx512f", "g++ -mno-fma -mno-avx512f", "clang++"])
def test_kernels_of_other_compilers_and_instructions_give_the_published_bits(compiler):
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"there is no {compiler}")
    assert set(bits(CXX=compiler)[1].values()) == {"the published bits"}


def test_other_bits_are_found(monkeypatch):
    monkeypatch.setattr("nanoinfer.cli.bits.SETTINGS", ({"temperature": 1.0},))  # another text
    report = replace(doctor.Report({}, {}, []), bits=compare())
    assert report.has_other_bits
    assert all(text.startswith("other bits: digest ") for text in report.bits.values())
