"""The types that a user's editor and type checker see: of every public signature, and of a script that uses them all."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import nanoinfer
from nanoinfer import LLM, AsyncEngineArgs, AsyncLLM, BeamSearchParams, EngineArgs, SamplingParams

SCRIPT = Path(__file__).with_name("user_script.py")


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams])
def test_the_signature_has_every_parameter_with_its_type_and_default(kind):
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == [field.name for field in fields(kind)]
    for field in fields(kind):
        parameter = parameters[field.name]
        kind_of_value = get_args(field.type)[0]
        assert parameter.annotation == getattr(kind_of_value, "__forward_arg__", kind_of_value)
        assert parameter.kind == parameter.KEYWORD_ONLY
        assert parameter.default == getattr(kind, field.name, parameter.empty)


@pytest.mark.parametrize(("kind", "arguments"), [(LLM, EngineArgs), (AsyncLLM, AsyncEngineArgs)])
def test_an_llm_takes_the_arguments_of_its_dataclass(kind, arguments):
    parameters = inspect.signature(kind).parameters
    assert parameters == inspect.signature(arguments).parameters
    assert list(parameters) == [field.name for field in fields(arguments)]
    assert [name for name, one in parameters.items() if one.kind is not one.KEYWORD_ONLY] == ["model"]
    assert inspect.getdoc(arguments) in inspect.getdoc(kind.__init__)


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams, EngineArgs])
def test_the_docstring_explains_every_parameter_in_the_order_of_the_signature(kind):
    args = inspect.getdoc(kind).partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): [A-Z\d{\"`]", args, flags=re.MULTILINE) == [field.name for field in fields(kind)]


def test_no_public_signature_has_any_or_takes_every_argument():
    methods = [function for kind in (LLM, AsyncLLM) for name, function in vars(kind).items() if not name.startswith("_")]
    for public in (SamplingParams, BeamSearchParams, LLM, AsyncLLM, *filter(callable, methods)):
        signature = inspect.signature(public)
        kinds = {one.kind for one in signature.parameters.values()}
        assert "Any" not in str(signature), public
        assert not kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}, public


# ---- mypy

MISTAKES = """from nanoinfer import LLM, AsyncLLM, LLMs, SamplingParams

SamplingParams(temprature=0.5)
SamplingParams(top_k="3")
LLM(max_num_seq=3)
LLM().generate([b"bytes"])
reveal_type(LLM().get_tokenizer())
reveal_type(LLM().generate("a")[0].outputs[0].text)
AsyncLLM(max_num_seqs=2.5)
"""

# The sources of torch and transformers take a minute. Of transformers, only what nanoinfer's users see is read.
CONFIGURATION = """
[mypy]
[mypy-torch.*]
follow_imports = skip
[mypy-transformers.*]
follow_imports = skip
[mypy-transformers,transformers.tokenization_utils_base]
follow_imports = silent
"""


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict_and_mistakes_are_found(tmp_path):
    """In a folder without the project's configuration."""
    shutil.copy(SCRIPT, tmp_path / "script.py")
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    strict = ["mypy", "--strict", "--no-color-output", "--cache-dir", os.devnull]
    command = [sys.executable, "-m", *strict, "script.py", "mistakes.py"]
    # Found as an installed package is, by its py.typed: no error inside it counts.
    package = str(Path(nanoinfer.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"} | {"PYTHONPATH": package}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    *found, summary = (result.stdout + result.stderr).splitlines()
    assert re.fullmatch(r"Found \d+ errors in 1 file \(checked 2 source files\)", summary), result
    assert [line for line in found if not line.startswith("mistakes.py:")] == []
    for sentence in (
        '1: error: Module "nanoinfer" has no attribute "LLMs"',
        '3: error: Unexpected keyword argument "temprature" for "SamplingParams"',
        '4: error: Argument "top_k" to "SamplingParams" has incompatible type "str"',
        '5: error: Unexpected keyword argument "max_num_seq" for "LLM"',
        "6: error: ",
        '8: note: Revealed type is "str"',
        '9: error: Argument "max_num_seqs" to "AsyncLLM" has incompatible type "float"',
    ):
        assert any(line.startswith(f"mistakes.py:{sentence}") for line in found), result.stdout
