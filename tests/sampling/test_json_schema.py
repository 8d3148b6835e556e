"""Schemas of clients are rewritten so that every answer satisfies what the client wrote, or refused with the place."""

import json
import sys

import jsonschema
import pytest

from nanoinfer import StructuredOutputsParams
from nanoinfer.errors import InvalidValueError
from nanoinfer.sampling.grammar import GrammarCompiler
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.client_schemas import pydantic_schemas, random_answer, zod_schemas

llguidance = pytest.importorskip("llguidance")

VOCAB_SIZE = 300
CHECKED = jsonschema.FormatChecker(["email", "ipv4", "ipv6", "uuid"])  # a date may be February 31: a grammar has no calendar
LARGEST = sys.float_info.max


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE)


def compiled(compiler, schema):
    return compiler.compile(StructuredOutputsParams(json=schema))


def read_json(text):
    """Numbers like 1e999 are the largest ones."""
    return json.loads(text, parse_float=lambda digits: max(-LARGEST, min(float(digits), LARGEST)))


@pytest.mark.parametrize("num_answers", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_60_schemas_of_pydantic_and_zod_are_obeyed_but_for_those_refused_with_their_place(compiler, num_answers):
    schemas = [*pydantic_schemas(), *zod_schemas()]
    assert len(schemas) == 60
    for name, schema, refused in schemas:
        if refused is not None:
            with pytest.raises(InvalidValueError) as caught:
                compiled(compiler, schema)
            assert str(caught.value).startswith(f"{refused} cannot be used: these keywords cannot be enforced: "), name
            assert '"x-guidance": {"lenient": true}' in str(caught.value)
            continue
        state, seeds, answers = compiled(compiler, schema), iter(range(100)), []
        while len(answers) < num_answers:
            if (answer := random_answer(state, VOCAB_SIZE, next(seeds))) is not None:
                answers.append(answer)
                jsonschema.Draft202012Validator(schema, format_checker=CHECKED).validate(read_json(answer))
