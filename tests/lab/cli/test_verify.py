"""`nanoinfer verify` passes what transformers computes, fails what it does not, and names near-ties."""

import json
import shutil
import weakref
from dataclasses import asdict

import pytest
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from nanoinfer import LLM
from nanoinfer.cli.main import app
from nanoinfer.errors import InvalidValueError, OutOfMemoryError, UnsupportedError
from nanoinfer.loading.checkpoint import BUNDLED, Checkpoint
from nanoinfer.tokenization.tokenizer import Tokenizer
from nanoinfer_lab import verify
from tests.helpers import gguf_files, tiny_models

pytestmark = pytest.mark.slow

BUNDLED_MODEL = BUNDLED / "tiny-qwen3"


@pytest.fixture(scope="module", autouse=True)
def few_prompts():
    """Three of the ten prompts, for time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "PROMPTS", verify.PROMPTS[:2] + verify.PROMPTS[-1:])
        yield


@pytest.fixture(scope="module")
def report():
    """The report of the bundled model, during which no two models are in memory."""
    alive, load = [], transformers.AutoModelForCausalLM.from_pretrained

    def check():
        assert not [one for one in alive if one() is not None and getattr(one(), "_engine", one()) is not None]

    class Observed(LLM):
        def __init__(self, *args, **more):
            check()
            super().__init__(*args, **more)
            alive.append(weakref.ref(self))

    def observed(*args, **more):
        check()
        model = load(*args, **more)
        alive.append(weakref.ref(model))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "LLM", Observed)
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", observed)
        found = verify.examine(None, variants="float32,bfloat16,int4", device="cpu")
    assert len(alive) == 3 + 2  # transformers in float32 and in bfloat16
    return found


def test_the_bundled_model_computes_what_transformers_computes(report):
    assert not report.has_failed
    float32, bfloat16, int4 = report.variants
    assert float32.num_tokens == 2 * 3 * 32
    assert float32.differing == []
    assert float32.agreement == 1
    assert 0 < float32.differences.mean < float32.differences.largest < float32.bounds.largest == verify.FLOAT32_BOUND
    assert float32.perplexity == pytest.approx(float32.expected_perplexity, rel=1e-4)
    assert float32.differences.mean < bfloat16.differences.mean < bfloat16.bounds.mean < int4.differences.mean
    assert int4.bounds is None
    assert int4.perplexity == pytest.approx(int4.expected_perplexity, rel=0.1)


def test_json_has_what_the_page_has_and_the_page_is_narrow(report, monkeypatch):
    monkeypatch.setattr(verify, "examine", lambda *given, **more: report)
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["verify", "--json"])
    assert (result.exit_code, json.loads(result.stdout)) == (0, asdict(report))
    first, *lines = CliRunner().invoke(app, ["verify"]).stdout.splitlines()
    assert first.endswith(f" in transformers {transformers.__version__} in float32")
    assert max(len(line) for line in lines if ": a near-tie" not in line) <= 80
    assert "result passed passed no bound" in [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize(
    ("transformers_version", "change", "words"),
    [
        (
            "5.24.0",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            "rope.theta is 500.0 there and 10000.0 ",
        ),
        ("5.24.0", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 there and 1e-06 here"),
        ("5.24.0", {"rope_parameters": {"rope_type": "su"}}, "rope_type must be one of .+, got 'su'"),
        ("4.57.1", {"rope_theta": 500.0}, "rope.theta is 500.0 there"),  # rope_parameters, which is right, is not used there
    ],
)
def test_transformers_with_another_configuration_is_refused_with_both_values(monkeypatch, transformers_version, change, words):
    load = transformers.AutoConfig.from_pretrained

    def changed(*args, **more):
        config = load(*args, **more)
        for name, value in change.items():
            setattr(config, name, value)
        return config

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", changed)
    monkeypatch.setattr(verify, "version", lambda package: transformers_version)
    with pytest.raises(
        UnsupportedError, match=f"transformers {transformers_version} reads config.json in .+ differently: {words}"
    ):
        verify.examine(None, variants="float32", device="cpu")


@pytest.mark.parametrize("family", ["gpt2", "qwen2_yarn", "llama_tied_llama3", "qwen3_moe", "gemma3_window", "gpt_oss_window"])
def test_transformers_reads_a_familys_configuration_as_it_is_read_here(family, tmp_path):
    reference = Checkpoint.open(str(tiny_models.save(family, tmp_path)))
    verify._check_configuration(reference, transformers.AutoConfig.from_pretrained(tmp_path).to_dict())


def with_a_rival(path, scale):
    """Copy the bundled model. In the copy a token that it never writes has `scale` times the logit of its full stop."""
    shutil.copytree(BUNDLED_MODEL, path)
    full_stop, rival = Tokenizer.load(BUNDLED_MODEL).encode("."), -1
    weights = load_file(path / "model.safetensors")
    head = weights["lm_head.weight"]
    head[rival] = head[full_stop[0]] * scale
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


@pytest.mark.parametrize(("change", "is_near_tie"), [(1e-6, True), (0.01, False)])
def test_a_near_tie_passes_and_disturbed_weights_fail(change, is_near_tie, tmp_path):
    model, against = with_a_rival(tmp_path / "model", 1 + change), with_a_rival(tmp_path / "against", 1 - change)
    arguments = ["verify", "-m", model, "--against", against, "--variants", "float32", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == (0 if is_near_tie else 1)
    for word, is_shown in (("passed", is_near_tie), (": a near-tie", is_near_tie), ("FAILED", not is_near_tie)):
        assert (word in result.stdout) == is_shown
    assert (": WRONG" in result.stdout) == (not is_near_tie)
    assert "not '.', which is" in result.stdout
    assert "The tokenizers of both give the same ids." in result.stdout


def test_a_gguf_file_is_compared_with_the_checkpoint_that_it_was_made_from(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    tensors = gguf_files.tensors_of(model, "F32", ("Q4_0",))  # replaces the model's weights by those of the blocks
    against = shutil.copytree(BUNDLED_MODEL, tmp_path / "against")
    model.save_pretrained(against)
    metadata = gguf_files.metadata_of(model.config) | gguf_files.bundled_metadata()
    merges = metadata["tokenizer.ggml.merges"]
    for changes, is_same in (({}, True), ({"tokenizer.ggml.merges": merges[1:]}, False)):
        file = gguf_files.write(tmp_path / "model.gguf", metadata | changes, tensors)
        found = verify.examine(str(file), against=str(against), variants="float32", device="cpu")
        [float32] = found.variants
        assert float32.bounds is None
        assert float32.differences.largest < verify.FLOAT32_BOUND  # these blocks are the checkpoint's own weights
        assert (found.has_same_ids, found.has_failed) == (is_same, not is_same)


def test_what_cannot_be_compared_is_refused_before_anything_runs(qwen3_path, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "LLM", None)
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3_path)
    file = str(gguf_files.write(tmp_path / "a.gguf", gguf_files.metadata_of(model.config), gguf_files.tensors_of(model)))
    quantised = str(shutil.copytree(BUNDLED_MODEL, tmp_path / "gptq"))
    config = json.loads((tmp_path / "gptq/config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "gptq/config.json").write_text(json.dumps(config))
    for model, more, error, words in (
        (file, {}, InvalidValueError, "unquantised safetensors, got '.*a.gguf'; name the checkpoint that .* with --against"),
        (quantised, {}, InvalidValueError, "unquantised safetensors, got '.*gptq'; name the checkpoint that .* with --against"),
        (None, {"against": file}, InvalidValueError, "unquantised safetensors, got '.*a.gguf'; name an unquantised one"),
        (None, {"against": str(qwen3_path)}, InvalidValueError, "must have the 1959 tokens .*, got '.*' with 96"),
        (None, {"variants": "bf16"}, InvalidValueError, "variants must be names of float32, bfloat16, .* got 'bf16' on cpu"),
        (str(qwen3_path), {}, UnsupportedError, "has no tokenizer files, such as tokenizer.json; add them"),
    ):
        with pytest.raises(error, match=words):
            verify.examine(model, device="cpu", **more)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoConfig, "from_pretrained", {}.__getitem__)
        with pytest.raises(UnsupportedError, match=r"transformers .* does not know the model in .*; install a newer version"):
            verify.examine(None, device="cpu")
    monkeypatch.setattr(verify, "available_cpu_memory", lambda: 10**6)
    with pytest.raises(OutOfMemoryError, match=r"needs 0\.0 GB .* in float32, and 0\.0 GB .*; verify a smaller"):
        verify.examine(None, device="cpu")
