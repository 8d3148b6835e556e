"""`--import MODULE` and the options that name a class: code of one's own on the command line, from the current folder."""

import json
import shutil
import sys

import pytest
from typer.testing import CliRunner

from nanoinfer.attention import base
from nanoinfer.cli.main import app
from nanoinfer.loading.checkpoint import BUNDLED
from nanoinfer.models import registry

pytestmark = pytest.mark.slow

MINE = """
import torch
from nanoinfer import register_backend, register_model
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.features.drafts.speculator import Proposer
from nanoinfer.models.registry import find_model
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.v1.sample.logits_processor import LogitsProcessor


class MyModel(find_model({"architectures": ["Qwen3ForCausalLM"]})):
    pass


class MyBackend(ReferenceBackend):
    pass


def only(token_id, logits):
    return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([token_id]), 0.0)


MY_STAGES = [*STAGES, lambda logits, batch: only(70, logits)]


class MyProcessor(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return only(71, logits)


class MyProposer(Proposer):
    def __init__(self, config):
        print("drafting")

    def propose(self, sequences, limits):
        return [[] for _ in sequences]


register_model("MyForCausalLM", MyModel)
register_backend("mine", MyBackend)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with a module. What the module registers is forgotten afterwards."""
    (tmp_path / "module_of_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(base, "BACKENDS", {**base.BACKENDS})
    yield tmp_path
    sys.modules.pop("module_of_mine", None)


def generated(*options):
    """The ids of an answer of four tokens, and what else was printed."""
    result = CliRunner().invoke(app, ["generate", "Once", "-n", "4", "--ignore-eos", "--seed", "1", "--json", *options])
    assert result.exit_code == 0, result.output
    *printed, output = result.stdout.splitlines()
    return json.loads(output)["outputs"][0]["token_ids"], printed


def test_a_model_and_a_backend_of_an_imported_module_run(folder):
    model = shutil.copytree(BUNDLED / "tiny-qwen3", folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MyForCausalLM"]}))
    options = ("--attention-backend", "mine", "--dtype", "float32")
    ids, _ = generated("-m", str(model), "--import", "module_of_mine", *options)
    assert ids == generated("--attention-backend", "reference", "--dtype", "float32")[0]
    assert CliRunner().invoke(app, ["generate", "Once", "-m", str(model), *options]).exit_code == 0  # it stays registered


def test_stages_processors_and_drafters_are_found_by_name_without_an_import():
    assert generated("--stages", "module_of_mine.MY_STAGES")[0] == [70] * 4
    assert generated("--logits-processors", "module_of_mine:MyProcessor")[0] == [71] * 4
    both = ("--stages", "module_of_mine:MY_STAGES", "--logits-processors", "module_of_mine:MyProcessor")
    assert generated(*both)[0] == [70] * 4  # a processor runs before the temperature, and this stage is the last
    ids, printed = generated("--speculative-config", '{"method": "module_of_mine:MyProposer"}')
    assert (ids, printed) == (generated()[0], ["drafting"])


def test_every_command_that_loads_a_model_imports_the_module_before(folder, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once", "max_tokens": 1}}
    (folder / "in.jsonl").write_text(json.dumps(request))
    bench = [f"bench {name}" for name in ("throughput", "latency", "roofline", "ladder")]
    for command in ("generate x", "chat x", "explain x", "serve --port 0", "batch in.jsonl -o out.jsonl", *bench):
        result = CliRunner().invoke(app, [*command.split(), "--import", "module_of_nobody"])
        assert result.exit_code == 1
        words = "error: --import module_of_nobody failed (No module named 'module_of_nobody'); give the name of"
        assert words in result.stderr


def test_what_is_no_list_of_stages_is_one_sentence():
    for name, words in (
        ("nowhere.STAGES", "must be a list of functions or its name, such as 'my_module.STAGES', got 'nowhere.STAGES'"),
        ("math.pi", "must be a list of functions (logits, SamplingBatch) -> logits, got 3.14"),
    ):
        result = CliRunner().invoke(app, ["generate", "x", "--stages", name])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert f"--stages {words}" in result.stderr
