"""Logits processors of SamplingParams are called with the arguments that their signatures require."""

import copy
import functools

import pytest

from nanoinfer import SamplingParams
from nanoinfer.errors import InvalidTypeError


class Processor:
    def __call__(self, output_ids, logits):
        return "two", output_ids

    def with_prompt(self, prompt_ids, output_ids, logits):
        return "three", prompt_ids, output_ids

    @staticmethod
    def any_number(*arguments):
        return "any", len(arguments)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (Processor(), ("two", [6])),
        (Processor().with_prompt, ("three", [5], [6])),
        (Processor.any_number, ("any", 3)),
        (lambda output_ids, logits, scale=2: ("two", scale), ("two", 2)),
        (lambda prompt_ids, output_ids, logits, scale=2: ("three", scale), ("three", 2)),
        (functools.partial(lambda words, output_ids, logits: ("two", words), ["a"]), ("two", ["a"])),
    ],
)
def test_a_processor_gets_the_arguments_that_its_signature_requires(processor, expected):
    params = SamplingParams(logits_processors=[processor])
    for one in (params, params.clone(), copy.copy(params)):
        assert one.logits_processors[0]([5], [6], "logits") == expected


@pytest.mark.parametrize(
    "processor",
    [
        lambda: None,
        lambda logits: logits,
        lambda a, b, c, d: d,
        lambda output_ids, logits, *, scale: logits,
        max,  # written in C, without a signature
        int,
    ],
)
def test_a_processor_with_a_different_number_of_arguments_is_refused(processor):
    with pytest.raises(InvalidTypeError, match=r"logits_processors must be a function \(prompt_ids, output_ids, logits\) -> "):
        SamplingParams(logits_processors=[print, processor])
