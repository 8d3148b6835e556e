"""The table of attention backends: which is chosen, which is refused, and those of the user's own."""

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention import base
from nanoinfer.attention.base import register_backend, select_backend
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.cli import doctor
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError

CPU = torch.device("cpu")


def test_an_unknown_or_unsupported_backend_is_refused_by_name(caplog):
    model = (torch.float32, 64)
    with pytest.raises(InvalidValueError, match="one of reference, cpu, flash, triton, got 'flashy'"):
        select_backend("flashy", CPU, *model)
    with pytest.raises(UnsupportedError, match="'cpu' cannot be used: it runs on cpu only, not on meta; use 'auto'"):
        select_backend("cpu", torch.device("meta"), *model)
    with pytest.raises(InvalidValueError, match="one of reference, cpu, flash, triton, got 'torch'"):  # removed
        select_backend("torch", CPU, *model)
    assert select_backend("auto", CPU, *model)[0] == "cpu"


@pytest.mark.slow
def test_a_registered_backend_is_used_and_a_class_that_is_no_backend_is_refused(monkeypatch):
    class Counting(ReferenceBackend):
        num_steps = 0

        def begin_step(self, cache, metadata):
            Counting.num_steps += 1
            return super().begin_step(cache, metadata)

    monkeypatch.setitem(base.BACKENDS, "counting", ReferenceBackend)  # removed afterwards
    register_backend("counting", ReferenceBackend)
    register_backend("counting", Counting)  # a registered name may be replaced
    params = SamplingParams(temperature=0, max_tokens=5)
    llm = LLM(attention_backend="counting", kv_cache_memory=2**22)
    Counting.num_steps = 0  # loading runs it, too
    ours = llm.generate("Once upon a", params, use_tqdm=False)
    assert Counting.num_steps == 5
    reference = LLM(attention_backend="reference", kv_cache_memory=2**22)
    assert ours[0].outputs == reference.generate("Once upon a", params, use_tqdm=False)[0].outputs
    monkeypatch.setattr(doctor, "_check", lambda name, device: doctor.Check(name, None, "", False))
    assert "counting" in {check.backend for check in doctor.examine().checks}
    with pytest.raises(InvalidValueError, match="'auto' is reserved"):
        register_backend("auto", Counting)
    for nothing in (object, Counting(), "nanoinfer"):
        with pytest.raises(InvalidTypeError, match="must be a class like AttentionBackend"):
            register_backend("nothing", nothing)


def test_auto_skips_a_backend_that_cannot_be_imported_or_lacks_what_the_layers_need_and_says_why(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setitem(base.PREFERRED, "cpu", ("missing", "plain", "windowed", "cpu"))
    monkeypatch.setitem(base.BACKENDS, "missing", "no_such_module:Backend")
    lacking = {"supports_windows": False, "supports_sinks": False}
    monkeypatch.setitem(base.BACKENDS, "plain", type("Plain", (ReferenceBackend,), lacking))
    monkeypatch.setitem(base.BACKENDS, "windowed", type("Windowed", (ReferenceBackend,), {"supports_sinks": False}))
    assert select_backend("auto", CPU, torch.float32, 64)[0] == "plain"
    assert "attention_backend: not missing, because no_such_module is not installed" in caplog.text
    assert select_backend("auto", CPU, torch.float32, 64, needed=["supports_windows"])[0] == "windowed"
    assert "not plain, because it does not support sliding windows" in caplog.text
    assert select_backend("auto", CPU, torch.float32, 64, needed=["supports_sinks"])[0] == "cpu"
    assert "not windowed, because it does not support attention sinks" in caplog.text
