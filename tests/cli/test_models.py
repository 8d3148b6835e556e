"""`nanoinfer models` lists the bundled models and those in the Hugging Face cache, and says which cannot be loaded."""

import json
from dataclasses import asdict
from functools import partial

import huggingface_hub
import pytest
from typer.testing import CliRunner

from nanoinfer.cli import inspect
from nanoinfer.cli.main import app
from nanoinfer.loading.checkpoint import BUNDLED

pytestmark = pytest.mark.slow
TINY = BUNDLED / "tiny-gpt2"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, in place of the user's own."""
    monkeypatch.setattr(inspect, "scan_cache_dir", partial(huggingface_hub.scan_cache_dir, tmp_path))
    return tmp_path


def download(cache, name, files, *, kind="models", branch="main"):
    """Write a repository as the hub's client does. files: name -> path of the content."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = cache / f"{kind}--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / branch).write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    for file, content in files.items():
        (folder / "snapshots" / commit / file).write_bytes(content)


def test_models_of_the_cache_are_listed_with_the_reason_why_one_cannot_be_loaded(cache, monkeypatch):
    config, weights = (TINY / "config.json").read_bytes(), (TINY / "model.safetensors").read_bytes()
    foreign = json.dumps({"architectures": ["FalconForCausalLM"]}).encode()
    download(cache, "someone/good", {"config.json": config, "model.safetensors": weights}, branch="v2")
    download(cache, "someone/falcon", {"config.json": foreign, "model.safetensors": weights})
    download(cache, "someone/tokenizer-only", {"tokenizer.json": b"{}"})
    download(cache, "someone/stories", {"data.json": b"[]"}, kind="datasets")
    found = {model.name: model for model in inspect.installed_models()}
    assert list(found) == ["tiny-gpt2", "tiny-qwen3", "tiny-tools", "someone/falcon", "someone/good", "someone/tokenizer-only"]
    good = found["someone/good"]
    assert (good.architecture, good.unsupported_reason) == ("GPT2LMHeadModel", None)
    assert good.num_parameters == found["tiny-gpt2"].num_parameters > 1e6
    assert good.num_bytes == len(config) + len(weights)
    assert found["someone/falcon"].architecture == "FalconForCausalLM"
    assert found["someone/falcon"].unsupported_reason == "architectures ['FalconForCausalLM'] are not supported"
    assert found["someone/tokenizer-only"].unsupported_reason == "config.json does not exist"
    listed = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert listed == [asdict(model) for model in found.values()]
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["models"])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    assert [name for name in found if name not in result.stdout] == []
    assert "someone/falcon: architectures ['FalconForCausalLM'] are not supported" in result.stdout
    monkeypatch.setattr(inspect, "scan_cache_dir", partial(huggingface_hub.scan_cache_dir, cache / "none"))
    assert [model.name for model in inspect.installed_models()] == ["tiny-gpt2", "tiny-qwen3", "tiny-tools"]
