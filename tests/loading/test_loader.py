"""From a checkpoint to a model: devices, dtypes, sizes, and what config.json must not say."""

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer.config import EngineConfig, SchedulerConfig
from nanoinfer.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    WeightsError,
)
from nanoinfer.load import load
from nanoinfer.loading import devices
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.devices import resolve_device, resolve_dtype
from nanoinfer.loading.loader import load_model, on_meta
from nanoinfer.models import registry
from nanoinfer.models.qwen import QwenConfig, QwenForCausalLM
from nanoinfer.models.registry import find_model
from tests.helpers import tiny_models
from tests.helpers.lora_adapters import write_adapter
from tests.models.test_config_json import BASES

CPU = torch.device("cpu")


@pytest.fixture
def changed(tmp_path):
    """Write a checkpoint whose config.json has other values, and open it."""

    def change(**values):
        path = tiny_models.save("qwen3", tmp_path / "model")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | values))
        return Checkpoint.open(str(path))

    return change


@pytest.mark.parametrize("settings", [{}, {"lora": "itself"}, {"enable_lora": True}])
def test_an_adapter_beside_the_weights_is_one_line_in_the_log_unless_adapters_are_asked_for(tmp_path, caplog, settings):
    path = tiny_models.save("qwen3", tmp_path / "model")
    plain = load(EngineConfig(model=str(path), device="cpu", enforce_eager=True))[0].model.state_dict()
    assert not caplog.records
    write_adapter(path, {"model.layers.0.self_attn.q_proj": (64, 48)})
    settings = settings | ({"lora": ((str(path), 1.0),)} if "lora" in settings else {})
    model = load(EngineConfig(model=str(path), device="cpu", enforce_eager=True, **settings))[0].model.state_dict()
    assert all(torch.equal(model[name], plain[name]) for name in plain) == ("lora" not in settings)
    lines = [record.getMessage() for record in caplog.records if "the LoRA adapter in" in record.getMessage()]
    assert len(lines) == (0 if settings else 1)
    assert settings or f"lora={str(path)!r}" in lines[0]


def test_a_tokenizer_of_another_folder_must_be_there(qwen3_path):
    assert load(EngineConfig(model=str(qwen3_path), device="cpu"))[0].tokenizer is None
    assert load(EngineConfig(model=str(qwen3_path), tokenizer="tiny-gpt2", device="cpu"))[0].tokenizer is not None
    with pytest.raises(CheckpointNotFoundError, match="holds no tokenizer files"):
        load(EngineConfig(model=str(qwen3_path), tokenizer=str(qwen3_path), device="cpu"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [({}, CheckpointError, "eos_token_id"), ({"tokenizer": "./nowhere"}, CheckpointNotFoundError, "nowhere")],
)
def test_what_needs_no_weights_is_checked_before_they_are_read(changed, options, error, message):
    checkpoint = changed(eos_token_id=0 if options else "</s>")
    (checkpoint.path / "model.safetensors").write_bytes(b"corrupted")
    with pytest.raises(error, match=message):
        load(EngineConfig(model=str(checkpoint.path), device="cpu", **options))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_quantization_with_ranks_or_adapters_is_refused_on_a_gpu(monkeypatch, enforce_eager):
    monkeypatch.setattr(devices, "resolve_device", lambda name: torch.device("cuda"))
    invariant = {"scheduler": SchedulerConfig(batch_invariant=True)}
    for name, more in {"enable_lora=True": {"enable_lora": True}, "batch_invariant=True": invariant}.items():
        text = f"quantization='int8' with {name} runs on a CPU only, got device 'cuda'; leave one of the two out"
        with pytest.raises(UnsupportedError, match=text):
            load(EngineConfig(model="tiny-qwen3", quantization="int8", enforce_eager=enforce_eager, **more))


def test_rounded_weights_compute_in_float16_on_a_gpu_only():
    text = "quantization='int8' computes in bfloat16, got dtype='float16'; leave dtype out"
    with pytest.raises(InvalidValueError, match=text):
        load(EngineConfig(model="tiny-qwen3", quantization="int8", dtype="float16", device="cpu"))


class OwnConfig(QwenConfig):
    made: ClassVar[Callable]

    @classmethod
    def from_hf(cls, config):
        return cls.made(config)


class Own(QwenForCausalLM):
    Config = OwnConfig


def replaced(**values):
    return lambda config: dataclasses.replace(QwenConfig.from_hf(config), **values)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda config: config["n_embd"], "Own.Config.from_hf fails on .* .KeyError: 'n_embd'.; correct the class, or the"),
        (lambda config: None, "from_hf fails on .* .TypeError: it returns None, not a dataclass with num_hidden_layers"),
        (replaced(head_dim=-8), "head_dim of Own.Config, read from .*, must be a number >= 1 .*, got -8; correct its from_hf"),
        (replaced(num_key_value_heads=3), "num_attention_heads of Own.Config, read from .*, must be a multiple of"),
        (replaced(num_hidden_layers=999), "num_hidden_layers of Own.Config, read from .*, is 999, but the weights are"),
        (replaced(intermediate_size=7), "the weights do not fit Own; compare its parameters and weight_rules with .*misshaped"),
    ],
)
def test_a_fault_of_a_users_class_is_not_told_as_a_fault_of_the_checkpoint(changed, monkeypatch, made, message):
    monkeypatch.setattr(registry, "_registered", {"Own": Own})
    monkeypatch.setattr(OwnConfig, "made", staticmethod(made), raising=False)
    with pytest.raises(InvalidValueError, match=message) as caught:
        load_model(changed(architectures=["Own"]))
    assert "download" not in str(caught.value).lower()


def test_a_users_model_keeps_its_config(changed, monkeypatch):
    class Forgetful(QwenForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            del self.config

    monkeypatch.setattr(registry, "_registered", {"Own": Forgetful})
    with pytest.raises(InvalidTypeError, match=r"Forgetful.__init__ must keep the config that it is given, as self\.config"):
        on_meta(changed(architectures=["Own"]))


@pytest.mark.parametrize(("prefix", "how"), [("_orig_mod.", "compiled (torch.compile)"), ("module.", "wrapped (DataParallel)")])
def test_names_of_a_compiled_or_wrapped_model_are_explained(changed, prefix, how):
    checkpoint = changed()
    [file] = checkpoint.weight_files
    tensors = {prefix + name: tensor.clone() for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(tensors, file)
    text = (
        f"the names of the weights have '{prefix}', because a {how} model was saved; save the model inside it: model.{prefix}"
    )
    with pytest.raises(WeightsError, match=re.escape(text)):
        load_model(checkpoint)


@pytest.mark.parametrize("architecture", BASES)
def test_no_family_lists_its_layers_before_their_number_is_checked(architecture, tmp_path, monkeypatch):
    path = tiny_models.save(BASES[architecture][0], tmp_path)
    config = json.loads((path / "config.json").read_text())
    config.pop("layer_types", None)
    name = "n_layer" if "n_layer" in config else "num_hidden_layers"
    (path / "config.json").write_text(json.dumps(config | {name: 2**16}))
    with pytest.raises(WeightsError, match=r"num_hidden_layers in .* is 65536, but the weights are \d+ tensors"):
        on_meta(Checkpoint.open(str(path)))
    (path / "config.json").write_text(json.dumps(config | {name: 2**31 - 1}))
    monkeypatch.setattr(find_model(config).Config, "from_hf", pytest.fail)
    with pytest.raises(CheckpointError, match=f"{name} in .* must be a number >= 1 and <= 65536, got 2147483647"):
        on_meta(Checkpoint.open(str(path)))


def test_a_gpu_must_be_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(InvalidValueError, match="device is 'cuda', but torch sees 0 GPUs; use 'cpu'"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("dtype", "config", "tensors", "is_fast", "expected"),
    [
        ("float16", {"dtype": "float32"}, None, True, torch.float16),
        ("half", {"dtype": "float32"}, None, True, torch.float16),
        ("auto", {"dtype": "float64"}, None, True, torch.float32),
        ("auto", {"dtype": "bfloat16"}, None, True, torch.bfloat16),
        ("auto", {"torch_dtype": "bfloat16", "dtype": None}, None, True, torch.bfloat16),
        ("auto", {"dtype": "bfloat16"}, None, False, torch.float32),  # which this CPU is slow at
        ("bfloat16", {"dtype": "bfloat16"}, None, False, torch.bfloat16),  # requested: obeyed
        ("auto", {"dtype": "float16"}, None, True, torch.float32),
        ("auto", {"dtype": "float32"}, torch.bfloat16, True, torch.float32),
        ("auto", {"dtype": None}, torch.bfloat16, True, torch.bfloat16),  # the tensors' own
        ("auto", {"dtype": None}, torch.float32, True, torch.float32),
    ],
)
def test_the_dtype_is_the_one_that_was_chosen_or_the_checkpoints_if_the_cpu_is_fast_at_it(
    changed, monkeypatch, caplog, dtype, config, tensors, is_fast, expected
):
    monkeypatch.setattr(devices, "cpu_has_fast_bf16", lambda: is_fast)
    checkpoint = changed(**config)
    if tensors is not None:
        [file] = checkpoint.weight_files
        save_file({name: tensor.to(tensors) for name, tensor in load_file(file).items()}, file)
    with caplog.at_level(logging.INFO, "nanoinfer.loading"):
        assert {weight.dtype for weight in load_model(checkpoint, dtype).parameters()} == {expected}
    sentence = "the checkpoint is torch.bfloat16, which this CPU is slow at: using float32"
    assert (sentence in caplog.text) == (dtype == "auto" and not is_fast)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_gpu_before_ampere_runs_a_bf16_checkpoint_in_fp16_and_refuses_bf16(changed, monkeypatch, capability, expected):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert resolve_dtype("auto", changed(dtype="bfloat16"), cuda) == expected
    assert resolve_dtype("auto", changed(dtype="float32"), cuda) == resolve_dtype("float", changed(), cuda) == torch.float32
    assert resolve_dtype("auto", changed(dtype="float16"), cuda) == resolve_dtype("half", changed(), cuda) == torch.float16
    if expected is torch.bfloat16:
        assert resolve_dtype("bfloat16", changed(), cuda) == expected
    else:
        with pytest.raises(UnsupportedError, match=r"capability 8\.0 or higher, got Tesla T4; use dtype='float16'"):
            resolve_dtype("bf16", changed(), cuda)


def test_a_dtype_without_a_name_here_is_refused(changed):
    with pytest.raises(UnsupportedError, match="the checkpoint's dtype is 'float8_e4m3fn'; float64"):
        resolve_dtype("auto", changed(dtype="float8_e4m3fn"), CPU)
    with pytest.raises(InvalidValueError, match="dtype must be one of auto, float32"):
        resolve_dtype("int3", changed(), CPU)


def test_a_table_shared_with_a_rounded_head_keeps_its_numbers_where_torch_alone_computes():
    config = EngineConfig(model="tiny-gpt2", device="cpu", quantization="int8", enforce_eager=True)
    table = load_model(Checkpoint.open("tiny-gpt2"), "bfloat16").wte.weight
    assert torch.equal(load(config)[0].model.wte.weight, table)
