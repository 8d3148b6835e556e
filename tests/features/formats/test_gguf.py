"""GGUF files give the logits of transformers with the unpacked weights, and the tokens of the checkpoint they are made of."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from nanoinfer import LLM, SamplingParams
from nanoinfer.config import EngineConfig
from nanoinfer.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError, WeightsError
from nanoinfer.fast.cpu.linear import KernelLinear
from nanoinfer.fast.cpu.quantized import PackedQuantizedLinear
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.features.chat.template import apply_chat_template
from nanoinfer.features.formats.gguf import read_gguf
from nanoinfer.features.formats.gguf_families import to_config, to_generation_config
from nanoinfer.features.formats.gguf_tokenizer import tokenizer_from_gguf
from nanoinfer.features.formats.gguf_weights import GGUFWeights
from nanoinfer.features.hybrid.attention import HybridDenseAttention
from nanoinfer.features.quantization import rounding
from nanoinfer.features.quantization.rounding import compare_memory, quantized
from nanoinfer.features.training.stored import StoredParameter
from nanoinfer.load import load
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import BUNDLED, Checkpoint
from nanoinfer.loading.weights import Source
from nanoinfer.tokenization.tokenizer import Tokenizer
from tests.helpers import gguf_files, tiny_models
from tests.helpers.gguf_files import bundled_metadata, floats, random_blocks

PROMPT = torch.arange(1, 41) * 31 % tiny_models.VOCAB_SIZE
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}  # rows of whole K blocks


def logits_here(path, ids):
    model = loader.load_model(Checkpoint.open(str(path)), "float32")
    attention = HybridDenseAttention(getattr(model.config, "state_shapes", ()))
    return model.compute_logits(model(ids, torch.arange(len(ids)), attention))


def save(model, path: Path, tensors=None, **metadata) -> Path:
    tensors = gguf_files.tensors_of(model) if tensors is None else tensors
    return gguf_files.write(path / "model.gguf", gguf_files.metadata_of(model.config) | metadata, tensors)


def file_of(path: Path, metadata=None, **tensors) -> GGUFWeights:
    return GGUFWeights(read_gguf(gguf_files.write(path / "x.gguf", metadata or {}, tensors)))


YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
YARN |= {"truncate": False, "beta_fast": 16.0, "beta_slow": 1.5}
SLIDES = {"hidden_size": 64, "intermediate_size": 96}
GEMMA = SLIDES | {"query_pre_attn_scalar": 16}  # files do not have this one, nor the swiglu_limit
GPT_OSS = SLIDES | {"swiglu_limit": 7.0, "rope_parameters": YARN}
STATES = {"num_hidden_layers": 4, "layer_types": None, "hidden_size": 64, "linear_value_head_dim": 16}
EXPERTS = STATES | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "mlp_only_layers": []}
FAMILIES = "gpt2 gpt2_untied gpt2_n_inner qwen2 qwen2_tied qwen3 qwen3_tied llama llama_biases".split()
# a family, changes of its model, and the types of the matrices of its layers
LOGITS = [(family, {}, ()) for family in FAMILIES]
LOGITS += [("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}, ())]
LOGITS += [("gemma3_window", GEMMA, blocks) for blocks in ((), ("MXFP4", "Q8_0", "Q5_1"))]
LOGITS += [("gpt_oss_window", GPT_OSS, blocks) for blocks in ((), ("MXFP4", "Q8_0", "Q5_1"))]
LOGITS += [("qwen3_5_tied", STATES, ()), ("qwen3_5_moe", EXPERTS, ()), ("qwen3_next", EXPERTS, ())]
LOGITS += [("qwen3", WIDE, ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")), ("qwen3", WIDE, ("Q4_K", "Q5_K", "Q6_K", "Q8_0"))]


@pytest.mark.parametrize(("family", "changes", "blocks"), LOGITS, ids=[" ".join([one[0], *one[2]]) for one in LOGITS])
def test_logits_equal_transformers_with_the_weights_that_ggmls_loops_unpack(family, changes, blocks, tmp_path):
    model, metadata, drafts = tiny_models.build(family, **changes), {}, {}
    if "linear_value_head_dim" in changes:  # the file also has a layer that drafts, which is left out
        drafts = {f"blk.4.{name}.weight": floats(torch.ones(2, 2)) for name in ("eh_proj", "attn_q")}
        architecture = gguf_files.architecture_of(model.config)
        metadata = {f"{architecture}.block_count": 5, f"{architecture}.nextn_predict_layers": 1}
    with torch.inference_mode():
        path = save(model, tmp_path, gguf_files.tensors_of(model, "F32", blocks) | drafts, **metadata)
        ids = PROMPT.repeat(3 if "window" in family else 1)  # five windows
        torch.testing.assert_close(logits_here(path, ids), model(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["attn_qkv", "attn_gate", "ssm_out", "ssm_beta"])
@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_0", "Q4_K"])
def test_blocks_of_value_heads_are_put_in_order_as_floats_are(name, block_type, tmp_path):
    metadata = {"general.architecture": "qwen35", "qwen35.ssm.group_count": 2, "qwen35.ssm.time_step_rank": 8}
    metadata |= {"qwen35.ssm.inner_size": 256}
    shape = {"attn_qkv": (320, 256), "attn_gate": (256, 256), "ssm_out": (64, 256), "ssm_beta": (8, 256)}[name]
    tensor, unpacked = random_blocks(block_type, shape, seed=6)
    blocks = file_of(tmp_path, metadata, **{f"blk.0.{name}.weight": tensor})
    (tmp_path / "floats").mkdir()
    plain = file_of(tmp_path / "floats", metadata, **{f"blk.0.{name}.weight": floats(unpacked)})
    [parameter] = blocks
    whole = plain.read(parameter)
    assert not torch.equal(whole, unpacked)
    for rows in (slice(None), slice(3, 7)):
        torch.testing.assert_close(blocks.read(parameter, rows), whole[rows], atol=0, rtol=1e-6)
        assert torch.equal(plain.read(parameter, rows), whole[rows])
    kept = blocks.integers(parameter)
    assert (kept is None) == (block_type == "Q4_K" or name == "ssm_out")  # the groups of inputs would be of other heads
    if kept is not None:
        torch.testing.assert_close(kept.widened(), whole, atol=0, rtol=1e-6)


@pytest.mark.parametrize("name", gguf_files.UNPACK)
def test_blocks_are_unpacked_as_ggml_unpacks_them_in_whole_and_in_rows(name, tmp_path):
    tensor, expected = random_blocks(name, (7, 512), seed=3)
    weights = file_of(tmp_path, x=tensor, y=floats(torch.ones(2)))
    assert weights["x"].shape == (7, 512)
    torch.testing.assert_close(weights.read("x"), expected, atol=0, rtol=1e-6)
    torch.testing.assert_close(weights.read("x", slice(2, 5)), expected[2:5], atol=0, rtol=1e-6)
    assert len(expected.unique()) > (25 if name == "MXFP4" else 100)  # no block is trivial
    assert (weights.integers("x") is not None) == (name in ("Q4_0", "Q8_0"))
    if (kept := weights.integers("x")) is not None:
        torch.testing.assert_close(kept.widened(), expected, atol=0, rtol=1e-6)


def test_floats_keep_their_dtype_and_the_integers_of_an_expert_are_its_part_of_the_tensor_of_all(tmp_path):
    weight = torch.randn(3, 4)
    for name, dtype in {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.items():
        weights = file_of(tmp_path, x=floats(weight, name))
        assert torch.equal(weights.read("x"), weight.to(dtype))
        assert weights["x"].dtype == name
    tensor, expected = random_blocks("Q8_0", (3, 8, 64), seed=5)
    weights = file_of(tmp_path, {"general.architecture": "gpt-oss"}, **{"blk.0.ffn_up_exps.weight": tensor})
    assert len(weights) == 3
    for expert in range(3):
        kept = weights.integers(f"layers.0.mlp.experts.{expert}.up_proj.weight")
        torch.testing.assert_close(kept.widened(), expected[expert], atol=0, rtol=1e-6)


def test_rows_and_integers_of_llamas_queries_are_in_the_order_of_the_checkpoint(tmp_path):
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
    query = "layers.0.self_attn.q_proj.weight"
    for kind in ("F32", "Q4_0", "Q8_0"):
        tensor = floats(torch.randn(32, 64)) if kind == "F32" else random_blocks(kind, (32, 64), seed=4)[0]
        weights = file_of(tmp_path, metadata, **{"blk.0.attn_q.weight": tensor})
        whole = weights.read(query)  # which is compared above, by its logits
        assert torch.equal(weights.read(query, slice(3, 7)), whole[3:7])
        if kind != "F32":
            torch.testing.assert_close(weights.integers(query).widened(), whole, atol=0, rtol=1e-6)


KINDS = ("F16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "MXFP4")


@pytest.mark.slow
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_layers_that_are_computed_together_keep_their_own_types(first, bits, tmp_path):
    """q, k and v, or gate and up, become one kernel's weight, and a file may have each of them in another type."""
    for second, third in zip(KINDS, KINDS[KINDS.index(first) :] + KINDS[: KINDS.index(first)], strict=True):  # all pairs
        tensors, expected = {}, {}
        for number, (name, kind) in enumerate({"q": first, "k": second, "v": third}.items()):
            weight = random_blocks("Q8_0", (40, 256), number)[1].half().float()
            tensor, unpacked = (floats(weight, kind), weight) if kind == "F16" else random_blocks(kind, (40, 256), number)
            tensors[f"blk.0.attn_{name}.weight"], expected[name] = tensor, unpacked
        weights = file_of(tmp_path, {"general.architecture": "qwen3"}, **tensors)
        linears = [nn.Linear(256, 40, bias=False, device="meta") for _ in weights]
        for linear, name in zip(linears, weights, strict=True):
            linear.weight = StoredParameter.of(linear.weight, Source(weights, name, torch.bfloat16, is_transposed=False))
        pieces = list(quantized([linear.weight for linear in linears], bits))
        assert max(int(piece.integers.max()) for piece in pieces) < 2**bits
        joined, shape = torch.cat([piece.widened() for piece in pieces]), (1, (-1, pieces[0].group_size))
        for found, kind, exact in zip(joined.split(40), (first, second, third), expected.values(), strict=True):
            if kind in ("Q4_0", "Q8_0")[: bits // 4]:  # these keep their integers
                torch.testing.assert_close(found, exact, atol=0, rtol=1e-6)
                continue
            groups = exact.unflatten(*shape)
            low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
            step = (high - low) / 15 if bits == 4 else groups.abs().amax(2) / 127
            allowed = 1.1 * step.unsqueeze(2) + 2**-8 * groups.abs()  # 0.5 to the next integer, and bfloat16's
            assert ((found - exact).abs().unflatten(*shape) <= allowed).all(), (kind, shape)
        x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        kernel = KernelLinear(PackedQuantizedLinear(FusedLinear(*linears), bits))
        exact = x.float() @ joined.T
        rounding = x.float().abs().max() / 254 * joined.abs().sum(1)  # of activations to 8 bits
        assert ((kernel(x).float() - exact).abs() <= rounding + 2**-8 * exact.abs()).all()


# ---- config


def llama_file(path, tensors=(), **metadata):
    sizes = {"embedding_length": 64, "feed_forward_length": 96, "block_count": 1, "context_length": 131072}
    sizes |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0}
    metadata = {f"llama.{key}": value for key, value in (sizes | metadata).items() if value is not None}
    tensors = {"token_embd.weight": floats(torch.zeros(32, 64))} | dict(tensors)
    return read_gguf(gguf_files.write(path / "llama.gguf", {"general.architecture": "llama"} | metadata, tensors))


def test_the_config_is_that_of_config_json(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": 32}
    config |= {"tie_word_embeddings": True, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
    config |= {"num_attention_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}  # not 9.999999747378752e-06
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    assert to_config(llama_file(tmp_path)) == config


def llama3_factors(factor):
    """As convert_hf_to_gguf.py computes rope_freqs.weight for a head of 16."""
    factors = []
    for i in range(0, 16, 2):
        wavelen = 2 * math.pi * 500000.0 ** (i / 16)
        smooth = (8192 / wavelen - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wavelen < 8192 / 4 else factor if wavelen > 8192 / 1 else between)
    return torch.tensor(factors)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_table_of_frequencies_becomes_its_rope_parameters(factor, tmp_path):
    table = llama3_factors(factor)
    assert len(table.unique()) == 3  # short waves, long ones, and one between
    frequencies = {"rope_freqs.weight": floats(table)}
    expected = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    expected |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert llama_rope(tmp_path, frequencies) == llama_rope(tmp_path, frequencies, **{"scaling.factor": 1.0}) == expected
    with pytest.raises(UnsupportedError, match=r"rope_freqs.weight and llama\.rope\.scaling in .* not supported together"):
        llama_rope(tmp_path, frequencies, **{"scaling.factor": 4.0})
    table[4] *= 1.01
    with pytest.raises(UnsupportedError, match=r"rope_freqs.weight in .* is not Llama 3's table"):
        llama_rope(tmp_path, {"rope_freqs.weight": floats(table)})


def llama_rope(path, tensors=(), **metadata):
    return to_config(llama_file(path, tensors, **{f"rope.{key}": one for key, one in metadata.items()}))["rope_parameters"]


YARN_KEYS = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32768}
FACTORS = [  # as llama.cpp's load_hparams reads them
    ({"scaling.factor": 4.0}, ("linear", 4.0)),
    ({"scale_linear": 4.0}, ("linear", 4.0)),
    ({"scaling.type": "linear", "scale_linear": 4.0}, ("linear", 4.0)),
    ({"scaling.type": "linear", "scaling.factor": 2.0, "scale_linear": 4.0}, ("linear", 2.0)),
    ({"scaling.factor": 2.2}, ("linear", 2.2)),
    ({"scaling.factor": 0.0, "scale_linear": 4.0}, ("default", None)),
    ({"scaling.type": "none", "scaling.factor": 4.0}, ("default", None)),
    ({"scaling.type": "linear"}, ("default", None)),
    ({"scaling.type": "yarn"}, ("default", None)),
    (YARN_KEYS, ("yarn", 4.0)),
    ({"scale_linear": 1.0, "dimension_count": 16, "scaling.finetuned": True}, ("default", None)),
    ({"scaling.attn_factor": 1.0, "freq_base": 5e5, "freq_base_swa": 5e5}, ("default", None)),  # they say nothing
    ({"scaling.type": "none", "scaling.yarn_log_multiplier": 0.1}, ("default", None)),
]


def test_a_factor_of_rope_is_taken_from_the_keys_that_llama_cpp_reads(tmp_path):
    for metadata, expected in FACTORS:
        rope = llama_rope(tmp_path, **metadata)
        assert (rope["rope_type"], rope.get("factor")) == expected
    rope = llama_rope(tmp_path, **YARN_KEYS, **{"scaling.yarn_beta_fast": 16.0})
    assert (rope["original_max_position_embeddings"], rope["beta_fast"]) == (32768, 16.0)


UNSUPPORTED = [
    ({"rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type='longrope' in .*; none, linear and yarn are"),
    ({"rope.scaling.attn_factor": 1.2}, r"llama\.rope\.scaling\.attn_factor in .* is not supported"),
    ({"rope.scaling.type": "linear", "rope.scaling.yarn_log_multiplier": 0.1}, r"yarn_log_multiplier in .* is not supported"),
    ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor in"),
    ({"rope.freq_base_swa": 1e6}, r"llama\.rope\.freq_base_swa in .* is not supported"),
    ({"rope.dimension_count_swa": 8}, r"rotates 8 of the 16 numbers of a head"),
    ({"rope.dimension_count": 8}, r"rotates 8 of the 16 numbers of a head"),
    ({"expert_count": 8}, r"llama\.expert_count=8 in .* is not supported"),
    ({"attention.sliding_window": 4096}, r"llama\.attention\.sliding_window=4096 in .* is not supported"),
]


LLAMA = {"general.architecture": "llama"}
REFUSED = [  # metadata, tensors, and what is said
    ({"general.architecture": "gemma2"}, {}, UnsupportedError, "architecture 'gemma2'; llama, .*, gpt-oss, qwen35, .* are"),
    ({}, {}, UnsupportedError, "architecture 'None'"),
    ({"split.count": 3}, {}, UnsupportedError, "one of 3 parts.*llama-gguf-split --merge"),
    ({}, {"x": (10, (1, 256), bytes(84))}, UnsupportedError, "'x' in .* has the type Q2_K, which is not supported; take"),
    ({}, {"x": (15, (1, 256), bytes(292))}, UnsupportedError, "has the type Q8_K, which is not supported"),
    ({}, {"x": (26, (1, 8), bytes(32))}, UnsupportedError, "has the type I32, which is not supported"),
    ({}, {"x": (99, (1, 256), b"")}, UnsupportedError, "'x' in .* has the type 99"),
    (LLAMA, {}, WeightsError, "has no token_embd.weight"),
    (LLAMA | {"general.type": "adapter"}, {}, UnsupportedError, "a LoRA adapter, .* lora="),
]


def test_what_is_not_supported_is_refused_by_name(tmp_path):
    for metadata, tensors, error, sentence in REFUSED:
        path = gguf_files.write(tmp_path / "x.gguf", metadata, tensors)
        with pytest.raises(error, match=sentence):
            Checkpoint.open(str(path))
    for keys, sentence in UNSUPPORTED:
        with pytest.raises(UnsupportedError, match=sentence):
            to_config(llama_file(tmp_path, **keys))


def test_tensors_and_metadata_that_are_missing_unknown_or_of_another_type_are_reported_by_name(tmp_path):
    model = tiny_models.build("qwen3")
    tensors = gguf_files.tensors_of(model)
    for changes, sentence in (
        ({"qwen3.attention.head_count": [4, 4]}, "of the wrong type|num_attention_heads"),
        ({"qwen3.block_count": 2**31 - 1}, "num_hidden_layers in .*model.gguf must be a number >= 1 and <= 65536"),
        ({"qwen3.block_count": 2**16}, "num_hidden_layers in .*model.gguf is 65536, but the weights are"),
        ({"qwen3.embedding_length": "48"}, "hidden_size in .* must be a number|wrong type"),
        ({"tokenizer.ggml.eos_token_id": [1, 2]}, r"eos_token_id in .* must be an id or a list of ids, got \[\[1, 2\]\]"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            load(EngineConfig(model=str(save(model, tmp_path, tensors, **changes)), device="cpu"))
    tensors["blk.0.ffn_gate_exps.weight"] = tensors.pop("blk.1.ffn_up.weight")
    with pytest.raises(WeightsError, match=r"unexpected: blk.0.ffn_gate_exps.weight; missing: layers.1.mlp.up_proj.weight"):
        logits_here(save(model, tmp_path, tensors), PROMPT)


def test_blocks_in_a_parameter_of_one_axis_are_refused(tmp_path):
    for family, name, more in (("qwen3", "output_norm.weight", {}), ("gpt_oss_window", "blk.0.ffn_up_exps.bias", GPT_OSS)):
        model = tiny_models.build(family, **SLIDES | more)
        tensors = gguf_files.tensors_of(model)
        path = save(model, tmp_path, tensors | {name: random_blocks("Q8_0", tensors[name][1])[0]})
        with pytest.raises(WeightsError, match=r"' in .* has one axis and the type Q8_0, whose blocks are of matrices"):
            loader.load_model(Checkpoint.open(str(path)))


# ---- finding the file


def test_a_folder_with_one_gguf_file_is_that_file_and_one_with_several_names_them(tmp_path):
    model = tiny_models.build("qwen3")
    path = save(model, tmp_path)
    assert Checkpoint.open(str(tmp_path)).file == Checkpoint.open(str(path)).file
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"holds model.gguf, other.gguf; give the path of one of them"):
        Checkpoint.open(str(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match="there is no file 'missing"):
        Checkpoint.open("missing.gguf")
    with pytest.raises(CheckpointError, match="has no revision 'v2'"):
        Checkpoint.open(str(path), "v2")


# ---- the tokenizer


TEXTS = ["Once upon a time, Lily was 12.", "<|im_start|>user\nHi<|im_end|>", "  two  spaces\n\n1234 über 😀 don't", ""]


def test_a_byte_level_tokenizer_gives_the_tokens_of_tokenizer_json():
    ours = tokenizer_from_gguf(bundled_metadata(), Path("x.gguf"))
    theirs = Tokenizer.load(BUNDLED / "tiny-qwen3")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(theirs.encode(text), skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "Hi"}]
    assert apply_chat_template(ours, messages) == apply_chat_template(theirs, messages)
    assert ours.hf.eos_token == "<|im_end|>"
    changes = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert tokenizer_from_gguf(bundled_metadata(**changes), Path("x.gguf")).encode("Once") == [1, *ours.encode("Once"), 2]


SPLITS = [
    ("gpt-2", "a 1234 b", ["a", "Ġ1234", "Ġb"]),
    ("smollm", "a 1234 b", ["a", "Ġ", "1", "2", "3", "4", "Ġb"]),
    ("qwen2", "a 1234 b", ["a", "Ġ", "1", "2", "3", "4", "Ġb"]),
    ("llama-bpe", "a 1234 b", ["a", "Ġ", "123", "4", "Ġb"]),
    ("qwen2", "I'M\n\n x", ["I", "'M", "ĊĊ", "Ġx"]),
    ("gpt-2", "I'M\n\n x", ["I", "'", "M", "ĊĊ", "Ġx"]),
    ("gpt-4o", "a 1234 I'Mm/\n x", ["a", "Ġ", "123", "4", "ĠI'M", "m", "/Ċ", "Ġx"]),
    ("gpt-4o", "theHTTPServer", ["the", "HTTPServer"]),
]


def test_a_text_is_split_into_the_words_of_its_vocabulary():
    for split, text, words in SPLITS:
        changes = {"tokenizer.ggml.pre": split, "tokenizer.ggml.bos_token_id": 1}
        backend = tokenizer_from_gguf(bundled_metadata(**changes), Path("x.gguf")).backend
        assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == words


def test_qwen35_splits_and_normalises_text_as_transformers_tokenizer():
    backend = tokenizer_from_gguf(bundled_metadata(**{"tokenizer.ggml.pre": "qwen35"}), Path("x.gguf")).backend
    theirs = Qwen3_5Tokenizer().backend_tokenizer
    for text in [*TEXTS, "ni\u0308n\u0303o it's", "\u0915\u094d\u0937 1234 \u0301!"]:
        assert backend.normalizer.normalize_str(text) == theirs.normalizer.normalize_str(text)
        assert backend.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


def sentencepiece_metadata():
    pieces = {"▁": -1.0, "l": -2.0, "o": -3.0, "w": -4.0, "e": -5.0, "r": -6.0, "lo": -7.0, "ow": -6.5, "low": -8.0}
    pieces |= {"▁l": -9.0, "er": -6.2, "▁low": -10.0, "lower": -11.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {"model": "llama", "tokens": tokens, "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)]}
    metadata |= {"scores": [0.0] * 259 + list(pieces.values()), "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


PIECES = {  # SentencePiece joins the pair whose piece has the best score, until none is left
    "low": ["▁low"],
    "lower lower": ["▁low", "er", "▁low", "er"],
    "wolower": ["▁", "w", "o", "lower"],
    "rewlo  low": ["▁", "r", "e", "w", "lo", "▁", "▁low"],
    "é low": ["▁", "<0xC3>", "<0xA9>", "▁low"],
    "😀": ["▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"],
}


def test_a_sentencepiece_tokenizer_joins_the_pair_with_the_best_score():
    metadata = sentencepiece_metadata()
    tokenizer, tokens = tokenizer_from_gguf(metadata, Path("x.gguf")), metadata["tokenizer.ggml.tokens"]
    for text, pieces in PIECES.items():
        ids = tokenizer.encode(text)
        assert [tokens[token_id] for token_id in ids] == ["<s>", *pieces]  # BOS, unless the file says otherwise
        assert tokenizer.decode(ids) == f" {text}"  # the space is kept: a text may begin with one


CORRUPTED = [
    ({"pre": "tekken"}, UnsupportedError, r"'gpt2' with the splitting 'tekken'.*Pass LLM\(tokenizer="),
    ({"model": "t5"}, UnsupportedError, "is 't5' with the splitting"),
    ({"merges": ["a b c"]}, CheckpointError, "cannot be used"),
    ({"merges": ["never seen"]}, CheckpointError, "cannot be used"),
    ({"merges": 5}, CheckpointError, "cannot be used"),
    ({"tokens": [1, 2]}, CheckpointError, "cannot be used"),
    ({"model": "llama"}, CheckpointError, "cannot be used"),  # no scores
    ({"model": "llama", "tokens": ["a" * 2**21, "b"]}, CheckpointError, "more than 2097152"),
]


def test_a_tokenizer_that_is_not_supported_or_corrupted_is_refused():
    for changes, error, sentence in CORRUPTED:
        metadata = bundled_metadata(**{f"tokenizer.ggml.{key}": value for key, value in changes.items()})
        with pytest.raises(error, match=sentence):
            tokenizer_from_gguf(metadata, Path("x.gguf"))


def test_ends_without_an_id_of_eot_are_the_control_tokens_that_llama_cpp_knows():
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|call|>", "<|eot_id|>", "<end_of_turn>", "<|return|>"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 3, 3, 3, 3, 4, 3, 3]}

    def ends(**ids):
        given = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()}
        return to_generation_config(SimpleNamespace(metadata=metadata | given)).get("eos_token_id")

    assert ends(eos=2) == [2, 1, 6, 7, 4]  # neither <|end|>, which gpt-oss has within an answer, nor a token of another kind
    assert ends() == [1, 6, 2, 7, 4]
    assert ends(eos=2, eot=1) == [2, 1]
    for name, value in (("tokens", 5), ("token_type", None), ("token_type", [3])):
        broken = metadata | {f"tokenizer.ggml.{name}": value, "tokenizer.ggml.eos_token_id": 2}
        assert to_generation_config(SimpleNamespace(metadata=broken))["eos_token_id"] == [2]


# ---- all of it


def test_a_gguf_file_chats_ends_its_text_and_runs_in_8_bits(tmp_path):
    checkpoint = Checkpoint.open("tiny-qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path)
    metadata = bundled_metadata(**{"tokenizer.ggml.eot_token_id": 0})
    path = save(model, tmp_path, gguf_files.tensors_of(model, "BF16"), **metadata)
    assert to_generation_config(read_gguf(path)) == {"eos_token_id": [2, 0]}
    params = SamplingParams(temperature=0, max_tokens=12)
    chat = [{"role": "user", "content": "Tell me a story about Lily"}]
    answers = []
    for model_name, quantization in ((checkpoint.path, None), (path, None), (path, "int8")):
        llm = LLM(model_name, dtype="bfloat16", quantization=quantization, kv_cache_memory=2**22, enforce_eager=True)
        [output] = llm.chat(chat, params, use_tqdm=False)
        answers.append(output.outputs[0].text)
    assert answers[1] == answers[0]
    assert answers[2]


def in_blocks(path, block_type):
    """A file of a model with a tied head, with all matrices in blocks."""
    model = tiny_models.build("qwen3_tied", **SLIDES)
    tensors = gguf_files.tensors_of(model, "F16", (block_type,))
    tensors["token_embd.weight"], _ = random_blocks(block_type, tuple(model.lm_head.weight.shape))
    return save(model, path, tensors)


@pytest.mark.parametrize(("block_type", "quantization"), [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_the_embedding_of_a_tied_head_is_read_from_its_integers_without_a_loss(block_type, quantization, tmp_path):
    path = in_blocks(tmp_path, block_type)
    table = loader.load_model(Checkpoint.open(str(path)), "bfloat16").embed_tokens.weight
    embedding = LLM(str(path), quantization=quantization).engine.executor.runner.model.embed_tokens
    if isinstance(embedding, nn.Embedding):
        pytest.skip("no C++ compiler")
    assert torch.equal(embedding(torch.arange(len(table))), table)


def test_a_quantised_file_says_what_it_would_take_in_fewer_bits(tmp_path, caplog, monkeypatch):
    path, large = in_blocks(tmp_path, "Q4_0"), nn.Linear(512, 200_000, bias=False, device="meta")  # 102 million weights
    monkeypatch.setattr(rounding, "compare_memory", lambda _, *given: compare_memory(large, *given))
    for quantization, num_lines in ((None, 1), ("int4", 0)):
        caplog.clear()
        load(EngineConfig(model=str(path), dtype="bfloat16", quantization=quantization, device="cpu"))
        lines = [record.getMessage() for record in caplog.records if "bits per weight" in record.getMessage()]
        text = "4.9 bits per weight run in bfloat16 and take 0.2 GB; quantization='int8' takes 0.1 GB, 'int4' 0.1 GB"
        assert lines == [text][:num_lines]
