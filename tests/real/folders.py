"""Checkpoints in folders, unpacked from a GGUF file of the architecture Llama by the gguf package and these lines.

Nothing of nanoinfer is used, so that its reader of GGUF files is compared with another one.
"""

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
CONTROL = 3  # the type of a special token


class File:
    """A GGUF file. Its head is the embedding: it has no tensor output.weight."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)

    def __getitem__(self, key: str):
        return self._reader.fields[key].contents()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights by llama.cpp's names, in float32."""
        return {
            tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            for tensor in self._reader.tensors
        }


def in_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return rows of q or k in transformers' order, in which RoPE rotates halves of a head. llama.cpp's order has pairs."""
    num_rows, num_columns = weight.shape
    pairs = weight.view(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.transpose(1, 2).reshape(num_rows, num_columns).contiguous()


def weights_of(file: File) -> dict[str, torch.Tensor]:
    """Return a Llama's weights by transformers' names."""
    weights = {}
    for name, weight in file.tensors().items():
        first, *more = name.removesuffix(".weight").split(".")
        if first == "blk":
            number, part = more
            if part in ("attn_q", "attn_k"):
                weight = in_halves(weight, file["llama.attention.head_count" + ("_kv" if part == "attn_k" else "")])
            weights[f"model.layers.{number}.{LAYER_NAMES[part]}.weight"] = weight
        else:
            weights[f"model.{NAMES[first]}.weight"] = weight
    return weights


def with_zero_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a Qwen2's weights that compute what a Llama's compute."""
    projections = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    biases = {name: weight for name, weight in weights.items() if name.endswith(projections)}
    return weights | {name.removesuffix("weight") + "bias": torch.zeros(len(weight)) for name, weight in biases.items()}


def config_of(file: File, model_type: str) -> dict:
    """Return the content of config.json for model_type "llama" or "qwen2"."""
    return {
        "model_type": model_type,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[model_type]],
        "hidden_act": "silu",
        "hidden_size": file["llama.embedding_length"],
        "intermediate_size": file["llama.feed_forward_length"],
        "num_hidden_layers": file["llama.block_count"],
        "num_attention_heads": file["llama.attention.head_count"],
        "num_key_value_heads": file["llama.attention.head_count_kv"],
        "max_position_embeddings": file["llama.context_length"],
        "rms_norm_eps": round(file["llama.attention.layer_norm_rms_epsilon"], 9),  # of a float32
        "rope_theta": file["llama.rope.freq_base"],
        "vocab_size": file["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": file["tokenizer.ggml.bos_token_id"],
        "eos_token_id": file["tokenizer.ggml.eos_token_id"],
        "pad_token_id": file["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def tokenizer_of(file: File) -> Tokenizer:
    """Return the tokenizer that llama.cpp calls gpt2 with the rule smollm: digits are alone, then GPT-2's rule."""
    assert (file["tokenizer.ggml.model"], file["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    tokens, merges = file["tokenizer.ggml.tokens"], file["tokenizer.ggml.merges"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    types = file["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def write(file: File, folder: Path, model_type: str) -> Path:
    """Write a folder as transformers does, in float32."""
    folder.mkdir()
    weights = weights_of(file)
    save_file(with_zero_biases(weights) if model_type == "qwen2" else weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(file, model_type)))
    tokenizer_of(file).save(str(folder / "tokenizer.json"))
    tokens = file["tokenizer.ggml.tokens"]
    kinds = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    stated = {f"{kind}_token": tokens[file[f"tokenizer.ggml.{name}_token_id"]] for kind, name in kinds.items()}
    stated |= {"tokenizer_class": "GPT2Tokenizer", "chat_template": file["tokenizer.chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder
