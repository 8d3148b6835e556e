"""Declarations, and LLM's arguments: any value is accepted or refused by a NanoinferError that names the argument."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy
import pytest
import torch
from annotated_types import Ge, Interval
from typing_extensions import Doc

from nanoinfer import LLM, NanoinferError, SamplingParams
from nanoinfer.arguments import Allowed, Hint, declarations, declared, read_fields
from nanoinfer.compat.vllm.neutral import NEUTRAL

NAMES = [name for name in inspect.signature(LLM.__init__).parameters if name != "self"]
NAMES += [name for name, accepted in NEUTRAL["LLM()"].items() if not isinstance(accepted, str)]
VALUES = {
    "an integer of 5,000 digits": 10**5000,
    "a negative one": -(10**5000),
    "an array": numpy.zeros((100, 100)),
    "a tensor": torch.ones(3),
    "NaN": float("nan"),
    "5,000 characters": "x" * 5000,
    "no Unicode": "\ud800",
    "a NUL": "a\0b",
    "bytes": b"x",
    "a list of lists": [[1]],
    "a dict": {"a": 1},
    "a class": object,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_no_use_is_refused_by_the_arguments_name(name):
    of_files = ("model", "lora", "tokenizer", "revision")  # these name the value, as a file that is not there
    for kind, value in VALUES.items():
        with pytest.raises(NanoinferError) as caught:
            LLM(**{name: value})
        message = str(caught.value)
        assert message.isprintable(), kind
        assert len(message) < 800, kind
        assert name in message or name in of_files, kind


@pytest.mark.parametrize("device", ["cpu:99", "cpu:-1", "cuda:-1", "cuda:" + "9" * 30, "meta", "mps", "", ":", "gpu"])
def test_a_device_that_does_not_exist_is_refused(device):
    with pytest.raises(NanoinferError, match="device must be auto, cpu, cuda or cuda:N, got"):
        LLM(device=device)


def test_cpu_0_is_the_cpu():
    assert LLM(device="cpu:0", kv_cache_memory=2**22).info.device in ("cpu", "cpu:0")


@declared
@dataclass(kw_only=True)
class Point:
    """A point.

    Args: as declared below.
    """

    number: Annotated[float, Ge(0), Hint("0 is off"), Doc("How far. It may be half a step.")] = 1.0
    count: Annotated[int | None, Interval(ge=1, le=9), Doc("How often.")] = None
    share: Annotated[float, Interval(gt=0, le=1), Doc("How much.")] = 1.0
    word: Annotated[str, Allowed("'one' or 'two'"), Doc("Which.")] = "one"
    names: Annotated[Sequence[int] | None, Doc("Which ones.")] = None
    table: Annotated[Mapping[str, int] | None, Doc("Which for whom.")] = None
    mode: Annotated[bool | Literal["never"], Doc("Whether.")] = False

    def __post_init__(self):
        read_fields(self)


@pytest.fixture(autouse=True)
def words_of_others(monkeypatch):
    monkeypatch.setitem(NEUTRAL, "Point", {"theirs": "number", "neutral": ((1,), "")})


def test_the_docstring_has_every_declaration_with_its_range():
    lines = (
        "number: How far. Finite and >= 0. 0 is off. It may be half a step.",
        "count: How often. In 1 .. 9.",
        "share: How much. In (0, 1].",
        "word: Which.",
        "names: Which ones.",
        "table: Which for whom.",
        "mode: Whether.",
    )
    assert Point.__doc__ == "\n    ".join(["A point.\n\nArgs:", *lines])
    assert str(inspect.signature(Point)).startswith("(*, number: float = 1.0, count: int | None = None, share: float = 1.0")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"number": -1}, "number must be finite and >= 0, got -1; 0 is off"),
        ({"number": "x"}, "number must be a number, got 'x'"),
        ({"count": 10}, "count must be in 1 .. 9, got 10"),
        ({"count": 1.0}, "count must be an integer or None, got 1.0"),
        ({"share": 0}, "share must be in (0, 1], got 0"),
        ({"word": "three"}, "word must be 'one' or 'two', got 'three'"),
        ({"word": 1}, "word must be 'one' or 'two', got 1"),
        ({"numbers": 1}, "Point has no argument 'numbers'; did you mean number?"),
        ({"theirs": 1, "number": 2}, "Point got number twice: theirs is another name for it; leave one out"),
        ({"neutral": 2}, "neutral=2 is not supported; leave it out (it acts as 1)"),
    ],
)
def test_a_value_that_is_not_as_declared_is_refused(given, message):
    with pytest.raises(NanoinferError) as caught:
        Point(**given)
    assert str(caught.value) == message


def test_a_value_as_declared_becomes_a_plain_number():
    point = Point(theirs=numpy.float32(0.5), count=numpy.int64(3), share=5e-324, neutral=1)
    assert (point.number, point.count) == (0.5, 3)
    assert (type(point.number), type(point.count)) == (float, int)


def test_a_declaration_knows_what_a_text_can_give():
    types = {name: one.text_type for name, one in declarations(Point).items()}
    assert types == {
        "number": float, "count": int, "share": float, "word": str, "names": list[int], "table": dict, "mode": bool,
    }  # fmt: skip


def test_without_a_tokenizer_prompts_and_answers_are_token_ids():
    with LLM(skip_tokenizer_init=True, logprobs_mode="raw_logits", kv_cache_memory=2**22) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, detokenize=False)
        [answer] = llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs
        with pytest.raises(NanoinferError, match="no tokenizer is loaded; give token ids"):
            llm.generate("Once", params)
        with pytest.raises(NanoinferError, match="set detokenize=False"):
            llm.generate([[5, 6]], SamplingParams())
    with LLM(kv_cache_memory=2**22) as llm:
        [expected] = llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs
    assert (answer.token_ids, answer.text) == (expected.token_ids, "")
    logits = torch.tensor([entry.logprob for _, entry in sorted(answer.logprobs[0].items())])
    logprobs = torch.tensor([entry.logprob for _, entry in sorted(expected.logprobs[0].items())])
    torch.testing.assert_close(logits.log_softmax(-1), logprobs)
    assert logits.logsumexp(-1).abs() > 0.1  # these are no log-probabilities
