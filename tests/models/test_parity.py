"""The oracle: transformers on the same weights gives the same logits and the same greedy tokens."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, SamplingParams
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from tests.helpers import tiny_models

pytestmark = pytest.mark.slow

PROMPT = torch.arange(1, 301) * 31 % tiny_models.VOCAB_SIZE  # 300 tokens: past YaRN's original context of 128


def logits_here(path, dtype="float32", prompt=PROMPT):
    model = loader.load_model(Checkpoint.open(str(path)), dtype)
    with torch.inference_mode():
        return model.compute_logits(
            model(prompt, torch.arange(len(prompt)), HybridDenseAttention(getattr(model.config, "state_shapes", ())))
        )


def logits_there(path, dtype=torch.float32, prompt=PROMPT):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.inference_mode():
        return model(prompt[None]).logits[0]


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_logits_equal_transformers_in_fp32(family, tmp_path):
    path = tiny_models.save(family, tmp_path)
    torch.testing.assert_close(logits_here(path), logits_there(path), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3"])
def test_logits_equal_transformers_in_bf16_within_its_rounding(family, tmp_path):
    """bf16 keeps 8 bits: both sides may differ from the fp32 truth as much as rounding every layer allows."""
    path = tiny_models.save(family, tmp_path)
    truth = logits_there(path)
    here = (logits_here(path, "bfloat16").float() - truth).abs().mean()
    there = (logits_there(path, torch.bfloat16).float() - truth).abs().mean()
    assert here < 1.25 * there
    assert there < 0.1 * truth.abs().mean()  # the comparison means something


def test_the_comparison_notices_a_transpose_that_no_shape_shows(tmp_path):
    """attn.c_proj is square, so a forgotten transpose passes every shape check."""
    path = tiny_models.save("gpt2", tmp_path / "right")
    wrong = shutil.copytree(path, tmp_path / "wrong")
    tensors = load_file(wrong / "model.safetensors")
    name = "transformer.h.0.attn.c_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    assert (logits_here(wrong) - logits_there(path)).abs().max() > 1e-2


def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path):
    model = tiny_models.build("qwen3")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(logits_here(tmp_path / "many"), logits_here(tmp_path / "one"))


def test_gpt2_loads_with_and_without_the_transformer_prefix(tmp_path):
    path = tiny_models.save("gpt2", tmp_path / "with")
    bare = shutil.copytree(path, tmp_path / "without")
    tensors = load_file(bare / "model.safetensors")
    assert all(name.startswith("transformer.") for name in tensors)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()  # the hub's gpt2 keeps its causal mask
    save_file(tensors, bare / "model.safetensors")
    assert torch.equal(logits_here(bare), logits_here(path))


@pytest.mark.parametrize("family", ["qwen2_yarn", "qwen3", "gpt_oss_window"])
def test_config_json_is_read_as_older_transformers_wrote_it(family, tmp_path):
    path = tiny_models.save(family, tmp_path / "new")
    old = shutil.copytree(path, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if rope["rope_type"] == "yarn":
        config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    (old / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_here(old), logits_here(path))
    assert loader.load_model(Checkpoint.open(str(old))).lm_head.weight.dtype == torch.float32


# The attention of these is Qwen's: they need no second backend, and one of each is enough.
LIKE_QWEN = [family for family in tiny_models.FAMILIES if family.startswith(("llama", "mistral")) or "moe" in family]
WINDOWED = [family for family in tiny_models.FAMILIES if family.endswith("_window")]
ELSEWHERE = WINDOWED + tiny_models.WITH_STATES  # tests/end_to_end/test_windows_and_states.py
GREEDY = [family for family in tiny_models.FAMILIES if family not in LIKE_QWEN + ELSEWHERE]


@pytest.mark.parametrize("family", [*GREEDY, "llama_tied_llama3", "qwen3_moe"])
def test_greedy_tokens_equal_transformers_over_a_ragged_batch(family, tmp_path):
    path = tiny_models.save(family, tmp_path)
    num_tokens = 16
    prompts = [PROMPT[:length].tolist() for length in (1, 7, 150)]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = oracle.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=num_tokens
            )[0]
            top_two = oracle(ids[None]).logits[0, len(prompt) - 1 : -1].topk(2).values
        assert (top_two[:, 0] - top_two[:, 1]).min() > 1e-5  # else a tie, and either token would be right
        expected.append(ids[len(prompt) :].tolist())
    params = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False)
    for backend in ("cpu",) if family in LIKE_QWEN else ("reference", "cpu"):
        llm = LLM(path, attention_backend=backend, block_size=16, chunk_size=64, kv_cache_memory=2**24)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected, backend


@torch.inference_mode()
def test_experts_compute_the_tokens_that_chose_them_and_no_others(tmp_path):
    mixture = loader.load_model(Checkpoint.open(str(tiny_models.save("qwen3_moe", tmp_path))), "float32").layers[0].mlp
    num_rows = []
    for expert in mixture.experts:
        expert.register_forward_hook(lambda expert, inputs, out: num_rows.append(len(out)))
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(0))
    mixture(x[:1])
    assert num_rows == [1, 1, 1]  # of 8 experts
    num_rows.clear()
    mixture(x)
    assert len(num_rows) == 8
    assert sum(num_rows) == 3 * 50
