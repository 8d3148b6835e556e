"""The angles of every kind of rotary positions: transformers' own functions are the oracle."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoinfer.errors import CheckpointError, UnsupportedError
from nanoinfer.models.rope import RopeConfig, rope_frequencies

SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 20.0, "beta_slow": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]  # fmt: skip


@pytest.mark.parametrize("rope", SCALED, ids=str)
def test_scaled_frequencies_and_the_factor_of_cos_and_sin_are_transformers(rope):
    parameters = rope | {"rope_theta": 10_000.0}
    config = transformers.Qwen3Config(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=256, rope_parameters=parameters
    )
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    read = RopeConfig.from_hf({"max_position_embeddings": 256, "rope_parameters": parameters})
    torch.testing.assert_close(rope_frequencies(32, read), expected, rtol=1e-6, atol=0)
    assert read.attention_factor == pytest.approx(factor)
    assert not torch.allclose(rope_frequencies(32, read), rope_frequencies(32, RopeConfig()))


def test_plain_frequencies_by_hand():
    assert rope_frequencies(4, RopeConfig(theta=100.0)).tolist() == pytest.approx([1.0, 0.1])
    assert rope_frequencies(4, RopeConfig(theta=100.0, rope_type="linear", factor=2.0)).tolist() == pytest.approx([0.5, 0.05])


def test_older_and_newer_files_say_the_same():
    newer = RopeConfig.from_hf({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
    assert newer == RopeConfig.from_hf({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert RopeConfig.from_hf({}) == RopeConfig()


def test_yarn_stretches_the_context():
    config = {"max_position_embeddings": 100, "rope_scaling": SCALED[1]}
    assert RopeConfig.from_hf(config).max_position_embeddings == 256
    assert RopeConfig.from_hf({"max_position_embeddings": 100}).max_position_embeddings == 0


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        ({"rope_type": "longrope"}, UnsupportedError, "rope_type must be one of default, dynamic, linear, yarn, llama3, got"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "rotating a part of a head is not supported"),
        ({"rope_type": "linear", "factor": float("nan")}, CheckpointError, "factor must be in 1 .. 1e"),
        ({"rope_theta": 0.0}, CheckpointError, "theta must be in 1 .. 1e"),
        ({"full_attention": {}, "sliding_attention": {}}, UnsupportedError, "must have one rope_type for all layers"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused(rope, error, message):
    with pytest.raises(error, match=message):
        RopeConfig.from_hf({"rope_parameters": rope})
