"""config.json is read as transformers reads it: every field of its config classes is decided about, equal or refused by name.

VALUES has the fields that may change the logits, WITHOUT_EFFECT the others. Variants of a file, made of both tables, are loaded
by transformers and here, with the same random weights.
"""

import copy
import dataclasses
import inspect
import json
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers

from nanoinfer.errors import NanoinferError
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.models import registry
from tests.helpers import tiny_models

pytestmark = pytest.mark.slow

ABSENT = "absent"  # the value of a field that a file does not have
LENGTH = 128  # max_position_embeddings of each base
PROMPT = torch.arange(1, 301) * 31

# architecture -> the family of tiny_models, and what else its file has. Variants differ from it in one field or in some.
BASES = {
    "GPT2LMHeadModel": ("gpt2", {}), "Gemma3ForCausalLM": ("gemma3_window", {}), "GptOssForCausalLM": ("gpt_oss_window", {}),
    "LlamaForCausalLM": ("llama", {}), "MistralForCausalLM": ("mistral_window", {}),
    "Qwen2ForCausalLM": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", {}), "Qwen3ForCausalLM": ("qwen3_window", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {}), "Qwen3NextForCausalLM": ("qwen3_next", {}),
    "Qwen3_5ForCausalLM": ("qwen3_5", {}), "Qwen3_5MoeForCausalLM": ("qwen3_5_moe", {}),
}  # fmt: skip

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = _YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
_STRETCHED = _YARN | {"original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_ROPES = [
    {"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "default", "factor": 4.0}, _LINEAR,
    _LINEAR | {"type": "linear", "rope_theta": 5e5}, {"rope_type": "dynamic", "factor": 2.0}, _LLAMA3,
    _LLAMA3 | {"factor": 1.0}, _YARN, _YARN | {"beta_fast": 8.0, "beta_slow": 0.5},
    _YARN | {"beta_fast": None, "beta_slow": None, "attention_factor": None}, _YARN | {"beta_fast": 0.5, "beta_slow": 8.0},
    _YARN | {"attention_factor": 1.5}, _YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}, _YARN | {"mscale": 0.7},
    _YARN | {"truncate": False}, _YARN | {"factor": None}, {"rope_type": "yarn", "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 2.0},
    _YARN | {"original_max_position_embeddings": 4},  # every pair makes less than one turn
    _YARN | {"original_max_position_embeddings": 2**20, "rope_theta": 50.0},  # every pair makes many
    {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 32}, {"partial_rotary_factor": 0.5},
    {"full_attention": _LINEAR, "sliding_attention": _YARN},
    {"full_attention": _YARN | {"original_max_position_embeddings": 700, "truncate": False}},
    {"full_attention": {"rope_theta": 300.0}}, {"sliding_attention": _LINEAR | {"rope_theta": 300.0}},
]  # fmt: skip

# field -> the values that variants of a file have
VALUES = {
    "vocab_size": [64, 130], "hidden_size": [32, 64], "intermediate_size": [40, 128], "num_hidden_layers": [1, 4],
    "num_attention_heads": [2, 6, 8], "num_key_value_heads": [1, 2, 4, None, ABSENT], "head_dim": [8, 24, None, ABSENT],
    "max_position_embeddings": [1, 64, 121, 4096, 0, -5], "rms_norm_eps": [1e-2, 1e-8, 0.5, -1.0, 1e300, ABSENT],
    "layer_norm_epsilon": [1e-2, 1e-8, 0.5, -1.0, 1e300, ABSENT], "tie_word_embeddings": [True, False, ABSENT],
    "rope_parameters": [*_ROPES, None, {}, ABSENT], "rope_scaling": [*_ROPES, None, {}], "rope_theta": [100.0, 5e5, 1e6],
    "rope_local_base_freq": [300.0], "partial_rotary_factor": [0.5, 1.0, 0.25], "original_max_position_embeddings": [16, 64],
    "hidden_act": ["gelu", "relu", "swish", "silu", "gelu_pytorch_tanh"],
    "hidden_activation": ["gelu", "silu", "gelu_pytorch_tanh", ABSENT],
    "activation_function": ["gelu", "relu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", ABSENT],
    "attention_bias": [True, False, ABSENT], "mlp_bias": [True, False], "qkv_bias": [True, False],
    "use_sliding_window": [True, False, ABSENT], "sliding_window": [1, 16, 100, 128, 4096, None, ABSENT],
    "max_window_layers": [0, 1, 28, ABSENT],
    "layer_types": [None, ABSENT, ["full_attention"] * 3, ["sliding_attention"] * 2, ["full_attention", "sliding_attention"]],
    "sliding_window_pattern": [1, 2, 6], "full_attention_interval": [1, 2, 3],
    "query_pre_attn_scalar": [16, 100, ABSENT, 0, -4], "attn_logit_softcapping": [30.0, None],
    "final_logit_softcapping": [20.0, None], "use_bidirectional_attention": [True, False, None], "is_causal": [True, False],
    "per_layer_config": [{"0": {"hidden_size": 32}}, {"1": {"num_key_value_heads": 1}}], "num_experts": [6, 12],
    "num_local_experts": [6, 12], "num_experts_per_tok": [1, 4, 99], "moe_intermediate_size": [16],
    "shared_expert_intermediate_size": [40], "norm_topk_prob": [True, False, ABSENT], "decoder_sparse_step": [1, 2, 3],
    "mlp_only_layers": [[], [0], [1], None, ABSENT], "swiglu_alpha": [0.5, 3.0, ABSENT], "swiglu_limit": [0.3, 5.0, ABSENT],
    "linear_conv_kernel_dim": [2, 3], "linear_key_head_dim": [8, 16], "linear_value_head_dim": [12, 16],
    "linear_num_key_heads": [1, 4], "linear_num_value_heads": [2, 8], "n_positions": [121, 200], "n_embd": [32, 96],
    "n_layer": [1, 3], "n_head": [2, 6], "n_inner": [60, None, ABSENT], "scale_attn_weights": [True, False],
    "scale_attn_by_inverse_layer_idx": [True, False], "add_cross_attention": [True, False],
}  # fmt: skip

# why a field changes no logits -> its name, and another value than a file usually has
WITHOUT_EFFECT: dict[str, dict[str, object]] = {
    "of training": {
        **dict.fromkeys(("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"), 0.9),
        "initializer_range": 0.9,
        "router_aux_loss_coef": 0.9,
        "output_router_logits": True,
        "pretraining_tp": 2,
    },
    "of generation, where the engine reads it": {"use_cache": False, "bos_token_id": 7, "eos_token_id": 8, "pad_token_id": 9},
    "of how results are returned": {"return_dict": True, "output_hidden_states": True, "output_attentions": False},
    "of how the same numbers are computed": {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # the engine's dtype
        "attn_implementation": "eager",
        "reorder_and_upcast_attn": True,
        "chunk_size_feed_forward": 5,
    },
    "of who made the file": {"transformers_version": "4.0.0", "name_or_path": "other"},
    "of classifiers and summaries": {
        "num_labels": 3,
        "id2label": {"0": "a"},
        "label2id": {"a": 0},
        "problem_type": "regression",
        "summary_type": "mean",
        "summary_activation": "tanh",
        "classifier_dropout": 0.9,
        **dict.fromkeys(("summary_use_proj", "summary_proj_to_labels"), False),
        **dict.fromkeys(("summary_first_dropout", "summary_last_dropout"), 0.9),
    },
    "of encoders with decoders, which no architecture here is": {"is_encoder_decoder": True},
    "of images and videos": {
        "image_token_id": 5,
        "video_token_id": 6,
        "mm_tokens_per_image": 3,
        "text_config": None,
        "vision_config": None,
        **dict.fromkeys(("depth", "in_channels", "num_heads", "num_position_embeddings", "out_hidden_size", "patch_size"), 3),
        **dict.fromkeys(("spatial_merge_size", "temporal_patch_size"), 3),
    },
}
NO_EFFECT = {name: value for fields in WITHOUT_EFFECT.values() for name, value in fields.items()}
CHOOSE_THE_CLASS = {"architectures", "model_type"}

# What the base class of transformers' config classes, and functions that all models call, read beside its fields.
OF_ALL = {"is_causal", "per_layer_config", "use_bidirectional_attention", "attn_implementation", "output_attentions"}
OF_ALL |= {"torch_dtype", "num_labels", "name_or_path"}
WITH_ROPE = {"rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}

# A window holds up to the length that YaRN stretches: 64 positions to 256, of every layer or of those with full attention.
WINDOWS = [
    {"rope_parameters": rope, "sliding_window": window, "max_position_embeddings": length}
    for rope in (_STRETCHED, {"full_attention": _STRETCHED, "sliding_attention": {}})
    for window, length in ((65, 64), (255, 256))
]

# Several fields at once: the older form of RoPE, both forms, and lengths that a scaling has stretched.
TOGETHER = [
    *({"rope_parameters": ABSENT, "rope_scaling": rope, "rope_theta": 2e4} for rope in _ROPES),
    *({"rope_parameters": rope, "rope_scaling": rope} for rope in (_YARN, _LLAMA3, _LINEAR)),
    {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": _LINEAR, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": _LINEAR, "rope_scaling": _LINEAR | {"factor": 3.0}},
    {"rope_parameters": _LINEAR | {"rope_theta": 77.0}, "rope_scaling": _LINEAR},
    *({"rope_parameters": _YARN, "original_max_position_embeddings": number} for number in (8, 64)),
    *({"rope_parameters": _LLAMA3, "original_max_position_embeddings": number} for number in (8, 64)),
    {"rope_parameters": _YARN | {"rope_theta": 300.0}, "max_position_embeddings": 32, "sliding_window": 40},
    *WINDOWS,
    {"n_embd": ABSENT, "hidden_size": 32},
    {"n_layer": ABSENT, "n_head": ABSENT, "num_hidden_layers": 1, "num_attention_heads": 2},
    {"num_local_experts": ABSENT, "num_experts": 6},
    {"num_experts": ABSENT, "num_local_experts": 6},
    {"layer_types": ABSENT, "num_hidden_layers": 4},
    {"layer_types": ABSENT, "full_attention_interval": 2},
    {"layer_types": ABSENT, "sliding_window_pattern": 2},
    {"layer_types": ABSENT, "max_window_layers": 0},
    {"layer_types": ABSENT, "use_sliding_window": False},
]


def model_class(architecture: str) -> type:
    return getattr(transformers, architecture)


def fields_of(model: type) -> set[str]:
    """The fields of config.json that transformers' config class has, or that its source or the model's reads."""
    config = model.config_class
    source, config_source = (
        "".join(inspect.getsource(sys.modules[one.__module__]) for one in parents if "transformers.models" in one.__module__)
        for parents in (model.__mro__, config.__mro__)
    )
    names = set(re.findall(r"\bconfig\.([a-z]\w+)\b(?!\()", source))
    names |= set(re.findall(r"""(?:getattr|hasattr)\((?:self\.)?config, "(\w+)\"""", source))
    names |= set(re.findall(r"""kwargs\.(?:get|pop|setdefault)\("(\w+)\"""", config_source))
    names |= {field.name for field in dataclasses.fields(config)} | set(config.attribute_map) | OF_ALL
    return names | (WITH_ROPE if "rope_parameters" in names else set())


@pytest.mark.parametrize("architecture", registry.MODELS)
def test_every_field_that_transformers_reads_is_decided_about(architecture):
    assert fields_of(model_class(architecture)) - VALUES.keys() - NO_EFFECT.keys() - CHOOSE_THE_CLASS == set()


def test_no_decision_is_about_a_field_that_transformers_does_not_read_and_each_architecture_has_a_base():
    assert BASES.keys() == registry.MODELS.keys()
    known = set().union(*(fields_of(model_class(architecture)) for architecture in registry.MODELS))
    assert (VALUES.keys() | NO_EFFECT.keys()) - known == set()
    assert VALUES.keys() & NO_EFFECT.keys() == set()


def test_a_field_that_is_new_in_transformers_is_found():
    class NewConfig(transformers.LlamaConfig):
        scale_of_the_scores: float = 1.0

    class New(transformers.LlamaForCausalLM):
        config_class = NewConfig

    assert fields_of(New) - VALUES.keys() - NO_EFFECT.keys() - CHOOSE_THE_CLASS == {"scale_of_the_scores"}


# ---- variants of a file


class Base:
    """A file, and the logits of a model with random weights that are larger where a difference would not show."""

    def __init__(self, architecture: str, path: Path, **overrides) -> None:
        family, fields = BASES[architecture]
        self.path, self.model = path, model_class(architecture)
        length = {"n_positions" if family == "gpt2" else "max_position_embeddings": LENGTH}
        tiny_models.save(family, path / "base", **length | fields | overrides)
        self.file = json.loads((path / "base" / "config.json").read_text())
        self.fields = fields_of(self.model)
        self.logits = self.oracle(self.file)(PROMPT[None, :120] % tiny_models.VOCAB_SIZE).logits[0]

    def oracle(self, file: dict) -> transformers.PreTrainedModel:
        """transformers' model of this file, which is saved with its weights under path / "variant"."""
        path = self.path / "variant"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        (path / "config.json").write_text(json.dumps(file))
        model = self.model(self.model.config_class.from_pretrained(path)).eval().float()
        tiny_models.fill(model)
        model.save_pretrained(path)
        (path / "config.json").write_text(json.dumps(file))
        return model

    def outcome(self, changes: dict[str, object]) -> str:
        """equal, refused, or "no oracle" where transformers fails. Raises: AssertionError: anything else."""
        file = copy.deepcopy({name: value for name, value in (self.file | changes).items() if value != ABSENT})
        try:
            oracle = self.oracle(file)
        except Exception:
            return "no oracle"
        try:
            model = loader.load_model(Checkpoint.open(str(self.path / "variant")), "float32")
        except NanoinferError as error:
            if not any(name in str(error) for name in names_of(changes)):
                raise AssertionError("refused without its name") from error
            return "refused"
        num_tokens = min(256 if changes in WINDOWS else 120, model.config.max_position_embeddings)
        prompt = PROMPT[:num_tokens] % model.config.vocab_size
        here = model(prompt, torch.arange(len(prompt)), HybridDenseAttention(getattr(model.config, "state_shapes", ())))
        try:
            there = oracle(prompt[None]).logits[0]
        except Exception:
            return "no oracle"
        torch.testing.assert_close(model.compute_logits(here), there, atol=1e-3, rtol=0)
        if changes.keys() <= NO_EFFECT.keys():
            assert torch.allclose(there, self.logits, rtol=0, atol=1e-3), "it has an effect in transformers"
        return "equal"


def names_of(changes: dict[str, object]) -> set[str]:
    """What a refusal may call a change by: the field, or a field of its RoPE, or the tensor that has another size."""
    names = {*changes, *({"k_proj"} if "num_key_value_heads" in changes else ())}
    for value in changes.values():
        names |= names_of(value) if isinstance(value, dict) else set()
    return names | ({"rope_type", "factor"} if any("rope" in name for name in names) else set())


def variants_of(base: Base) -> list[dict[str, object]]:
    """Changes of the file: each value of each field alone, some together, and thirty times three at random."""
    values = {name: values for name, values in VALUES.items() if name in base.fields}
    alone = [{name: value} for name in values for value in values[name]]
    alone += [{name: value} for name, value in NO_EFFECT.items() if name in base.fields]
    together = [changes for changes in TOGETHER if changes.keys() <= base.fields]
    chance = random.Random(0)
    for _ in range(30):
        names = chance.sample(sorted(values), 3)
        together.append({name: chance.choice(values[name]) for name in names})
    return alone + together


def outcomes(base: Base, variants: list[dict[str, object]]) -> Counter[str]:
    found, wrong = Counter(), {}
    with torch.inference_mode():
        for changes in variants:
            try:
                found[base.outcome(changes)] += 1
            except Exception as error:
                wrong[json.dumps(changes)] = f"{type(error).__name__}: {error} {error.__cause__ or ''}"
    assert wrong == {}
    return found


@pytest.mark.parametrize("architecture", BASES)
def test_variants_of_config_json_give_transformers_logits_or_are_refused_by_name(architecture, tmp_path):
    base = Base(architecture, tmp_path)
    windows = [changes for changes in WINDOWS if changes.keys() <= base.fields]
    of_windows = outcomes(base, windows)
    assert of_windows["equal"] >= (2 if windows else 0)
    found = of_windows + outcomes(base, random.Random(architecture).sample(variants_of(base), 10))
    assert found["equal"] >= 2


@pytest.mark.long
@pytest.mark.parametrize("architecture", BASES)
def test_a_hundred_variants_of_config_json_give_transformers_logits_or_are_refused_by_name(architecture, tmp_path):
    base = Base(architecture, tmp_path)
    found = outcomes(base, variants_of(base))
    assert found["equal"] + found["refused"] >= 100
    assert found["equal"] >= 60


@pytest.mark.parametrize(
    ("architecture", "read_differently"),
    [("Qwen3_5MoeForCausalLM", {"norm_topk_prob": False}), ("GPT2LMHeadModel", {"layer_norm_epsilon": 1e-2})],
)
def test_the_comparison_notices_a_field_that_is_read_differently(architecture, read_differently, tmp_path, monkeypatch):
    base = Base(architecture, tmp_path)
    assert outcomes(base, [{}]) == {"equal": 1}
    config_class = registry.find_model(base.file).Config
    read = config_class.from_hf
    monkeypatch.setattr(config_class, "from_hf", lambda file: dataclasses.replace(read(file), **read_differently))
    with pytest.raises(AssertionError, match="not close"):
        outcomes(base, [{}])
