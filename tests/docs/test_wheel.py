"""The wheel, installed where the repository is not: every command answers --help, and runs once on a bundled model."""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import typer

from nanoinfer.cli.main import COMMANDS, app

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name == "nt", reason="needs the signals of POSIX"),
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling builds the wheel"),
]
SHORT = "--num-prompts 2 --input-len 4 --output-len 4"
REQUEST = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 4}}
# What is typed, in this order, and what a run that came to its end prints. "> FILE" keeps the output.
RUNS = {
    "generate Once --max-tokens 5 --seed 1": "upon a time",
    "chat Hello --max-tokens 5 --seed 1": "Long ago",
    "explain Once --max-tokens 3 --seed 1": "trace.html replays it",
    "batch requests.jsonl -o results.jsonl": "1 requests, 0 of them errors",
    "models": "tiny-gpt2",
    "inspect tiny-gpt2": "KV cache per token",
    "doctor": "this machine",
    "verify -m tiny-qwen3 --variants float32": "passed",
    "bench roofline -m tiny-qwen3 --json > here.json": '"phases"',
    "bench ladder -m tiny-qwen3 --repeats 1": "tok/s",
    f"bench throughput -m tiny-qwen3 --repeats 2 {SHORT} --json > a.json": '"results"',
    f"bench latency -m tiny-qwen3 --repeats 2 {SHORT}": "TPOT",
    "bench compare a.json a.json": "1.00",
    f"simulate --hardware here.json {SHORT}": "TTFT",
    "check-scheduler --world num_requests=1": "no invariant violated",
    "learn export one-file --solved --prompts 1": ": engine.py has ",
}
# Those of a server, and of a workbook, which tests/server, tests/lab and tests/course run.
OTHERS = {"serve", "bench serve", "bench calibrate"} | {
    f"learn {name}" for name in "list start check watch hint solve run ladder speed".split()
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the wheel into an environment whose other packages are those of this one. Returns its folder."""
    folder = tmp_path_factory.mktemp("installed")
    build = "import sys, hatchling.build; hatchling.build.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)
    venv.create(folder / "venv", symlinks=True)
    python, [wheel] = folder / "venv/bin/python", folder.glob("*.whl")
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder / "venv")}))
    packages.joinpath("others.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files do not count there
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return folder


def run(installed, line, words=""):
    """Type a line, and check that the command succeeds and prints the words. Returns what it prints."""
    typed, _, file = line.partition(" > ")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(installed / "venv/bin/nanoinfer"), *typed.split()]
    done = subprocess.run(command, env=environment, cwd=installed, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert words in done.stdout + done.stderr, f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    if file:
        (installed / file).write_text(done.stdout, encoding="utf-8")
    return done.stdout


def all_commands():
    for name in COMMANDS:
        command = typer.main.get_command(app).get_command(None, name)
        yield from [f"{name} {each}" for each in command.commands] if hasattr(command, "commands") else [name]


def test_nothing_is_imported_from_the_repository_and_every_command_answers_help(installed):
    code = "import nanoinfer, nanoinfer_lab, nanoinfer_course as course\n"
    code += "print(nanoinfer.__path__[0], *nanoinfer_lab.__path__, *course.__path__)"
    command, environment = [installed / "venv/bin/python", "-c", code], {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, cwd=installed, capture_output=True, text=True, check=True)
    assert [Path(path).is_relative_to(installed / "venv") for path in done.stdout.split()] == [True] * 3
    for name in ["", *COMMANDS, *all_commands()]:
        assert run(installed, f"{name} --help").startswith(f"Usage: nanoinfer {name}".rstrip()), name


def test_every_command_is_run_here():
    assert {name for name in all_commands() if not any(f"{line} ".startswith(f"{name} ") for line in RUNS)} == OTHERS


@pytest.mark.parametrize("line", RUNS)
def test_a_command_runs(installed, line):
    (installed / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n", encoding="utf-8")
    run(installed, line, RUNS[line])
