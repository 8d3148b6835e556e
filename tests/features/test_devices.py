"""Every feature on every device gives the answers of a CPU, or is refused, as docs/supported.md says."""

import copy
import re

import pytest
import torch

pytest.importorskip("triton")

from tests.features import devices
from tests.features.devices import CPU, EAGER, GPU, GRAPHS, SIMULATED, outcome, recorded, with_table

RENEW = f"renew the table: {devices.COMMAND}"
NOW = (CPU, "embeddings"), (SIMULATED, "full attention")
ON_A_GPU = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
OFF_A_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU itself is tested")


def marks_of(device, feature):
    if device == GPU:
        return ON_A_GPU
    return [OFF_A_GPU, pytest.mark.slow, *[pytest.mark.long] * ((device, feature) not in NOW)]


@pytest.fixture(scope="module")
def prepared():
    with devices.prepared() as both:
        yield both


@pytest.mark.parametrize(
    ("device", "feature"),
    [
        pytest.param(device, feature, marks=marks_of(device, feature), id=f"{device}, {feature}")
        for device in devices.NAMES
        for feature in devices.FEATURES
    ],
)
def test_a_feature_gives_the_answers_of_a_cpu_or_is_refused_as_in_the_table(prepared, device, feature):
    known = recorded()[SIMULATED if device == GPU else device]["outcomes"][feature][0]
    of_device = outcome(*prepared, device, feature)
    if device == GPU and known not in (GRAPHS, EAGER):  # the error names the device, and two ranks are refused on one GPU
        assert of_device not in (GRAPHS, EAGER)
    else:
        assert of_device == known, RENEW


def test_the_table_has_each_feature_and_the_reason_of_each_refusal():
    known, page = recorded(), devices.PAGE.read_text(encoding="utf-8")
    assert with_table(page, known) == page, RENEW
    shown = devices.MARKED.search(page)[0]
    for device in (CPU, SIMULATED):
        outcomes = known[device]["outcomes"]
        assert set(devices.FEATURES) - outcomes.keys() <= {"drafts: quantized"}, RENEW  # minutes in Triton's interpreter
        assert all(found in shown or found in (GRAPHS, EAGER) for found, _ in outcomes.values())
    other = copy.deepcopy(known)
    other[SIMULATED]["outcomes"]["full attention"] = "it is refused", "2026-11-30"
    assert re.search(r"^\| full attention, .*\| yes \| refused \| ", with_table(page, other), re.MULTILINE)
    assert "- it is refused" in with_table(page, other)


@pytest.mark.slow
def test_other_answers_than_a_cpus_are_found(prepared, monkeypatch):
    computed = devices.asked

    def other_answers(checkpoints, device, *arguments):
        answers = computed(checkpoints, CPU, *arguments)
        return answers if device == CPU else answers[::-1]

    monkeypatch.setattr(devices, "asked", other_answers)
    with pytest.raises(AssertionError, match="penalties and bias"):
        outcome(*prepared, GPU, "penalties and bias")
