"""`python -m benchmarks.device`: parts with limits of their own, and each part on the simulated device."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.device import __main__ as device
from benchmarks.device import checks, processes
from benchmarks.device.parts import PARTS, Part, Setup
from benchmarks.device.processes import OTHER, ROOT, THIS
from tests.helpers import forked, tiny_models

# In the place of a part's program: a line in each turn, and then the end that the part's name says.
STUB = """import sys, json, time
tree, root, part, setup = sys.argv[1:]
for number in range(3):
    sys.stdin.readline()
    print(json.dumps({"what": part, "number": number, "folder": tree}), flush=True)
    sys.stdin.readline() if number == 2 else None
if part == "waits":
    time.sleep(600)
if part == "fails":
    raise SystemExit("out of order")
"""


def run_stubs(names, monkeypatch, seconds=60.0, device="sim", **more):
    monkeypatch.setattr(processes, "LAUNCH", STUB)
    monkeypatch.setattr(processes, "PARTS", tuple(Part(name, "", 10, **more.get(name, {})) for name in names))
    lines, trees = [], {THIS: Path("a"), OTHER: Path("b")}
    processes.run_parts(names, Setup(device, ""), trees, dict(os.environ), seconds, lines.append)
    return lines


@pytest.mark.slow
def test_a_part_that_reaches_its_limit_or_fails_keeps_its_results_and_the_next_one_runs(monkeypatch):
    lines = run_stubs(["waits", "fails", "ends"], monkeypatch, seconds=6.0)
    for name in ("waits", "fails", "ends"):
        assert [line["number"] for line in lines if line["part"] == name and "what" in line] == [0, 1, 2]
    waits, fails, ends = (line for line in lines if "state" in line)
    assert waits["state"] == "stopped at its limit of 2 s; --parts waits repeats it"
    assert (fails["state"], fails["text"]) == ("failed", "out of order")
    assert ends["state"] == "done"


def test_without_a_device_a_part_that_needs_one_takes_no_time_and_only_compared_parts_run_with_another_tree(monkeypatch):
    more = {"one": {"needs_gpu": False}, "both": {"needs_gpu": False, "is_compared": True}}
    lines = run_stubs(["gpu", "both", "one"], monkeypatch, device="", **more)
    folders = {name: [line["folder"] for line in lines if line["part"] == name and "what" in line] for name in ("one", "both")}
    assert folders == {"one": ["a"] * 3, "both": ["a", "b"] * 3}
    assert lines[0] == {"part": "gpu", "state": "not run: it needs a CUDA device, and torch sees none; --simulate tries it"}


def test_mistakes_are_one_sentence():
    for arguments, sentence in (
        (("--parts", "steps,all"), "parts must be some of doctor, tests, workloads, .*, got 'all'"),
        (("--against", "tests"), "against must be a folder with nanoinfer/ in it, got 'tests'; give a checkout"),
        (("--block", "x.md", "--simulate"), "a block for x.md needs a CUDA device"),
    ):
        result = CliRunner().invoke(device.app, arguments)
        assert result.exit_code == 1
        assert re.search(sentence, " ".join(result.stderr.split()))


def test_every_test_file_that_chooses_a_gpu_where_there_is_one_is_among_those_of_make_gpu():
    choosing = ('"cuda" if torch.cuda.is_available()', "    if torch.cuda.is_available():", "pytest.mark.gpu")
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name not in ("cli", "bench")]
    found = {path for path in files if any(text in path.read_text(encoding="utf-8") for text in choosing)}
    others = {path.relative_to(ROOT).as_posix() for path in found} - set(checks.TESTS)
    assert others == {"tests/features/test_devices.py"}  # features:outcomes runs what it runs
    assert all((ROOT / path).is_file() for path in checks.TESTS + checks.SANITIZED[:2])


@pytest.mark.parametrize(("ending", "exit_code"), [("", 0), ("raise SystemExit('out of order')", 1)])
def test_the_command_prints_and_writes_each_line_and_ends_with_the_table(ending, exit_code, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "LAUNCH", f"{STUB}assert {str(tmp_path / 'model')!r} in sys.argv[-1]\n{ending}")
    monkeypatch.chdir(tmp_path)  # the parts run in the checkout
    (tmp_path / "model").mkdir()
    arguments = "--simulate --model model --parts steps,doctor --seconds 60 --output lines".split()
    result = CliRunner().invoke(device.app, arguments)
    assert result.exit_code == exit_code
    written = (tmp_path / "lines").read_text()
    assert result.stdout.startswith(f"{written}## a simulated device, ")
    assert [json.loads(line)["part"] for line in written.splitlines()] == ["machine", *["doctor"] * 4, *["steps"] * 4]


# ---- on the simulated device


def run_simulated(model, names):
    from benchmarks.device import engine, features, host, kernels
    from tests.helpers import simulated_device

    modules = {"engine": engine, "features": features, "host": host, "kernels": kernels}
    simulated_device.install()
    with simulated_device.engine_may_use_it():
        for name in names:
            module, function = name.split(":")
            for result in getattr(modules[module], function)(Setup("sim", model)):
                print(json.dumps(result))


def results_of(names, folder):
    model = tiny_models.save("qwen3", folder, **device.TINY_MODEL)
    done = forked.run_function(run_simulated, str(model), names)
    assert done.returncode == 0, done.stderr
    return {(result := json.loads(line))["what"]: result for line in done.stdout.splitlines() if line.startswith("{")}


needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton") or torch.cuda.is_available(), reason="Triton's interpreter runs without a GPU"
)


@needs_triton
@pytest.mark.long
def test_the_parts_that_measure_the_engine_yield_their_figures(tmp_path):
    names = [*(f"engine:{name}" for name in ("workloads", "steps", "latency", "graphs", "prompts")), "kernels:bandwidths"]
    names += ["host:steps", *(f"features:{name}" for name in ("fewer_bits", "families", "same_bits", "sleep"))]
    found = results_of(names, tmp_path)
    assert found["A"]["tokens/s"] > 0
    for overlaps in ("with", "without"):
        step = found[f"A, {overlaps} overlap"]
        parts = [step[name] for name in step if name.startswith("gpu ")]
        assert {"gpu draw, ms", "gpu forward, ms"} <= step.keys()
        assert step["gpu, ms"] == pytest.approx(sum(parts), abs=1e-3)
        assert 0 < step["host, ms"] < step["step, ms"]
    assert found["2 streams, 1 prompts of 9"]["ratio"] >= 1
    graphs = found["graphs"]
    assert len(graphs["nodes"]) == graphs["number"] > 0
    assert min(graphs["nodes"]) > 0
    kernels = {"qkv, 1 rows", "qkv, 16 rows", "head, 16 rows", "down, 1 rows", "attention, 2 x 5", "draw, 2 rows"}
    assert kernels <= found.keys()
    for compared in (found["a prompt of 5"], found["3 prompts in chunks"]):
        assert compared["equal answers"] == 1
        assert compared["difference of logprobs"] < 1e-5
    assert found["1 rows, greedy"]["Python calls"] < found["16 rows, greedy"]["Python calls"]
    assert found["F, bfloat16"]["ratio"] == 1
    assert found["F, int8 cache"]["ratio"] > 0
    assert found["Gemma 3"]["A, replayed"] == 1
    assert found["experts"]["A, tokens/s"] > 0
    assert found["adapters"]["1 adapters, tokens/s"] > 0
    assert found["batch_invariant"].get("equal answers", 1) == 1
    assert found["sleep"].get("equal answers", 1) == 1


@needs_triton
@pytest.mark.long
def test_every_part_starts_and_ends_and_writes_its_line_before_the_next_one(tmp_path):
    """As processes, with the project itself as the other tree, and transformers in the place of nano-vllm."""
    (tmp_path / "nano" / "nanovllm").mkdir(parents=True)
    arguments = ["--simulate", "--seconds", "3600", "--output", str(tmp_path / "lines"), "--nano-vllm", str(tmp_path / "nano")]
    result = CliRunner().invoke(device.app, [*arguments, "--against", str(ROOT)])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert {line["part"]: line["state"] for line in lines if "state" in line} == {part.name: "done" for part in PARTS}
    for part in PARTS:
        trees = {line["tree"] for line in lines if line["part"] == part.name and "what" in line}
        assert trees == ({THIS, OTHER} if part.is_compared else {THIS}), part.name
