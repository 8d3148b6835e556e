"""A module's old path gives the objects of its new path, with a warning that says it."""

import importlib
import warnings
from pathlib import Path

import pytest

import nanoinfer
from nanoinfer.compat.moved_modules import MOVED

# What docs, notebooks and examples imported from, with a name of each.
OLD = {
    "lab.simulate.simulator": "simulate",
    "lab.stories": "write",
    "lab.learn.track": "TRACK",
    "tracing": "Recorder",
    "async_llm": "AsyncLLM",
    "training.policy": "Policy",
    "models.gated_delta": "gated_delta_rule",
    "engine.metrics": "EngineMetrics",
    "sampling.logits_processors": "LogitsProcessor",
}


def new_path(old):
    known = max((each for each in MOVED if f"{old}.".startswith(f"{each}.")), key=len)
    return MOVED[known] + old.removeprefix(known)


@pytest.mark.parametrize(("module", "name"), OLD.items())
def test_an_old_path_gives_the_same_object_and_says_the_new_path(module, name):
    old, given = f"nanoinfer.{module}", {}
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {new_path(old)}$") as warned:
        exec(f"from {old} import {name}", given)
    assert [one.filename for one in warned] == ["<string>"]  # where the import stands
    assert given[name] is getattr(importlib.import_module(new_path(old)), name)


def test_a_submodule_is_an_attribute_of_its_package_and_an_unknown_one_is_no_module():
    import nanoinfer.lab.simulate.costs

    with pytest.warns(DeprecationWarning, match="has moved to nanoinfer_lab"):
        assert nanoinfer.lab.simulate.costs.StepCosts.__module__ == "nanoinfer_lab.simulate.costs"
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("nanoinfer.lab.nothing")


def test_every_old_path_of_the_table_has_its_file_and_no_other_module():
    folder = Path(nanoinfer.__file__).parent
    files = {path.relative_to(folder / "compat/moved").with_suffix("") for path in folder.glob("compat/moved/**/*.py")}
    found = {"nanoinfer." + ".".join(path.parts) for path in files}
    assert found == {old for old in MOVED if not any(old.startswith(f"{each}.") for each in MOVED)}
    assert [path for path in files if (folder / path).exists() or (folder / path).with_suffix(".py").exists()] == []


def test_what_stays_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from nanoinfer.lora.request import LoRARequest

        from nanoinfer.testing import check_proposer, check_scheduler
        from nanoinfer.testing.machines import check_random_loads
        from nanoinfer.testing.schedules import Abort, Arrive, Explored, Reset, RunStep  # noqa: F401
    assert LoRARequest.__module__ == "nanoinfer.features.adapters.request"
    for check in (check_proposer, check_scheduler, check_random_loads):
        assert check.__module__.startswith("nanoinfer_lab.testing.")
