"""A parameter that is declared in one place is found in all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.injected import check_places, copy_package, injected

DOCS = Path(__file__).parents[2] / "docs"
SAMPLING = "    top_p: Annotated["
ENGINE = "    block_size: Annotated["
# Prints where the parameters are found: the help of a command, the schema of a body, vLLM's parser, the table, an error.
FIND = """
import argparse, json, sys
from fastapi import FastAPI
from typer.testing import CliRunner
from nanoinfer import EngineArgs, NanoinferError, SamplingParams
from nanoinfer.cli.main import app
from nanoinfer.server.protocol import ChatCompletionRequest
sys.path.append(sys.argv[1])
from parameters import table

server = FastAPI()

@server.post("/v1/chat/completions")
def chat(body: ChatCompletionRequest) -> None: ...

try:
    SamplingParams(injected_p=1.5)
except NanoinferError as error:
    refusal = str(error)
print(json.dumps({
    "--help": CliRunner().invoke(app, ["generate", "--help-all"], env={"COLUMNS": "200"}).output,
    "openapi": server.openapi()["components"]["schemas"]["ChatCompletionRequest"]["properties"].get("injected_p"),
    "add_cli_args": EngineArgs.add_cli_args(argparse.ArgumentParser()).format_help(),
    "table": table(SamplingParams),
    "docstring": SamplingParams.__doc__,
    "refusal": refusal,
    "EngineArgs": EngineArgs.__doc__,
}))
"""


@pytest.mark.slow
def test_an_injected_parameter_is_found_everywhere_by_its_declaration_alone(tmp_path):
    pytest.importorskip("fastapi")
    parameter = 'injected_p: Annotated[float, Interval(ge=0, le=1), Option(), Doc("Injected to be found.")] = 0.0'
    argument = 'injected_size: Annotated[int, Ge(1), Doc("Injected, too.")] = 3'
    changes = [
        ("sampling_params.py", "a parameter", SAMPLING, f"    {parameter}\n{SAMPLING}"),
        ("config.py", "an argument", ENGINE, f"    {argument}\n{ENGINE}"),
    ]
    check_places(changes)
    copy_package(tmp_path)
    command = [sys.executable, "-c", FIND, str(DOCS)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    (_, _, *first), (_, _, *second) = changes
    with injected(tmp_path, "sampling_params.py", *first), injected(tmp_path, "config.py", *second):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert re.search(r"--injected-p NUMBER +Injected to be found\. In \[0, 1\]\.", found["--help"])
    assert found["openapi"]["anyOf"] == [{"type": "number"}, {"type": "null"}]
    assert found["openapi"]["description"] == "Injected to be found. In [0, 1]."
    assert re.search(r"--injected-size INJECTED_SIZE\s+Injected, too\. >= 1\.", found["add_cli_args"])
    assert "| `injected_p` | `0.0` | Injected to be found. In [0, 1]. |" in found["table"]
    assert "    injected_p: Injected to be found. In [0, 1].\n" in found["docstring"]
    assert "    injected_size: Injected, too. >= 1.\n" in found["EngineArgs"]
    assert found["refusal"] == "injected_p must be in [0, 1], got 1.5"
