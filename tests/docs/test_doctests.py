"""Every example in a docstring gives what it says."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import nanoinfer
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence

pytestmark = pytest.mark.slow

ROOT = Path(nanoinfer.__file__).parents[1]
WITH_EXAMPLES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in ROOT.glob("nanoinfer*/**/*.py")
    if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_hold(name):
    result = doctest.testmod(import_module(name), extraglobs={"SamplingParams": SamplingParams, "Sequence": Sequence})
    assert result.attempted > 0
    assert result.failed == 0
