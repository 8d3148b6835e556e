"""`nanoinfer inspect` says of a checkpoint what loading it would say, and reads no weight."""

import json
import shutil

import huggingface_hub
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from nanoinfer import LLM
from nanoinfer.cli.inspect import examine
from nanoinfer.cli.main import app
from nanoinfer.config import BITS
from nanoinfer.errors import InvalidValueError
from nanoinfer.loading import weights
from nanoinfer.loading.checkpoint import BUNDLED
from tests.helpers import tiny_models

pytestmark = pytest.mark.slow


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def test_what_it_says_is_what_a_loaded_model_has(monkeypatch):
    llm = LLM(kv_cache_memory=2**22)
    monkeypatch.setattr(weights.WeightFiles, "read", None)  # no weight is read
    found = examine(None, num_users=3, num_tokens=100)
    info, model = llm.info, llm.engine.executor.runner.model
    assert found.unsupported_reason is None
    assert found.sizes["max_position_embeddings"] == info.max_position_embeddings
    assert found.sizes["vocab_size"] == info.vocab_size
    assert found.num_cache_bytes_per_token == info.num_cache_bytes // (info.num_blocks * info.block_size)
    assert found.num_file_bytes == (BUNDLED / "tiny-qwen3" / "model.safetensors").stat().st_size
    with safe_open(BUNDLED / "tiny-qwen3" / "model.safetensors", "pt") as file:
        assert found.num_parameters == sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert found.dtype == info.dtype
    assert found.num_weight_bytes == found.num_parameters * 4
    assert found.num_bytes == found.num_weight_bytes + 3 * 100 * found.num_cache_bytes_per_token
    assert found.is_tied == model.config.tie_word_embeddings
    assert (found.has_tokenizer, found.has_chat_template) == (True, True)
    assert found.special_ids["eos_token_id"] == [0, 2]


def test_it_names_the_memory_of_every_copy(tmp_path):
    """The sizes are those of the arrays that an engine makes. GPT-2's width is not needed: the head of 16 MB is screened."""
    path = tiny_models.save("gpt2", tmp_path, vocab_size=40_000, n_embd=128)
    found = examine(str(path), dtype="float32")
    llm = LLM(path, dtype="float32", kv_cache_memory=2**22, speculative_config={"method": "quantized"})
    head = llm.engine.executor.sampler.routes[0].head
    assert found.num_head_copy_bytes == sum(array.nbytes for array in head.arrays()[1:])
    for quantization, num_bytes in found.num_quantized_bytes.items():
        assert found.num_draft_bytes[BITS[quantization]] < num_bytes - 40_000 * 128 * 2  # the embedding's table, in bfloat16
    table = CliRunner().invoke(app, ["inspect", str(path), "--dtype", "float32"]).stdout
    for row in ("8-bit copy of the LM head", "weights in int4", "4-bit copy for drafts", "peak"):
        assert row in table


def test_json_and_table_have_the_same_and_the_table_is_narrow(gpt2_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["inspect", str(gpt2_path), "--users", "2", "--dtype", "bfloat16"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    found = json.loads(CliRunner().invoke(app, ["inspect", str(gpt2_path), "--json", "--dtype", "bfloat16"]).stdout)
    assert found["num_cache_bytes_per_token"] == 2 * 2 * 48 * 2  # k and v, layers, width, bytes of bfloat16
    assert "memory for 2 x 512 tokens" in result.stdout
    assert f"{found['num_parameters']:,}" in result.stdout
    assert (found["is_tied"], found["has_tokenizer"], found["quantization"]) == (True, False, None)


def test_what_cannot_be_loaded_is_said_with_the_reason_and_a_hint(qwen3_path, tmp_path):
    for i, (changes, sentence) in enumerate([
        ({"architectures": ["FalconForCausalLM"]}, "architectures .'FalconForCausalLM'. are not supported; .* register_model"),
        ({"hidden_size": 40}, "the weights do not fit config.json"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type must be one of"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised with 'aqlm' are not supported"),
    ]):  # fmt: skip
        path = shutil.copytree(qwen3_path, tmp_path / str(i))
        edit_config(path, **changes)
        found = examine(str(path))
        with pytest.raises(InvalidValueError, match=sentence) as caught:
            LLM(path)
        assert found.unsupported_reason == str(caught.value)
        assert found.sizes["num_hidden_layers"] == 2
        result = CliRunner().invoke(app, ["inspect", str(path)])
        assert (result.exit_code, "not supported: " in result.stdout) == (1, True)


def test_a_model_of_the_hub_is_inspected_before_its_weights_are_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    snapshot = tiny_models.save("llama_tied_llama3", repository / "snapshots" / ("a" * 40))
    whole = examine("owner/name")
    (snapshot / "model.safetensors").unlink()
    found = examine("owner/name")
    assert found.unsupported_reason is whole.unsupported_reason is None
    assert (found.sizes, found.num_cache_bytes_per_token) == (whole.sizes, whole.num_cache_bytes_per_token)
    assert (found.num_file_bytes, found.num_parameters, found.num_bytes) == (0, None, None)


def test_more_tokens_than_the_model_knows_and_an_unknown_dtype_are_refused(gpt2_path):
    with pytest.raises(InvalidValueError, match="--tokens must be <= 512, the positions this model knows, got 513"):
        examine(str(gpt2_path), num_tokens=513)
    with pytest.raises(InvalidValueError, match=r"dtype must be one of .*, got 'bf17'"):
        examine(str(gpt2_path), dtype="bf17")
