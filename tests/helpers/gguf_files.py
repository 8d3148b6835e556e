"""GGUF files for tests: a writer, models as llama.cpp's converter names and orders them, and blocks unpacked by ggml's C code.

The unpacking follows the loops of ggml-quants.c, an output position at a time, and shares nothing with the package.
"""

import json
import struct
from pathlib import Path

import numpy as np
import torch

from nanoinfer.loading.folders import BUNDLED

# name -> (number in the file, weights of a block, bytes of a block, positions of its fp16 numbers)
TYPES = {
    "F32": (0, 1, 4, ()),
    "F16": (1, 1, 2, ()),
    "BF16": (30, 1, 2, ()),
    "Q4_0": (2, 32, 18, (0,)),
    "Q4_1": (3, 32, 20, (0, 2)),
    "Q5_0": (6, 32, 22, (0,)),
    "Q5_1": (7, 32, 24, (0, 2)),
    "Q8_0": (8, 32, 34, (0,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q5_K": (13, 256, 176, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
    "MXFP4": (39, 32, 17, ()),
}


def write(path: Path, metadata: dict, tensors: dict, *, magic=b"GGUF", version=3, num_tensors=None, num_keys=None) -> Path:
    """Write a file. tensors: name -> (type, shape in torch's order, bytes), and the offset that it claims if not its own."""
    start = magic + struct.pack("<IQQ", version, _or(num_tensors, len(tensors)), _or(num_keys, len(metadata)))
    header = b"".join(string(key) + value(one) for key, one in metadata.items())
    data = b""
    for name, (type_number, shape, content, *offset) in tensors.items():
        header += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += struct.pack("<IQ", type_number, offset[0] if offset else len(data))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(start + header + bytes(-len(start + header) % 32) + data)
    return path


def _or(given, default):
    return default if given is None else given


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(content) -> bytes:
    """A metadata value. int is uint32, float is float32. bytes are written as they are, for what is not a valid value."""
    if isinstance(content, bytes):
        return content
    if not isinstance(content, list):
        number, data = _scalar(content)
        return struct.pack("<I", number) + data
    number = _scalar(content[0])[0]
    return struct.pack("<IIQ", 9, number, len(content)) + b"".join(_scalar(one)[1] for one in content)


def _scalar(content) -> tuple[int, bytes]:
    if isinstance(content, bool):
        return 7, struct.pack("<?", content)
    if isinstance(content, int):
        return 4, struct.pack("<I", content)
    return (6, struct.pack("<f", content)) if isinstance(content, float) else (8, string(content))


# ---- tensors


def floats(weight: torch.Tensor, name: str = "F32") -> tuple:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    content = weight.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    return TYPES[name][0], tuple(weight.shape), content


def random_blocks(name: str, shape: tuple[int, ...], seed: int = 0) -> tuple[tuple, torch.Tensor]:
    """A tensor of random blocks, and its weights as ggml's C code unpacks them."""
    blocks = block_bytes(name, shape, seed)
    weights = torch.from_numpy(UNPACK[name](blocks)).view(shape)
    return (TYPES[name][0], shape, blocks.tobytes()), weights


def block_bytes(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random blocks [num_blocks, num_bytes] of a tensor of this shape, whose scales are numbers that a model may have."""
    _, num_weights, num_bytes, halves = TYPES[name]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // num_weights, num_bytes), dtype=np.uint8)
    for position in halves:
        scales = rng.normal(0, 0.2 / num_weights, len(blocks)).astype(np.float16)
        blocks[:, position : position + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(121, 126, len(blocks))  # a power of two
    return blocks


def _half(b, position):
    return b[:, position : position + 2].copy().view(np.float16).astype(np.float32)[:, 0]


def _signed(column):
    return column.astype(np.int8).astype(np.float32)


def _simple(b, start, high, has_minimum, center):
    """dequantize_row_q4_0, q4_1, q5_0 and q5_1: bit 4 of the integers is in a word of 32 bits at `high`."""
    y = np.empty((len(b), 32), np.float32)
    word = b[:, high : high + 4].copy().view(np.uint32)[:, 0] if high else np.zeros(len(b), np.uint32)
    for j in range(16):
        for position, nibble in ((j, b[:, start + j] & 15), (j + 16, b[:, start + j] >> 4)):
            integer = nibble.astype(np.int32) + 16 * ((word >> position) & 1).astype(np.int32) - center
            y[:, position] = _half(b, 0) * integer + (_half(b, 2) if has_minimum else 0)
    return y


def _q8_0(b):
    return np.stack([_half(b, 0) * _signed(b[:, 2 + j]) for j in range(32)], axis=1)


def _scale_min_k4(j, q):
    if j < 4:
        return (q[:, j] & 63).astype(np.float32), (q[:, j + 4] & 63).astype(np.float32)
    scale = (q[:, j + 4] & 15) | ((q[:, j - 4] >> 6) << 4)
    return scale.astype(np.float32), ((q[:, j + 4] >> 4) | ((q[:, j] >> 6) << 4)).astype(np.float32)


def _q45_k(b, low, high):
    y = np.empty((len(b), 256), np.float32)
    for group in range(8):
        scale, minimum = _scale_min_k4(group, b[:, 4:16])
        for i in range(32):
            byte = b[:, low + 32 * (group // 2) + i]
            integer = (byte >> 4 if group % 2 else byte & 15).astype(np.int32)
            if high:
                integer += 16 * ((b[:, high + i] >> group) & 1).astype(np.int32)
            y[:, 32 * group + i] = _half(b, 0) * scale * integer - _half(b, 2) * minimum
    return y


def _q6_k(b):
    y = np.empty((len(b), 256), np.float32)
    for n in range(2):
        ql, qh, scales = b[:, 64 * n :], b[:, 128 + 32 * n :], b[:, 192 + 8 * n :]
        for i in range(32):
            lows = (ql[:, i] & 15, ql[:, i + 32] & 15, ql[:, i] >> 4, ql[:, i + 32] >> 4)
            for k, low in enumerate(lows):
                integer = (low | ((qh[:, i] >> (2 * k)) & 3) << 4).astype(np.int32) - 32
                y[:, 128 * n + 32 * k + i] = _half(b, 208) * _signed(scales[:, i // 16 + 2 * k]) * integer
    return y


def _mxfp4(b):
    values = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice the numbers
    y = np.empty((len(b), 32), np.float32)
    half_scale = 2.0 ** (b[:, 0].astype(np.float32) - 128)
    for j in range(16):
        y[:, j], y[:, j + 16] = half_scale * values[b[:, 1 + j] & 15], half_scale * values[b[:, 1 + j] >> 4]
    return y


UNPACK = {
    "Q4_0": lambda b: _simple(b, 2, 0, False, 8),
    "Q4_1": lambda b: _simple(b, 4, 0, True, 0),
    "Q5_0": lambda b: _simple(b, 6, 2, False, 16),
    "Q5_1": lambda b: _simple(b, 8, 4, True, 0),
    "Q8_0": _q8_0,
    "Q4_K": lambda b: _q45_k(b, 16, 0),
    "Q5_K": lambda b: _q45_k(b, 48, 16),
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


# ---- models


def _pairs(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


_LAYERS = _pairs(
    """
    input_layernorm=attn_norm self_attn.q_proj=attn_q self_attn.k_proj=attn_k self_attn.v_proj=attn_v
    self_attn.o_proj=attn_output self_attn.q_norm=attn_q_norm self_attn.k_norm=attn_k_norm
    post_attention_layernorm=ffn_norm mlp.gate_proj=ffn_gate mlp.up_proj=ffn_up mlp.down_proj=ffn_down ln_1=attn_norm
    attn.c_attn=attn_qkv attn.c_proj=attn_output ln_2=ffn_norm mlp.c_fc=ffn_up mlp.c_proj=ffn_down mlp.router=ffn_gate_inp
    mlp.experts.gate_proj=ffn_gate_exps mlp.experts.up_proj=ffn_up_exps mlp.experts.down_proj=ffn_down_exps
    self_attn=attn_sinks
    """
)
_AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
_GEMMA3 = {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"} | _AFTER_ATTENTION
_STATE = _AFTER_ATTENTION | _pairs(
    """
    linear_attn.in_proj_qkv=attn_qkv linear_attn.in_proj_z=attn_gate linear_attn.in_proj_b=ssm_beta
    linear_attn.in_proj_a=ssm_alpha linear_attn.in_proj_ba=ssm_ba linear_attn.conv1d=ssm_conv1d linear_attn.A_log=ssm_a
    linear_attn.dt_bias=ssm_dt linear_attn.norm=ssm_norm linear_attn.out_proj=ssm_out mlp.gate=ffn_gate_inp
    mlp.shared_expert_gate=ffn_gate_inp_shexp mlp.shared_expert.gate_proj=ffn_gate_shexp
    mlp.shared_expert.up_proj=ffn_up_shexp mlp.shared_expert.down_proj=ffn_down_shexp
    """
)
_WITH_STATES = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
_OF = {"gemma3": _LAYERS | _GEMMA3, "gpt-oss": _LAYERS | _AFTER_ATTENTION}
_OF |= dict.fromkeys(_WITH_STATES.values(), _LAYERS | _STATE)
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OUTER |= {"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"}


def architecture_of(config) -> str:
    names = {"gemma3_text": "gemma3", "gpt_oss": "gpt-oss"} | _WITH_STATES
    return names.get(config.model_type, config.model_type)


def gguf_name(name: str, architecture: str) -> str:
    """model.layers.0.mlp.up_proj.weight -> blk.0.ffn_up.weight"""
    name = name + ".bias" if name.endswith("dt_bias") else name + "." if name.endswith("A_log") else name
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{_OF.get(architecture, _LAYERS)[module]}.{'weight' if kind == 'sinks' else kind}".removesuffix(".")


def metadata_of(config) -> dict:
    """The metadata of a transformers config."""
    arch = architecture_of(config)
    common = {"general.architecture": arch, "general.alignment": 32}
    if arch == "gpt2":
        sizes = {"embedding_length": config.n_embd, "block_count": config.n_layer, "context_length": config.n_positions}
        sizes |= {"feed_forward_length": config.n_inner or 4 * config.n_embd, "attention.head_count": config.n_head}
        sizes |= {"attention.layer_norm_epsilon": config.layer_norm_epsilon}
    else:
        sizes = {"embedding_length": config.hidden_size, "block_count": config.num_hidden_layers}
        sizes |= {"feed_forward_length": getattr(config, "intermediate_size", None)}
        sizes |= {"context_length": config.max_position_embeddings}
        rope = config.rope_parameters
        if arch == "gemma3":
            sizes |= {"rope.freq_base_swa": rope["sliding_attention"]["rope_theta"], "attention.sliding_window_pattern": 3}
            rope = rope["full_attention"]
        sizes |= {"attention.head_count": config.num_attention_heads, "rope.freq_base": rope["rope_theta"]}
        if rope["rope_type"] != "default":
            sizes |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        if arch in ("gemma3", "gpt-oss"):
            sizes |= {"attention.sliding_window": config.sliding_window}
        if arch == "gpt-oss":
            sizes |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
            sizes |= {"rope.scaling.yarn_beta_fast": rope["beta_fast"], "rope.scaling.yarn_beta_slow": rope["beta_slow"]}
            sizes |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
            sizes |= {"expert_feed_forward_length": config.intermediate_size}
        sizes |= {"attention.head_count_kv": config.num_key_value_heads}
        sizes |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
        if config.model_type in _WITH_STATES:
            sizes |= {"ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": config.linear_key_head_dim}
            sizes |= {"ssm.group_count": config.linear_num_key_heads, "ssm.time_step_rank": config.linear_num_value_heads}
            sizes |= {"ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim}
            sizes |= {"full_attention_interval": 4}
            sizes |= {"rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"])}
        if config.model_type in ("qwen3_5_moe_text", "qwen3_next"):
            sizes |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
            sizes |= {"expert_feed_forward_length": config.moe_intermediate_size}
            sizes |= {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
        if getattr(config, "head_dim", None):
            sizes |= {"attention.key_length": config.head_dim}
    return common | {f"{arch}.{key}": one for key, one in sizes.items() if one is not None}


def bundled_metadata(**changes):
    """tiny-qwen3's tokenizer as llama.cpp's converter writes it."""
    content = json.loads((BUNDLED / "tiny-qwen3" / "tokenizer.json").read_text())
    tokens = list(content["model"]["vocab"])
    special = {token["content"] for token in content["added_tokens"]}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": (BUNDLED / "tiny-qwen3" / "chat_template.jinja").read_text(),
    }
    return metadata | changes


def tensors_of(model, type_name: str = "F32", blocks: tuple[str, ...] = ()) -> dict:
    """The tensors of a transformers model, named and ordered as convert_hf_to_gguf.py does.

    Args:
        model: its weights are replaced by the unpacked ones where they are written in blocks.
        type_name: a float type, for matrices.
        blocks: block types for the matrices of layers, in turn.
    """
    config, tensors, num_blocks = model.config, {}, 0
    weights = dict(part for one in model.state_dict().items() for part in parts_of(*one, config))
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        is_conv1d = config.model_type == "gpt2" and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and weight.ndim == 2
        stored = weight.T if is_conv1d else weight
        is_matrix = weight.ndim > 1 and not name.endswith(".bias")  # a bias of all experts has two axes
        stored = with_states(name, stored, config) if config.model_type in _WITH_STATES else stored
        if config.model_type in ("gemma3_text", *_WITH_STATES) and name.endswith("norm.weight") and "linear_attn" not in name:
            stored = weight + 1
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            num_heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            stored = to_pairs(stored, num_heads)
        if blocks and ".layers." in name and is_matrix:
            tensor, unpacked = random_blocks(blocks[num_blocks % len(blocks)], tuple(stored.shape), num_blocks)
            num_blocks += 1
            if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
                unpacked = to_halves(unpacked, num_heads)
            weight.copy_(unpacked)
        else:
            tensor = floats(stored, type_name if is_matrix else "F32")
        tensors[gguf_name(name, architecture_of(config))] = tensor
    return tensors


def with_states(name: str, weight: torch.Tensor, config) -> torch.Tensor:
    """A parameter of Qwen3.5 as conversion/qwen.py writes it: value heads tiled, and -exp(A_log)."""
    if name.endswith("A_log"):
        weight = -weight.exp()
    if name.endswith("conv1d.weight"):
        weight = weight.squeeze(1)
    num_key_heads, num_heads = config.linear_num_key_heads, config.linear_num_value_heads
    if config.model_type == "qwen3_next" or ".linear_attn." not in name or ".norm." in name:
        return weight

    def tiled(rows):
        heads, num_each = rows.chunk(num_heads), num_heads // num_key_heads
        return torch.cat([heads[k * num_each + v] for v in range(num_each) for k in range(num_key_heads)])

    if name.endswith("out_proj.weight"):
        return tiled(weight.T).T
    if "qkv" in name or "conv1d" in name:
        num_others = 2 * num_key_heads * config.linear_key_head_dim
        return torch.cat([weight[:num_others], tiled(weight[num_others:])])
    return tiled(weight)


def parts_of(name: str, weight: torch.Tensor, config):
    """A parameter of transformers as the tensors of a file, which are views: gpt-oss's gates are among the rows of `up`."""
    if name.endswith("in_proj_qkvz.weight"):  # the rows of each key head together
        key_dim, num_values = config.linear_key_head_dim, config.linear_num_value_heads * config.linear_value_head_dim
        sizes = [key_dim, key_dim, *[num_values // config.linear_num_key_heads] * 2]
        q, k, v, z = (rows.flatten(0, 1) for rows in weight.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, 1))
        return [(name.replace("qkvz", "qkv"), torch.cat([q, k, v])), (name.replace("qkvz", "z"), z)]
    if ".experts." in name and config.model_type != "gpt_oss":
        layer, _, projection = name.rpartition(".")
        if projection == "down_proj":
            return [(f"{name}.weight", weight)]
        return [(f"{layer}.{one}_proj.weight", part) for one, part in zip(("gate", "up"), weight.chunk(2, 1), strict=True)]
    if ".experts." not in name:
        return [(name, weight)]
    kind = "bias" if name.endswith("_bias") else "weight"
    layer, _, projection = name.removesuffix("_bias").rpartition(".")
    stored = weight if kind == "bias" else weight.transpose(1, 2)  # [experts, out, in]
    if projection == "down_proj":
        return [(f"{layer}.down_proj.{kind}", stored)]
    return [(f"{layer}.gate_proj.{kind}", stored[:, 0::2]), (f"{layer}.up_proj.{kind}", stored[:, 1::2])]


def to_pairs(weight, num_heads):
    """convert_hf_to_gguf.py's permute: the rows of the two halves of each head in turn."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def to_halves(weight, num_heads):
    """Undo to_pairs, a row at a time."""
    out, size = torch.empty_like(weight), len(weight) // num_heads
    for head in range(num_heads):
        for i in range(size):
            out[head * size + (i % 2) * (size // 2) + i // 2] = weight[head * size + i]
    return out
