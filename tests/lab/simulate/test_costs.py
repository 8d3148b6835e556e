"""Sizes read from config.json equal those of the model that the engine builds. Costs of ranks and experts are hand-checked."""

import json
from dataclasses import replace

import pytest
import torch

from nanoinfer.errors import CheckpointError, UnsupportedError
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer_lab.bench import roofline
from nanoinfer_lab.simulate.costs import FORMATS, ModelSizes, StepCosts, StepWork, work_of
from nanoinfer_lab.simulate.hardware import HARDWARE, Hardware
from tests.helpers import tiny_models

QWEN3_32B = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_235B = QWEN3_32B | {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
}  # fmt: skip


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_sizes_in_config_json_are_those_of_the_model(family, tmp_path):
    checkpoint = Checkpoint.open(str(tiny_models.save(family, tmp_path)))
    of_model = roofline.sizes_of(loader.on_meta(checkpoint)[0])
    assert replace(ModelSizes.of(checkpoint.config), dtype="float32") == of_model


def test_known_models_have_their_published_numbers_of_weights():
    """Qwen3-32B has 32.8 billion, and Qwen3-235B-A22B 235 billion, of which a token passes 22 billion."""
    assert ModelSizes.of(QWEN3_32B).num_weights == pytest.approx(32.8e9, rel=2e-3)
    sizes = ModelSizes.of(QWEN3_235B)
    assert sizes.num_weights == pytest.approx(235e9, rel=2e-3)
    passed = sizes.num_weights - sizes.expert_weights * (1 - 8 / 128)
    assert passed == pytest.approx(22.2e9, rel=1e-2)


def test_a_config_of_another_family_is_refused():
    with pytest.raises(UnsupportedError, match=r"model_type in config.json must be one of gpt2, .*, got 'deepseek_v3'"):
        ModelSizes.of({"model_type": "deepseek_v3"})
    with pytest.raises(CheckpointError, match=r"does not have the sizes of a text model .*num_hidden_layers"):
        ModelSizes.of({name: value for name, value in QWEN3_32B.items() if name != "num_hidden_layers"})


def test_sizes_are_read_from_a_file_a_folder_or_a_bundled_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B), encoding="utf-8")
    for given in (tmp_path, tmp_path / "config.json"):
        assert ModelSizes.named(str(given)) == ModelSizes.of(QWEN3_32B)
    assert ModelSizes.named(None) == ModelSizes.named("tiny-qwen3")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UnsupportedError, match=r"read from a config.json, got .*model.gguf; give the config.json of its model"):
        ModelSizes.named(str(tmp_path / "model.gguf"))


def test_the_work_of_a_step_is_the_sum_of_its_chunks():
    sizes = ModelSizes.of(QWEN3_32B)
    assert work_of(sizes, [(1, 10), (3, 5)]) == StepWork(4, 2, 2, (10 + 5) * 64, (10 + 3 + 4 + 5) * 64)


def test_more_tokens_read_more_experts_until_all_are_read():
    sizes = ModelSizes.of(QWEN3_235B)

    def experts_read(num_tokens):
        mlp = sizes.parts(StepWork(num_tokens), FORMATS["bfloat16"])[2]
        return (mlp.num_bytes / 2 - sizes.mlp_weights) / sizes.expert_weights

    assert experts_read(1) == pytest.approx(8 / 128)
    assert experts_read(2) == pytest.approx(1 - (120 / 128) ** 2)  # a fraction 8/128 of the second's experts is read already
    assert experts_read(1000) == pytest.approx(1.0)


H100 = HARDWARE["H100"]


def test_ranks_have_their_shares_and_wait_for_two_all_reduces_a_layer():
    sizes = ModelSizes.of(QWEN3_32B)
    work = work_of(sizes, [(1, 100)] * 8)
    one, four = (StepCosts(sizes=sizes, hardware=H100, dtype=FORMATS["bfloat16"], num_ranks=ranks) for ranks in (1, 4))
    all_reduce_s = 10e-6 + 2 * 3 / 4 * (8 * 5120 * 2) / 450e9
    assert four.device_s(work) == pytest.approx(one.device_s(work) / 4 + 2 * 64 * all_reduce_s)


def test_the_report_of_bench_roofline_is_a_machine(tmp_path):
    """The overheads are the line through what decode steps took besides their least time: 1 ms, and 0.5 ms a sequence."""
    phases = [{"num_decoding": 0, "measured_ms": 900.0, "least_ms": 1.0}]
    phases += [{"num_decoding": n, "measured_ms": 3.0 + 0.5 * n, "least_ms": 2.0} for n in (1, 16, 64)]
    path = tmp_path / "here.json"
    report = {
        "bandwidth_GB_per_s": 30.0, "gemm_GFLOP_per_s": {"float32": 200.0}, "device": "cpu", "memory_bytes": 2**34,
        "phases": phases,
    }  # fmt: skip
    path.write_text(json.dumps(report), encoding="utf-8")
    found = Hardware.named(str(path))
    assert (found.bandwidth, found.rates, found.memory_bytes, found.is_gpu) == (30e9, {"float32": 200e9}, 2**34, False)
    assert found.overheads.per_step_s == pytest.approx(1e-3)
    assert found.overheads.per_sequence_s == pytest.approx(0.5e-3)


def test_sizes_of_numbers_are_torchs():
    assert {name: one.itemsize for name, one in FORMATS.items()} == {name: getattr(torch, name).itemsize for name in FORMATS}
