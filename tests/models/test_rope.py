"""The angles of every kind of rotary positions: transformers' own functions are the oracle."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoinfer.errors import CheckpointError, UnsupportedError
from nanoinfer.models.rope import RopeConfig, rope_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 5.0},
    YARN,
    YARN | {"factor": 40.0},
    YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"truncate": False},
    YARN | {"attention_factor": 1.5},
    YARN | {"mscale": 0.8, "mscale_all_dim": 0.4},
    YARN | {"mscale": 0.8},  # without its pair it says nothing
]


def frequencies(rope, theta=1e6):
    """As we read a config.json."""
    read = RopeConfig.from_hf({"max_position_embeddings": 16384, "rope_parameters": rope | {"rope_theta": theta}})
    return rope_frequencies(128, read), read


@pytest.mark.parametrize("rope", SCALED, ids=str)
def test_scaled_frequencies_and_the_factor_of_cos_and_sin_are_transformers(rope):
    if rope["rope_type"] in ("yarn", "llama3"):
        rope = rope | {"original_max_position_embeddings": 4096}
    parameters = rope | {"rope_theta": 1e6}
    config = transformers.Qwen3Config(rope_parameters=parameters, head_dim=128, max_position_embeddings=16384)
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    found, read = frequencies(rope)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert read.attention_factor == pytest.approx(factor)
    assert rope["rope_type"] == "dynamic" or not torch.allclose(found, rope_frequencies(128, RopeConfig(theta=1e6)))


def test_the_variants_differ_from_each_other():
    """The negative control of the test above: were a key not read, its variant would equal another."""
    found = [frequencies(rope | {"original_max_position_embeddings": 4096}) for rope in (*SCALED[:-1], {})]
    assert len({(read.attention_factor, *numbers.tolist()) for numbers, read in found}) == len(SCALED) - 1  # and dynamic


def test_plain_frequencies_by_hand():
    assert rope_frequencies(4, RopeConfig(theta=100.0)).tolist() == pytest.approx([1.0, 0.1])
    assert rope_frequencies(4, RopeConfig(theta=100.0, rope_type="linear", factor=2.0)).tolist() == pytest.approx([0.5, 0.05])


def test_older_and_newer_files_say_the_same():
    newer = RopeConfig.from_hf({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
    assert newer == RopeConfig.from_hf({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert RopeConfig.from_hf({}) == RopeConfig()


def test_yarn_stretches_the_context():
    config = {"max_position_embeddings": 100, "rope_scaling": YARN | {"original_max_position_embeddings": 64}}
    assert RopeConfig.from_hf(config).max_position_embeddings == 256
    assert RopeConfig.from_hf({"max_position_embeddings": 100}).max_position_embeddings == 0


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        ({"rope_type": "longrope"}, UnsupportedError, "rope_type must be one of default, dynamic, linear, yarn, llama3, got"),
        ({"partial_rotary_factor": 0.5}, UnsupportedError, "rotating a part of a head is not supported"),
        ({"rope_type": "linear", "factor": float("nan")}, CheckpointError, "factor must be in 1 .. 1e"),
        ({"rope_theta": 0.0}, CheckpointError, "theta must be in 1 .. 1e"),
        (LLAMA3 | {"high_freq_factor": 1.0}, CheckpointError, "high_freq_factor must be in 1.001 .. 1e.06, got 1.0"),
        (LLAMA3 | {"factor": 0.0}, CheckpointError, "factor must be in 1 .."),
        ({"full_attention": {}, "sliding_attention": {}}, UnsupportedError, "must have one rope_type for all layers"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused(rope, error, message):
    with pytest.raises(error, match=message):
        RopeConfig.from_hf({"max_position_embeddings": 100, "rope_parameters": rope})
