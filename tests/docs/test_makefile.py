"""What `make` would run. Nothing is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None or os.name == "nt", reason="needs make and a POSIX shell")


@pytest.fixture
def folder(tmp_path):
    """A checkout with an installed environment, whose Python calls itself 3.0."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-lowest.txt", "constraints-smoke.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.0.0\n")
    python.chmod(0o755)
    (tmp_path / ".venv" / "installed").touch()
    return tmp_path


def commands(folder, *arguments):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "TORCH", "MAKEFLAGS")}
    done = subprocess.run(["make", "-n", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", "").splitlines()


@pytest.mark.slow
def test_only_torch_is_taken_from_pytorchs_index_and_another_python_makes_the_environment_anew(folder):
    assert not [line for line in commands(folder, "demo") if "-m venv" in line]
    assert f"{sys.executable} -m venv --clear .venv" in commands(folder, "demo", f"PYTHON={sys.executable}")
    (folder / ".venv" / "installed").unlink()
    [line] = [line for line in commands(folder, "demo", "TORCH=cpu") if "pip install" in line and "--index-url" in line]
    assert line.partition("||")[0].split()[-1] == "torch"
    assert "--no-deps" in line
    assert not [line for line in commands(folder, "demo") if "--index-url" in line]


def test_every_environment_has_its_own_versions(folder):
    for target, constraints in (
        ("demo", "constraints.txt"),
        ("test-lowest", "constraints-lowest.txt"),
        ("smoke-lowest", "constraints-smoke.txt"),
        ("test-newest", os.devnull),
    ):
        (folder / ".venv" / "installed").unlink(missing_ok=True)
        installs = [line for line in commands(folder, target) if " -m pip install" in line]
        assert installs
        assert all(f" -c {constraints} " in line for line in installs)


def test_published_weights_run_in_an_environment_of_their_own_and_a_missing_registry_fails_only_in_ci(folder):
    removed = ("PYTHON", "TORCH", "MAKEFLAGS", "MAKELEVEL", "CI")
    environment = {name: value for name, value in os.environ.items() if name not in removed}

    def done(*arguments, **variables):
        return subprocess.run(
            ["make", "test-real", *arguments], cwd=folder, env=environment | variables, capture_output=True, text=True
        )

    for status, variables in ((0, {}), (2, {"CI": "true"})):
        failed = done("PYTHON=false", **variables)  # nothing can be installed
        assert failed.returncode == status
        assert "make test-real is skipped: its environment" in failed.stdout
    stamps = [folder / ".venv-real" / name for name in ("installed", "installed-test")]
    python = folder / ".venv-real" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    for stamp in stamps:
        stamp.touch()
    assert done().stdout.splitlines()[-1] == "-m pytest tests/real -rs"
    assert "tests/real" not in "".join(commands(folder, "test"))
