"""Qwen's config.json: which options its generations have. The logits are compared in test_parity.py."""

import pytest
import torch

from nanoinfer.attention.dense import DenseAttention
from nanoinfer.errors import CheckpointError, UnsupportedError
from nanoinfer.models.qwen import QwenConfig, QwenForCausalLM
from nanoinfer.models.windows import WindowedConfig, layer_windows
from tests.helpers import tiny_models

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


SLIDES = ["full_attention", "sliding_attention"] * 2
NO_WINDOW = "sliding_window must be a number >= 1, because some layers slide, got"


def config(model_type="qwen3", **given):
    return QwenConfig.from_hf(SIZES | {"model_type": model_type} | given)


def test_the_generations_differ_in_biases_and_in_the_norm_of_the_heads():
    second, third = config("qwen2"), config("qwen3", attention_bias=True)
    assert (second.qkv_bias, second.o_bias, second.qk_norm, second.head_dim) == (True, False, False, 8)
    assert (third.qkv_bias, third.o_bias, third.qk_norm, third.head_dim) == (True, True, True, 128)
    assert config("qwen3").qkv_bias is False
    assert config("qwen2", attention_bias=True).o_bias is False  # which Qwen2's files may hold and Qwen2 does not read


def test_missing_numbers_are_those_of_transformers():
    given = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    read = QwenConfig.from_hf(given | {"model_type": "qwen2"})
    assert (read.num_key_value_heads, read.rms_norm_eps, read.tie_word_embeddings) == (4, 1e-6, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ()),
        ({"use_sliding_window": True, "sliding_window": None}, ()),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, ()),  # no text is longer
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (8, None, 8, None),
        ),
        ({"layer_types": ["full_attention"] * 4}, ()),
        ({"use_sliding_window": False, "sliding_window": 8, "layer_types": ["full_attention"] * 4}, ()),
        ({"use_sliding_window": False, "sliding_window": 8, "layer_types": None}, ()),
    ],
    ids=str,
)
def test_the_window_of_each_layer(given, expected):
    assert layer_windows(SIZES | given, 64, None) == expected


def test_a_subclass_that_knows_no_windows_is_not_replaced_by_one_that_does():
    class Plain(QwenConfig): ...

    class Windowed(WindowedConfig): ...

    file = SIZES | {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert type(QwenConfig.from_hf(file)) is WindowedConfig
    assert type(Windowed.from_hf(file)) is Windowed
    with pytest.raises(TypeError, match="layer_windows"):
        Plain.from_hf(file)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act must be silu"),
        ({"head_dim": 7}, CheckpointError, "head_dim must be even"),
        ({"max_position_embeddings": 0}, CheckpointError, "max_position_embeddings must be a number >= 1, got 0"),
        ({"layer_types": ["sliding_attention"] * 4}, CheckpointError, "use_sliding_window must be true"),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}, UnsupportedError, "for each of 4 layers"),
        *(
            ({"use_sliding_window": True, "sliding_window": window, "layer_types": SLIDES}, CheckpointError, NO_WINDOW)
            for window in (0, -4, "40", 2.5, None)
        ),
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, UnsupportedError, "layer_types must name full"),
    ],
    ids=str,
)
def test_what_is_not_supported_or_out_of_range_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        config("qwen3", **given)


def test_a_token_depends_on_the_tokens_before_it_and_on_no_later_one():
    model = QwenForCausalLM(config("qwen3", head_dim=8))
    tiny_models.fill(model)
    ids, positions = torch.tensor([3, 1, 4, 1, 5]), torch.arange(5)
    with torch.inference_mode():
        all_rows, first_rows = model(ids, positions, DenseAttention()), model(ids[:3], positions[:3], DenseAttention())
        other = model(torch.tensor([9, 1, 4, 1, 5]), positions, DenseAttention())
        assert model.compute_logits(all_rows).shape == (5, 50)
    torch.testing.assert_close(all_rows[:3], first_rows)
    assert not torch.allclose(all_rows[4], other[4])
