"""Translate a GGUF file's metadata and tensors: config.json and generation_config.json as the model's family reads them.

In: a GGUFFile. Out: dicts with the keys of config.json, and the parameter that each tensor fills. Metadata that changes the
arithmetic is honoured or refused by name.
Source: gguf/constants.py and convert_hf_to_gguf.py of https://github.com/ggml-org/llama.cpp
"""

import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from nanoinfer.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError, WeightsError, first_ten, shown
from nanoinfer.features.formats.gguf import GGUFFile, read_gguf
from nanoinfer.loading.checkpoint import Checkpoint, check_file
from nanoinfer.loading.folders import list_folder
from nanoinfer.models.registry import MODELS
from nanoinfer.models.rope import RopeConfig, rope_frequencies

if TYPE_CHECKING:
    from nanoinfer.features.formats.gguf_weights import GGUFWeights
    from nanoinfer.tokenization.tokenizer import Tokenizer

# general.architecture -> architecture in config.json
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # also for Mistral, SmolLM2, TinyLlama and Yi
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3_5MoeForCausalLM",  # its projections are stored like those of Qwen3.5
}
WITH_STATES = ("qwen35", "qwen35moe", "qwen3next")

# Keys of an architecture that change its arithmetic. Absent or 0: the option is off.
_REFUSED = {"expert_count", "attention.sliding_window", "attention.scale", "logit_scale", "embedding_scale", "residual_scale"}
_HONOURED = {"gemma3": {"attention.sliding_window"}, "gpt-oss": {"attention.sliding_window", "expert_count"}}
_HONOURED |= {"qwen35moe": {"expert_count"}, "qwen3next": {"expert_count"}}

_LLAMA_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA3_NAMES = _LLAMA_NAMES | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_EXPERT_NAMES = _LLAMA_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_exps": "mlp.experts.gate_proj",  # a tensor of all experts, which gguf_weights.py divides
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GPT_OSS_NAMES = _EXPERT_NAMES | {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
_QWEN_NEXT_NAMES = _EXPERT_NAMES | {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_ba": "linear_attn.in_proj_ba", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_WITHOUT_MODULE = ("attn_sinks", "ssm_a", "ssm_dt")  # tensors that are parameters of the layer itself
_GPT2_NAMES = {
    "token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "output": "lm_head", "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
_NAMES = {"gpt2": _GPT2_NAMES, "gemma3": _GEMMA3_NAMES, "gpt-oss": _GPT_OSS_NAMES}  # others have _LLAMA_NAMES
_NAMES |= dict.fromkeys(WITH_STATES, _QWEN_NEXT_NAMES)
_TENSOR = re.compile(r"(blk\.(?P<layer>\d{1,6})\.)?(?P<name>\w+?)(?P<kind>|\.weight|\.bias)")

# The key of a size in config.json -> its key in the file. Families with experts add theirs to Llama's.
_GPT2_SIZES = {
    "n_embd": "embedding_length", "n_inner": "feed_forward_length", "n_layer": "block_count", "n_head": "attention.head_count",
    "n_positions": "context_length", "layer_norm_epsilon": "attention.layer_norm_epsilon",
}  # fmt: skip
_LLAMA_SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}  # fmt: skip
_GPT_OSS_SIZES = {
    "intermediate_size": "expert_feed_forward_length", "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "sliding_window": "attention.sliding_window",
}  # fmt: skip
_QWEN_NEXT_SIZES = {
    "full_attention_interval": "full_attention_interval", "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank", "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel", "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip

# Tokens that end a text where they are control tokens. gpt-oss ends messages within an answer by <|end|>.
_ENDS = "<|im_end|> <|eot_id|> <|eom_id|> <end_of_turn> <|endoftext|> <|end_of_text|> <|return|> <|call|>".split()
_CONTROL = 3
_LLAMA3_FACTORS = "rope_freqs.weight"  # the divisors of Llama 3's frequencies
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
# Keys of rope that are honoured, or change nothing: all axes of dimension_sections have the same position in a text.
_ROPE = {"dimension_count", "dimension_count_swa", "dimension_sections", "freq_base", "scale_linear"}
_ROPE |= {f"scaling.{key}" for key in ("type", "factor", "original_context_length", "finetuned", *_YARN)}
# Llama 3.1, 3.2 and 3.3 have these. The file has only the factors that follow from them, the largest of which is `factor`.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class GGUFCheckpoint(Checkpoint):
    """A checkpoint in one GGUF file. file: its header."""

    file: GGUFFile = field(kw_only=True)

    @classmethod
    def read(cls, path: Path, model: str) -> Self:
        """Read the header of a file, or of the only GGUF file in a folder."""
        if path.is_dir():
            names = sorted(name for name in list_folder(path) if name.endswith(".gguf"))
            if len(names) > 1:
                raise CheckpointNotFoundError(f"{path} holds {first_ten(names)}; give the path of one of them")
            path /= names[0]
        check_file(path)
        file = read_gguf(path)
        return cls(path, to_config(file), to_generation_config(file), [path], file=file)

    def open_weights(self) -> "GGUFWeights":
        from nanoinfer.features.formats.gguf_weights import GGUFWeights

        return GGUFWeights(self.file)

    def load_tokenizer(self) -> "Tokenizer | None":
        return self.tokenizer_of(self.path, self.file)

    @staticmethod
    def tokenizer_of(path: Path, file: GGUFFile | None = None) -> "Tokenizer | None":
        """Load the tokenizer of a file. file: its header. None: not read yet."""
        from nanoinfer.features.formats.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf((file or read_gguf(path)).metadata, path)


def parameter_name(file: GGUFFile, tensor_name: str) -> str | None:
    """Return the parameter that a tensor fills, or None if it is not read. Unknown names stay, for find_sources to report."""
    names, layers = _NAMES.get(file.architecture, _LLAMA_NAMES), "h" if file.architecture == "gpt2" else "layers"
    match = _TENSOR.fullmatch(tensor_name)
    drafts = match and match["layer"] and file.get("nextn_predict_layers") and int(match["layer"]) >= (_num_layers(file) or 0)
    if drafts or tensor_name == _LLAMA3_FACTORS:
        return None
    if match is None or match["name"] not in names:
        return tensor_name
    layer = "" if match["layer"] is None else f"{layers}.{int(match['layer'])}."
    kind = "" if match["name"] in _WITHOUT_MODULE else match["kind"]
    return f"{layer}{names[match['name']]}{kind}"


def to_config(file: GGUFFile) -> dict[str, object]:
    """Return config.json for this model. The family checks types and ranges, as it does for a real config.json."""
    if file.architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path} has the architecture {shown(file.architecture)}; {', '.join(_ARCHITECTURES)} are supported in GGUF "
            "files. The model's safetensors may be supported where its GGUF is not"
        )
    for key in sorted(_REFUSED - _HONOURED.get(file.architecture, set())):
        if file.get(key):
            raise UnsupportedError(f"{file.architecture}.{key}={shown(file.get(key))} in {file.path} is not supported")
    if file.metadata.get("general.type") == "adapter":
        hint = "load its base model, and give the adapter to lora= as a folder that peft has saved"
        raise UnsupportedError(f"{file.path} is a LoRA adapter, which is not supported in GGUF; {hint}")
    if "token_embd.weight" not in file.tensors:
        raise WeightsError(f"{file.path} has no token_embd.weight, which every model has; download it again")
    architecture = _ARCHITECTURES[file.architecture]
    config = {
        "architectures": [architecture],
        "model_type": MODELS[architecture][0],
        "dtype": _dtype(file),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if file.architecture == "gpt2":
        return config | _sizes(file, _GPT2_SIZES)
    config |= _llama_sizes(file)
    more = {"gemma3": _gemma3_fields, "gpt-oss": _gpt_oss_fields} | dict.fromkeys(WITH_STATES, _qwen_next_fields)
    return config | more[file.architecture](file, config) if file.architecture in more else config


def to_generation_config(file: GGUFFile) -> dict[str, object]:
    """Return BOS, the padding, and the ids that end a document, a turn (eot) or a message (eom).

    Without an id of eot, they include those of the tokens that llama.cpp finds by their names.
    """
    ids = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding", "eos", "eot", "eom")}
    ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if ids["eot"] is None and isinstance(tokens, list) and isinstance(types, list):
        found = [tokens.index(token) for token in _ENDS if token in tokens]
        ends += [token_id for token_id in found if types[token_id : token_id + 1] == [_CONTROL]]
    distinct = [end for i, end in enumerate(ends) if end not in ends[:i]]  # a broken file may have lists here
    return _without_none(bos_token_id=ids["bos"], pad_token_id=ids["padding"], eos_token_id=distinct)


def _dtype(file: GGUFFile) -> str:
    """Return the dtype to compute in: that of the matrices, or bfloat16, which holds what blocks of few bits hold."""
    names = {tensor.block_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {("F32",): "float32", ("F16",): "float16", ("F16", "F32"): "float16"}.get(tuple(sorted(names)), "bfloat16")


def _sizes(file: GGUFFile, keys: dict[str, str]) -> dict[str, object]:
    return _without_none(**{name: _as_decimal(file.get(key)) for name, key in keys.items()})


def _llama_sizes(file: GGUFFile) -> dict[str, object]:
    hidden_size, num_heads = file.get("embedding_length"), file.get("attention.head_count")
    head_dim = file.get("attention.key_length")
    if head_dim is None and type(hidden_size) is int and type(num_heads) is int and num_heads:
        head_dim = hidden_size // num_heads
    for num_rotated in (file.get("rope.dimension_count"), file.get("rope.dimension_count_swa")):
        if num_rotated not in (None, head_dim) and file.architecture not in WITH_STATES:
            raise UnsupportedError(
                f"{file.path} rotates {shown(num_rotated)} of the {shown(head_dim)} numbers of a head, which is not supported"
            )
    return _sizes(file, _LLAMA_SIZES) | _without_none(
        num_hidden_layers=_num_layers(file),
        head_dim=head_dim,
        rope_parameters=_rope(file, head_dim),
        attention_bias="blk.0.attn_output.bias" in file.tensors or None,  # no key says whether Qwen2 has biases
        mlp_bias="blk.0.ffn_down.bias" in file.tensors or None,
    )


def _num_layers(file: GGUFFile) -> Any:
    """Return the number of blocks, without the last blocks, which draft tokens."""
    num_blocks, num_drafting = file.get("block_count"), file.get("nextn_predict_layers", 0)
    return num_blocks - num_drafting if type(num_blocks) is type(num_drafting) is int else num_blocks


def _gemma3_fields(file: GGUFFile, config: dict[str, Any]) -> dict[str, object]:
    """Return the fields as llama.cpp does: it knows the 27B, whose scores have another scale, by its number of layers."""
    window = file.get("attention.sliding_window")
    local = {"rope_theta": _as_decimal(file.get("rope.freq_base_swa", 10_000.0))}
    return {
        "sliding_window": window,
        "sliding_window_pattern": file.get("attention.sliding_window_pattern", 6) if window else 1,
        "query_pre_attn_scalar": 168 if config.get("num_hidden_layers") == 62 else config.get("head_dim"),  # for the 27B
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "attn_logit_softcapping": file.get("attn_logit_softcapping") or None,
        "final_logit_softcapping": file.get("final_logit_softcapping") or None,
    }


def _gpt_oss_fields(file: GGUFFile, config: dict[str, Any]) -> dict[str, object]:
    return _sizes(file, _GPT_OSS_SIZES) | {"rope_parameters": config["rope_parameters"] | {"truncate": False}}


def _qwen_next_fields(file: GGUFFile, config: dict[str, Any]) -> dict[str, object]:
    num_value_heads, value_size = file.get("ssm.time_step_rank"), file.get("ssm.inner_size")
    num_rotated, head_dim = file.get("rope.dimension_count"), config.get("head_dim")
    if any(type(size) is not int or not size for size in (num_value_heads, value_size, num_rotated, head_dim)):
        raise CheckpointError(
            f"ssm.time_step_rank, ssm.inner_size, rope.dimension_count and attention.key_length in {file.path} must be numbers "
            f">= 1, got {shown([num_value_heads, value_size, num_rotated, head_dim])}; download it again"
        )
    made = {"partial_rotary_factor": num_rotated / head_dim, "linear_value_head_dim": value_size // num_value_heads}
    return _sizes(file, _QWEN_NEXT_SIZES) | made


def _rope(file: GGUFFile, head_dim: object) -> dict[str, object]:
    """Return rope_parameters. As in llama.cpp, a factor without a type is that of a linear scaling, and 0 scales nothing."""
    base, kind = file.get("rope.freq_base", 10_000.0), file.get("rope.scaling.type", "linear")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _as_decimal(base)}
    prefix, known = f"{file.architecture}.rope.", _ROPE | ({"freq_base_swa"} if file.architecture == "gemma3" else set())
    if kind == "none":
        known |= {f"scaling.{key}" for key in ("yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier")}
    neutral = {f"{prefix}scaling.attn_factor": 1, f"{prefix}freq_base_swa": base}  # values that change nothing
    given = {key for key in file.metadata if key.startswith(prefix) and file.metadata[key] != neutral.get(key)}
    if unknown := {key for key in given if key.removeprefix(prefix) not in known}:
        raise UnsupportedError(f"{first_ten(sorted(unknown))} in {file.path} is not supported")
    factor = file.get("rope.scaling.factor", file.get("rope.scale_linear"))
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedError(f"{prefix}scaling.type={shown(kind)} in {file.path} is not supported; none, linear and yarn are")
    if kind != "none" and factor not in (None, 0, 1):
        rope |= _without_none(
            rope_type=kind,
            factor=_as_decimal(factor),
            original_max_position_embeddings=file.get("rope.scaling.original_context_length"),
            **{name: file.get(f"rope.scaling.{key}") for key, name in _YARN.items()},
        )
    if _LLAMA3_FACTORS in file.tensors:
        if rope["rope_type"] != "default":
            raise UnsupportedError(f"{_LLAMA3_FACTORS} and {prefix}scaling in {file.path} are not supported together")
        rope |= _llama3_rope(file, rope["rope_theta"], head_dim)
    return rope


def _llama3_rope(file: GGUFFile, theta: Any, head_dim: Any) -> dict[str, object]:
    """Return Llama 3's rope_parameters, from the factors that the file has. Refuse factors that are not Llama 3's."""
    tensor = file.tensors[_LLAMA3_FACTORS]
    is_expected = isinstance(theta, float) and theta > 1 and type(head_dim) is int and tensor.shape == (head_dim // 2,)
    if is_expected and tensor.block_type.name == "F32" and head_dim <= 2**16:
        with file.path.open("rb") as content:
            content.seek(tensor.start)
            factors = struct.unpack(f"<{head_dim // 2}f", content.read(tensor.num_bytes))
        rope = {"rope_type": "llama3", "factor": _as_decimal(max(factors)), **_LLAMA3_ROPE}
        if 1 <= rope["factor"] <= 1e6:
            scaled = RopeConfig.from_hf({"rope_parameters": rope | {"rope_theta": theta}})
            expected = rope_frequencies(head_dim, RopeConfig(theta)) / rope_frequencies(head_dim, scaled)
            if np.allclose(factors, expected.numpy(), rtol=1e-4):
                return rope
    raise UnsupportedError(f"{_LLAMA3_FACTORS} in {file.path} is not Llama 3's table of frequencies, and not supported")


def _as_decimal(value: object) -> Any:
    """Return a number in fp32 as the shortest decimal: 1e-05, as in config.json, and not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _without_none(**config: object) -> dict[str, object]:
    """Leave out what the file does not have. The family has a default, or reports the missing key."""
    return {key: value for key, value in config.items() if value is not None}
