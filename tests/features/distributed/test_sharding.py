"""Shards of a model, joined, are the model: every family, 2 and 4 ranks. The ranks are threads of this process."""

import pytest
import torch
import transformers

from nanoinfer.config import EngineConfig
from nanoinfer.errors import UnsupportedError
from nanoinfer.fast.cpu.accelerate import compile_model
from nanoinfer.features.adapters.adapters import Adapters
from nanoinfer.features.distributed.sharding import ShardedWeights, Shards, check_shards, split_of
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.load import load
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.weights import TensorInfo, Weights
from nanoinfer.models.registry import find_model
from tests.helpers import tiny_models
from tests.helpers.lora_adapters import write_requests
from tests.helpers.thread_ranks import Member, on_ranks

ODD_VOCAB_SIZE = 97
IDS = torch.arange(20) * 4 % ODD_VOCAB_SIZE
HALVES = ((0, 10), (10, 20))  # rows of IDS, each of which have an adapter
HEADS = {"gpt2_n_inner": {"n_head": 4}}  # and an inner size of 100, by 4 ranks 25
# Families with layers that are split in a way of their own. The others are read with `-m long`.
OF_THEIR_OWN = ("gpt2", "gpt2_n_inner", "qwen2", "qwen3_tied", "qwen3_one_kv_head", "qwen3_window", "llama_biases")
WITH_EXPERTS = ("qwen2_moe", "qwen3_moe_tied", "gpt_oss_window")


def logits_of(model):
    with torch.inference_mode():
        return model.compute_logits(model(IDS, torch.arange(len(IDS)), HybridDenseAttention()))


def logits_with_adapters(model, requests, shards=None, compiled=lambda model: model):
    """The logits of IDS, of which the rows of HALVES have an adapter each."""
    adapters = Adapters(model, 2, 4, shards)
    model = compiled(model)
    runs = tuple(({"adapter": adapters.get(one)}, *half) for one, half in zip(requests, HALVES, strict=True))
    adapters.begin_step(runs, len(IDS))
    return logits_of(model)


def logits_on_ranks(checkpoint, size, *, optimized=True, dtype="float32", quantization=None, requests=None):
    config = EngineConfig(model=str(checkpoint.path), dtype=dtype, device="cpu", enforce_eager=not optimized)

    def compiled(model):
        return compile_model(model, quantization).model if optimized else model

    def run(communicator):
        shards = Shards(communicator)
        model = load(config, shards)[0].model
        return logits_with_adapters(model, requests, shards, compiled) if requests else logits_of(compiled(model))

    return on_ranks(size, run)


def whole_config(family, **overrides):
    """The family's class and config."""
    name, config = tiny_models.FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{"vocab_size": ODD_VOCAB_SIZE} | config | overrides).to_dict()
    architecture = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model_class = find_model(config | {"architectures": [architecture]})
    return model_class, model_class.Config.from_hf(config)


def on_meta(family, **overrides):
    model_class, config = whole_config(family, **overrides)
    with torch.device("meta"):
        return model_class(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.long] * (family not in OF_THEIR_OWN + WITH_EXPERTS))
        for family in tiny_models.FAMILIES
        if family not in tiny_models.WITH_STATES
    ],
)
def test_ranks_give_the_logits_of_one_also_with_two_adapters_in_a_batch(family, tmp_path):
    path = tiny_models.save(family, tmp_path / "base", vocab_size=ODD_VOCAB_SIZE, **HEADS.get(family, {}))
    checkpoint = Checkpoint.open(str(path))
    requests = write_requests(path, tmp_path, (4, 4))
    plain = logits_of(loader.load_model(checkpoint, "float32"))
    adapted = logits_with_adapters(loader.load_model(checkpoint, "float32"), requests)
    assert all((adapted - plain)[slice(*half)].abs().max() > 0.1 for half in HALVES)
    for size, optimized, adapters in ((2, False, None), (2, False, requests), (2, True, None), (4, True, requests)):
        for logits in logits_on_ranks(checkpoint, size, optimized=optimized, requests=adapters):
            torch.testing.assert_close(logits, adapted if adapters else plain, atol=2e-5, rtol=0)


def test_a_bias_that_every_rank_adds_would_be_noticed(tmp_path, monkeypatch):
    """The negative control: what the test of all families compares can differ."""
    monkeypatch.setattr(ShardedWeights, "_is_added_elsewhere", lambda self, name: False)
    checkpoint = Checkpoint.open(str(tiny_models.save("gpt2", tmp_path, vocab_size=ODD_VOCAB_SIZE)))
    expected = logits_of(loader.load_model(checkpoint, "float32"))
    assert (logits_on_ranks(checkpoint, 2)[0] - expected).abs().max() > 0.1


def test_what_reaches_other_ranks_is_not_called_with_symbols_and_all_else_is_compiled(tmp_path):
    config = EngineConfig(model=str(tiny_models.save("qwen3", tmp_path)), dtype="float32", device="cpu", enforce_eager=True)

    def compiled(communicator):
        report = compile_model(load(config, Shards(communicator))[0].model)
        return report, report.model.forward.__self__.code

    for report, code in on_ranks(2, compiled):
        assert (report.num_plain_linears, report.left) == (0, {})
        assert code.count(".o_proj(") == code.count(".down_proj(") == 2  # called by Python, one in each layer
        assert "q_proj" not in code


@pytest.mark.slow
def test_quantised_shards_give_nearly_the_logits_of_one(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # groups of 32 inputs are on one rank
    checkpoint = Checkpoint.open(str(tiny_models.save("qwen3", tmp_path, vocab_size=ODD_VOCAB_SIZE, **sizes)))
    whole = loader.load_model(checkpoint, "bfloat16")
    plain = logits_of(whole).float()
    expected = logits_of(compile_model(whole, "int8").model).float()
    got = logits_on_ranks(checkpoint, 2, dtype="bfloat16", quantization="int8")[0].float()
    assert (got - expected).norm() < 0.1 * expected.norm()
    assert (got - plain).norm() < 0.1 * plain.norm()


class Numbered(Weights):
    """Tensors that hold the numbers from 0 on, of the shapes that a model's checkpoint has."""

    def __init__(self, model):
        self.num_read = 0
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            shape = shape[::-1] if name.endswith(model.weight_rules.transpose) else shape
            self[name] = TensorInfo(shape, "F32", is_mapped=True)

    def read(self, name, rows=slice(None)):
        tensor = torch.arange(torch.Size(self[name].shape).numel())
        tensor = tensor.view(self[name].shape).float()[rows]
        self.num_read += tensor.numel()
        return tensor


@pytest.mark.parametrize("family", ["gpt2", "gpt2_n_inner", "qwen2", "llama_biases", "qwen2_moe"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_all_ranks_are_every_number_once(family, size):
    heads = {"n_head": 6} if family.startswith("gpt2") else {"num_attention_heads": 6, "num_key_value_heads": 6}
    model = on_meta(family, **heads)
    base = Numbered(model)
    ranks = [ShardedWeights(base, type(model), model.config, rank, size) for rank in range(size)]
    for name in base:
        whole = base.read(name).flatten().sort().values
        parts = [rank.read(name) for rank in ranks]
        for rank, part in zip(ranks, parts, strict=True):
            assert tuple(part.shape) == rank[name].shape
            pieces = [rank.read(name, slice(start, start + 7)) for start in range(0, len(part), 7)]
            assert torch.equal(torch.cat(pieces), part)
        is_added_once = name.endswith(("c_proj.bias", "o_proj.bias", "down_proj.bias"))
        if split_of(type(model), name.rpartition(".")[0]) and not is_added_once:
            assert torch.equal(torch.cat([part.flatten() for part in parts]).sort().values, whole)
        else:
            assert torch.equal(parts[0].flatten(), whole)


def test_a_rank_reads_its_own_rows_and_no_others():
    model = on_meta("qwen3")
    base = Numbered(model)
    for name, parameter in Shards(Member(1, 2)).split(model, base)[0].named_parameters():
        base.num_read = 0
        shard = ShardedWeights(base, type(model), model.config, 1, 2)
        shard.read(name)
        if split_of(type(model), name.removesuffix(".weight")) == "row":  # its columns are a part of every row
            assert not shard[name].is_mapped
        else:
            assert base.num_read == parameter.numel()


@pytest.mark.parametrize(
    ("family", "overrides", "size", "message"),
    [
        ("qwen3", {}, 3, r"tensor_parallel_size must be 1 or 2 or 4 for this model, which has 4 heads and 2 of .*, got 3"),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "must be 1 or 3 or 6 for this model"),
        ("gpt2", {"vocab_size": 15}, 4, "must be 1 or 2 for this model"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused_with_those_that_do(family, overrides, size, message):
    with pytest.raises(UnsupportedError, match=message):
        check_shards(*whole_config(family, **overrides), size)


KINDS = {"colwise": ("column", "kv"), "packed_colwise": ("column",), "rowwise": ("row",)}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_the_table_is_that_of_transformers(family):
    """transformers fuses an expert's gate and up, and names what it does with the sum of experts."""
    name, _ = tiny_models.FAMILIES[family]
    plan = dict(getattr(transformers, f"{name}Config").base_model_tp_plan)
    plan.pop("layers.*.mlp.experts", None)
    model, planned = on_meta(family), set()
    for pattern, kind in plan.items():
        pattern = pattern.replace("experts.gate_up_proj", "experts.gate_proj").replace("experts.", "experts.0.")
        layer = pattern.replace("*", "1" if "experts" in pattern else "0")
        planned.add(layer)
        assert (split_of(type(model), layer) or "none") in KINDS.get(kind, ("none",)), layer
    split = {name for name, _ in model.named_modules() if split_of(type(model), name) in ("column", "kv", "row")}
    ours = {name for name in split if ".0." in name and "expert" not in name}
    assert ours <= planned
    assert "layers.0.self_attn.q_proj" in ours


def test_embedding_and_head_are_split_over_the_vocabulary():
    for family in ("gpt2", "qwen3"):
        model = on_meta(family)
        splits = {name for name, _ in model.named_modules() if split_of(type(model), name) == "vocabulary"}
        assert splits == {"lm_head", model.weight_rules.embedding.removesuffix(".weight")}


def test_a_capture_that_fails_on_one_rank_fails_on_all_and_others_succeed():
    """A rank without the graph would not pad its step, and send another number of rows."""

    def captures(communicator):
        def capture(run):
            if communicator.rank == 1 and run() is None:
                raise RuntimeError("no memory")
            return run, run()

        together = Shards(communicator).together(capture)
        with pytest.raises(RuntimeError, match="no memory" if communicator.rank == 1 else "another rank could not capture it"):
            together(lambda: None)
        return together(lambda: torch.ones(1))[1].item()

    assert on_ranks(3, captures) == [1.0, 1.0, 1.0]
