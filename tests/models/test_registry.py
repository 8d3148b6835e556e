"""The table of families: what config.json names is found, and what no family computes is refused."""

from dataclasses import dataclass

import pytest
from torch import nn

from nanoinfer.errors import CheckpointError, InvalidTypeError, UnsupportedError
from nanoinfer.models import registry
from nanoinfer.models.gpt2 import GPT2LMHeadModel
from nanoinfer.models.registry import find_model, refuse_others, register_model


def test_the_first_architecture_that_is_known_counts():
    assert find_model({"architectures": ["Unknown", 5, "GPT2LMHeadModel"]}).__name__ == "GPT2LMHeadModel"


def test_a_class_of_the_users_takes_precedence(monkeypatch):
    class Mine(GPT2LMHeadModel):
        pass

    monkeypatch.setattr(registry, "_registered", {})
    register_model("GPT2LMHeadModel", Mine)
    assert find_model({"architectures": ["GPT2LMHeadModel"]}) is Mine


@dataclass
class HalfConfig:
    vocab_size: int
    head_dim: int

    def from_hf(self, config): ...


class Half(GPT2LMHeadModel):
    Config = HalfConfig
    weight_rules = "model."

    def forward(self, input_ids, attention_mask): ...


@pytest.mark.parametrize(
    ("architecture", "model_class", "message"),
    [
        (None, Half, "architecture must be its name in config.json, a string, got None"),
        ("Mine", "my_module:Mine", "model_class must be a subclass of torch.nn.Module, got 'my_module:Mine'"),
        ("Mine", GPT2LMHeadModel.Config, "must be a subclass of torch.nn.Module, got <class 'nanoinfer.models.gpt2.GPT2"),
        (
            "Mine",
            nn.Linear,
            "^Linear lacks Config, a dataclass with from_hf.dict., tie_word_embeddings, num_hidden_layers, .*; weight_rules, a "
            "WeightRules; forward.input_ids, positions, attend. -> hidden; compute_logits.hidden. -> logits. notebooks/d5a_",
        ),
        (
            "Mine",
            Half,
            "^Half lacks Config.from_hf.dict., a class method; Config.num_hidden_layers; Config.num_key_value_heads; "
            "Config.num_attention_heads; Config.max_position_embeddings; Config.tie_word_embeddings, a field of the dataclass; "
            "weight_rules, a WeightRules; forward.input_ids, positions, attend. -> hidden. notebooks/d5a_write_your_own_m",
        ),
    ],
    ids=str,
)
def test_a_class_that_is_no_model_is_refused_with_everything_that_it_lacks(architecture, model_class, message):
    before = dict(registry._registered)
    with pytest.raises(InvalidTypeError, match=message):
        getattr(register_model, "__wrapped__", register_model)(architecture, model_class)  # not checked by beartype
    assert registry._registered == before


@pytest.mark.parametrize("name", ["Qwen3Model", "GPT2Model", "Gemma3TextModel"])
def test_a_model_without_its_head_is_of_the_family_with_one(name):
    assert find_model({"architectures": [name]}).__name__ in ("QwenForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM")
    assert registry.saved_without_head({"architectures": [name]})
    assert not registry.saved_without_head({"architectures": ["GPT2LMHeadModel", "Unknown", 5]})


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, CheckpointError, 'names no architecture; add "architectures": .one of GPT2LMHeadModel, '),
        ({"architectures": "GPT2LMHeadModel"}, CheckpointError, "names no architecture"),
        ({"architectures": []}, CheckpointError, "names no architecture"),
        ({"architectures": ["Bert"]}, UnsupportedError, r"\['Bert'\] are not supported; GPT2.* are. register_model"),
        ({"architectures": ["Llava"], "text_config": {}}, UnsupportedError, "also read images or sound"),
    ],
    ids=str,
)
def test_others_are_refused_with_a_hint(config, error, message):
    with pytest.raises(error, match=message):
        find_model(config)


def test_a_field_that_no_family_computes_is_refused_unless_its_value_changes_nothing():
    refuse_others({"hidden_act": "silu", "is_causal": True}, hidden_act=("silu", "swish"))
    refuse_others({}, hidden_act=("silu",))
    with pytest.raises(UnsupportedError, match="hidden_act must be silu, got 'gelu'; others are not supported"):
        refuse_others({"hidden_act": "gelu"}, hidden_act=("silu",))
    with pytest.raises(UnsupportedError, match="is_causal must be True, got False"):
        refuse_others({"is_causal": False})
