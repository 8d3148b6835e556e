"""The types that a user's editor and type checker see: of every public signature. mypy checks user_script.py."""

import inspect
import re
from dataclasses import fields
from typing import get_args

import pytest

from nanoinfer import LLM, AsyncEngineArgs, AsyncLLM, BeamSearchParams, EngineArgs, SamplingParams


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
