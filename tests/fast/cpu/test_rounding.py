"""Weights in 4 bits by moments: smaller errors, the same integers everywhere, and the moments of the textbook's layers."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from nanoinfer import LLM
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.fast.cpu import calibration, packs
from nanoinfer.fast.cpu.quantized import PackedQuantizedLinear, rounded
from nanoinfer.features.distributed.sharding import ShardedWeights
from nanoinfer.features.quantization.rounding import quantize
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import BUNDLED, Checkpoint
from nanoinfer.loading.weights import TensorInfo, Weights
from tests.helpers import tiny_models
from tests.helpers.lora_adapters import linear_shapes, write_adapter
from tests.helpers.precompiled import in_new_cache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels")]
SETTINGS = {"kv_cache_memory": 2**22, "max_model_len": 64, "skip_tokenizer_init": True}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of packed weights and moments, in a new cache."""
    monkeypatch.setenv("NANOINFER_CACHE", str(in_new_cache(tmp_path / "cache")))
    return tmp_path / "cache" / "packed"


def example(group_size=64, num_groups=3, num_out=40):
    """Weights, and moments of which a few are a hundred times as large as most."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(num_out, num_groups, group_size, generator=generator)
    return weights, torch.randn(num_groups * group_size, generator=generator).exp().pow(3)


def widened(groups, integers, scales, zeros):
    return (integers.view(groups.shape).float() - zeros.unsqueeze(2)) * scales.unsqueeze(2)


def error(groups, found, moments):
    """The squared errors of the outputs, if inputs are independent of each other."""
    return ((widened(groups, *found) - groups).square() * moments.view(groups.shape[1:])).sum((1, 2))


@pytest.mark.parametrize("group_size", [32, 64])
def test_every_output_is_nearer_than_with_the_whole_range_and_no_tried_range_is_better(group_size):
    groups, moments = example(group_size)
    found = rounded(groups, moments)
    plain = quantize(groups.flatten(1), 4, group_size)
    errors = error(groups, found, moments)
    assert (errors <= error(groups, (plain.integers, plain.scales, plain.zeros), moments) * 1.0001).all()
    assert errors.sum() < 0.8 * error(groups, (plain.integers, plain.scales, plain.zeros), moments).sum()
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    for share in (0.84, 0.93, 0.99):
        scales = (high - low) / 15 * share
        zeros = (-low / scales).round().clamp(0, 15)
        integers = ((groups / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, 15).flatten(1)
        assert (errors <= error(groups, (integers, scales, zeros), moments) * 1.0001).all()


def test_an_input_without_a_moment_counts_as_much_as_the_mean_and_the_unit_of_moments_does_not_matter():
    groups, moments = example()
    moments[::7] = 0
    filled = torch.where(moments > 0, moments, moments[moments > 0].double().mean().float())
    for given in (filled, moments * 4, torch.where(moments > 0, moments, float("nan"))):
        assert all(map(torch.equal, rounded(groups, given), rounded(groups, moments)))
    assert all(map(torch.equal, rounded(groups, torch.zeros(192)), rounded(groups, torch.ones(192))))


def test_a_group_of_zeros_stays_zeros_and_weights_that_are_not_finite_change_no_other_group():
    groups, moments = example()
    expected = widened(groups, *rounded(groups, moments))
    groups[3, 1], groups[5, 0, 7], groups[6, 2, 0] = 0, float("nan"), float("inf")
    found = widened(groups, *rounded(groups, moments))
    assert (found[3, 1] == 0).all()
    changed = torch.zeros(groups.shape[:2], dtype=torch.bool)
    changed[3, 1] = changed[5, 0] = changed[6, 2] = True
    assert torch.equal(found[~changed], expected[~changed])


def arrays_of(llm):
    """The integers, scales and zeros of all layers, and the number of layers that were rounded by moments."""
    held = llm.engine.executor.runner.weights._kernel_weights.values()
    found = [weight for weights in held for weight, _ in weights if isinstance(weight, PackedQuantizedLinear)]
    return [array for weight in found for array in weight.arrays()], sum(one._in_four_bits is not None for one in found)


def textbook_moments(path, ids):
    model = loader.load_model(Checkpoint.open(str(path)), "float32")
    moments = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_pre_hook(lambda _, x, n=name: moments.__setitem__(n, x[0].double().square().sum(0)))
    with torch.inference_mode():
        model.compute_logits(model(torch.tensor(ids), torch.arange(len(ids)), DenseAttention()))
    return {f"{name}.weight": values for name, values in moments.items()}, model.weight_rules


def measured(monkeypatch):
    """The moments that the next engine computes, by the names of the checkpoint."""
    seen, run = {}, calibration._measured

    def recording(*given):
        seen.update(run(*given))
        return seen

    monkeypatch.setattr(calibration, "_measured", recording)
    return seen


@pytest.mark.parametrize("model", [pytest.param("tiny-qwen3", marks=pytest.mark.long), "tiny-gpt2"])
def test_moments_are_the_sums_of_squares_of_what_the_textbooks_layers_are_given(folder, tmp_path, monkeypatch, model):
    seen, text = measured(monkeypatch), tmp_path / "text"
    text.write_text("Once upon a time, there was a kind mouse named Anna. " * 3)
    with LLM(model, quantization="int4", calibration=text, kv_cache_memory=2**22, max_model_len=64) as llm:
        ids = llm.engine.tokenizer.encode(text.read_text())
        assert arrays_of(llm)[1] > 0
    expected, rules = textbook_moments(BUNDLED / model, ids)
    named = {name.removeprefix(rules.prefix): values for name, values in seen.items()}
    if rules.head not in named:  # tied
        named[rules.head] = named[rules.embedding]
    for name, values in expected.items():
        torch.testing.assert_close(named[name].double(), values, rtol=1e-4, atol=1e-6 * float(values.max()))


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss_window"])
def test_layers_with_states_or_experts_have_moments_too(folder, tmp_path, monkeypatch, family):
    seen = measured(monkeypatch)
    path = tiny_models.save(family, tmp_path, hidden_size=64, **({} if "oss" in family else {"intermediate_size": 128}))
    with LLM(str(path), quantization="int4", **SETTINGS) as llm:
        _, num_by_moments = arrays_of(llm)
    assert num_by_moments > 0
    assert all(values.isfinite().all() for values in seen.values())
    assert sum(bool(values.any()) for values in seen.values()) > len(seen) // 2


def test_the_second_start_reads_the_moments_and_another_text_replaces_what_was_kept(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "MIN_BYTES", 0)
    text = tmp_path / "text"
    text.write_text("Water boils at 100 degrees. " * 20)
    given = {"quantization": "int4", "kv_cache_memory": 2**22, "max_model_len": 64}
    first, num = arrays_of(LLM(**given))
    contents = {path.suffix: path.read_bytes() for path in folder.glob("*.*")}
    assert num > 0
    assert contents.keys() == {".moments", ".weights"}
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "_measured", None)  # nothing is computed
        assert all(map(torch.equal, arrays_of(LLM(**given))[0], first))
    assert not all(map(torch.equal, arrays_of(LLM(**given, calibration=text))[0], first))
    assert {path.suffix for path in folder.glob("*.*") if path.read_bytes() != contents[path.suffix]} == contents.keys()
    assert all(map(torch.equal, arrays_of(LLM(**given))[0], first))


def test_drafts_in_4_bits_are_rounded_by_moments_and_updates_keep_them(folder):
    llm = LLM(dtype="float32", speculative_config={"method": "quantized", "bits": 4}, **SETTINGS)
    before, num = [array.clone() for array in arrays_of(llm)[0]], arrays_of(llm)[1]
    assert num > 0
    llm.update_weights_from_path(str(BUNDLED / "tiny-qwen3"))
    assert all(map(torch.equal, arrays_of(llm)[0], before))
    weight = loader.load_model(Checkpoint.open("tiny-qwen3")).layers[0].mlp.down_proj.weight
    llm.update_weights([("model.layers.0.mlp.down_proj.weight", weight * 1.5)])
    assert not all(map(torch.equal, arrays_of(llm)[0], before))


def refused_pass(*given):
    raise AssertionError("the model ran for nothing")


def without_compiler(*source, structures=()):
    raise UnsupportedError("no C++ compiler works (there is no g++)")


def keep_integers(patch):
    """Every layer has integers of 4 bits in the checkpoint, as in a file in Q4_0."""
    patch.setattr(calibration, "stored_integers", lambda weight, bits: weight)


def test_a_folder_that_receives_no_file_is_found_before_the_pass(folder, monkeypatch, caplog):
    monkeypatch.setattr(calibration, "_measured", refused_pass)
    monkeypatch.setattr(packs.os, "access", lambda path, mode: mode != os.W_OK or not str(path).endswith("packed"))  # read-only
    assert arrays_of(LLM(quantization="int4", **SETTINGS))[1] == 0
    [line] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("weights are rounded to 4 bits without calibration, which costs quality: moments cannot be kept: ")


def test_with_a_merged_adapter_weights_are_rounded_plainly_and_one_line_says_so(folder, tmp_path, caplog):
    write_adapter(tmp_path / "adapter", linear_shapes(BUNDLED / "tiny-qwen3"), rank=4, r=4, lora_alpha=64)
    assert arrays_of(LLM(quantization="int4", lora=str(tmp_path / "adapter"), **SETTINGS))[1] == 0
    [line] = [record.message for record in caplog.records if "without calibration" in record.message]
    assert "checkpoints without merged adapters" in line


@pytest.mark.parametrize("why", ["enforce_eager", "no compiler"])
def test_where_only_torch_computes_one_line_says_that_weights_are_rounded_plainly(monkeypatch, caplog, why):
    if why == "no compiler":
        monkeypatch.setattr("nanoinfer.fast.cpu.native.load", without_compiler)
    for quantization, num_lines in (("int8", 0), ("int4", 1)):
        caplog.clear()
        LLM(quantization=quantization, enforce_eager=why == "enforce_eager", **SETTINGS)
        lines = [record.message for record in caplog.records if "without calibration" in record.message]
        assert len(lines) == num_lines
    assert lines[0].endswith("only torch computes, as with enforce_eager and without a compiler")


def test_a_calibration_that_cannot_be_used_is_refused(folder, tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.write_text("Once upon a time")
    (tmp_path / "empty").write_text("")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x80")

    def refused(error, message, calibration=text, **more):
        with pytest.raises(error, match=message):
            LLM(**{"quantization": "int4", "kv_cache_memory": 2**22} | more, calibration=calibration)

    for name, why in (("empty", "it has no tokens"), ("bytes", "codec"), ("missing", "No such file")):
        refused(InvalidValueError, f"calibration must be a text file.*{why}", tmp_path / name)
    for more in ({"quantization": None}, {"quantization": "int8"}, {"enforce_eager": True}):
        refused(InvalidValueError, "calibration='text' needs weights that are rounded to 4 bits", "text", **more)
    with monkeypatch.context() as patch:
        keep_integers(patch)
        refused(UnsupportedError, "calibration cannot be used: the checkpoint has integers of 4 bits")
    with monkeypatch.context() as patch:
        patch.setattr("nanoinfer.fast.cpu.native.load", without_compiler)
        refused(UnsupportedError, r"calibration needs C\+\+ kernels: no C\+\+ compiler works")
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("")
    refused(UnsupportedError, r"calibration cannot be used: .* cannot be kept.*NANOINFER_CACHE; or leave")


def test_where_the_checkpoints_integers_are_kept_no_moments_are_computed(folder, monkeypatch, caplog):
    keep_integers(monkeypatch)
    monkeypatch.setattr(calibration, "_measured", refused_pass)
    assert arrays_of(LLM(quantization="int4", **SETTINGS))[1] == 0
    assert "without calibration" not in caplog.text


class _Names(Weights):
    """Names and shapes without numbers."""


def test_a_rank_gets_the_moments_of_its_inputs():
    model, _ = loader.on_meta(Checkpoint.open("tiny-qwen3"))
    whole, prefix = _Names(), model.weight_rules.prefix
    whole |= {f"{prefix}{name}": TensorInfo(tuple(one.shape), "F32") for name, one in model.named_parameters()}
    sharded = ShardedWeights(whole, type(model), model.config, 1, 2)
    size = model.config.intermediate_size
    found = sharded.inputs(f"{prefix}layers.0.mlp.down_proj.weight", torch.arange(size))
    assert found.tolist() == list(range(size // 2, size))
    for name in ("layers.0.mlp.gate_proj.weight", "embed_tokens.weight", "layers.0.self_attn.k_proj.weight"):
        values = torch.arange(model.config.hidden_size)
        assert torch.equal(sharded.inputs(prefix + name, values), values)


_INTEGERS = """
import hashlib, sys, torch
from nanoinfer import LLM
from tests.fast.cpu.test_rounding import SETTINGS, arrays_of
if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    arrays, num = arrays_of(LLM(quantization="int4", **SETTINGS))
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.numpy().tobytes())
    print(num, digest.hexdigest())
"""


@pytest.mark.long
def test_integers_are_the_same_with_other_instructions_of_torch_and_other_numbers_of_threads(tmp_path):
    told = set()
    for capability, threads in (("default", 1), ("avx2", 2), ("avx512", 1), ("avx512", 2)):
        given = {"ATEN_CPU_CAPABILITY": capability, "NANOINFER_CACHE": str(in_new_cache(tmp_path / f"{capability}{threads}"))}
        command = [sys.executable, "-c", _INTEGERS, str(threads)]
        child = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=600)
        assert child.returncode == 0, child.stderr
        told.add(tuple(child.stdout.split()[-2:]))
    [(num_by_moments, _)] = told
    assert int(num_by_moments) > 0
