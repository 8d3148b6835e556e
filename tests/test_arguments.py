"""LLM's arguments: any value is accepted or refused by a NanoinferError that names the argument, whatever its type."""

import inspect

import numpy
import pytest
import torch

from nanoinfer import LLM, NanoinferError
from nanoinfer.config import NEUTRAL

NAMES = [name for name in inspect.signature(LLM.__init__).parameters if name != "self"]
NAMES += [name for name, accepted in NEUTRAL.items() if not isinstance(accepted, str)]
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


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_no_use_is_refused_by_the_arguments_name(name, value):
    with pytest.raises(NanoinferError) as caught:
        LLM(**{name: VALUES[value]})
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 800
    of_files = ("model", "lora", "tokenizer", "revision")  # these name the value, as a file that is not there
    assert name in message or name in of_files


@pytest.mark.parametrize("device", ["cpu:99", "cpu:-1", "cuda:-1", "cuda:" + "9" * 30, "meta", "mps", "", ":", "gpu"])
def test_a_device_that_does_not_exist_is_refused(device):
    with pytest.raises(NanoinferError, match="device must be auto, cpu, cuda or cuda:N, got"):
        LLM(device=device)


def test_cpu_0_is_the_cpu():
    assert LLM(device="cpu:0", kv_cache_memory=2**22).info.device in ("cpu", "cpu:0")
