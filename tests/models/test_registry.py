"""The table of families: what config.json names is found, and what no family computes is refused."""

import pytest
from torch import nn

from nanoinfer.errors import CheckpointError, UnsupportedError
from nanoinfer.models import registry
from nanoinfer.models.registry import find_model, refuse_others, register_model


@pytest.mark.parametrize("architecture", registry.MODELS)
def test_every_family_has_what_the_loader_reads(architecture):
    family = find_model({"architectures": [architecture]})
    assert issubclass(family, nn.Module)
    assert callable(family.Config.from_hf)
    assert isinstance(family.weight_rules, registry.WeightRules)
    assert "tie_word_embeddings" in family.Config.__dataclass_fields__


def test_the_first_architecture_that_is_known_counts():
    assert find_model({"architectures": ["Unknown", 5, "GPT2LMHeadModel"]}).__name__ == "GPT2LMHeadModel"


def test_a_class_of_the_users_takes_precedence(monkeypatch):
    class Mine(nn.Module):
        pass

    monkeypatch.setattr(registry, "_registered", {})
    register_model("GPT2LMHeadModel", Mine)
    assert find_model({"architectures": ["GPT2LMHeadModel"]}) is Mine


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({}, CheckpointError, 'names no architecture; add "architectures": .one of GPT2LMHeadModel, '),
        ({"architectures": "GPT2LMHeadModel"}, CheckpointError, "names no architecture"),
        ({"architectures": []}, CheckpointError, "names no architecture"),
        (
            {"architectures": ["Bert"]},
            UnsupportedError,
            r"\['Bert'\] are not supported; GPT2.* are. register_model",
        ),
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
