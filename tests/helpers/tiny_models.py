"""Tiny random checkpoints, made by transformers' own classes: the oracle writes the files that nanoinfer reads.

Weights have standard deviation 0.25: with transformers' 0.02 the two largest logits nearly tie, and a greedy token would be
decided by rounding.
"""

from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoinfer import LLM
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.config_json import read_config

VOCAB_SIZE = 96
_SHARED = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
_QWEN = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

_STATES = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
_TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_WITHOUT_MLP = {name: value for name, value in _QWEN.items() if name != "intermediate_size"}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 24}

# family -> (transformers' classes, config). One entry for every fact a family's file has to get right.
FAMILIES = {
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt2_untied": ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512, "tie_word_embeddings": False}),
    "gpt2_n_inner": ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 512, "n_inner": 100}),
    "qwen2": ("Qwen2", _QWEN),
    "qwen2_tied": ("Qwen2", _QWEN | {"tie_word_embeddings": True}),
    "qwen2_mha": ("Qwen2", _QWEN | {"num_key_value_heads": 4}),
    "qwen2_yarn": ("Qwen2", _QWEN | {"rope_parameters": _YARN}),
    "qwen3": ("Qwen3", _QWEN | {"head_dim": 16}),
    "qwen3_tied": ("Qwen3", _QWEN | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_one_kv_head": ("Qwen3", _QWEN | {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen3_attention_bias": ("Qwen3", _QWEN | {"head_dim": 16, "attention_bias": True}),
    "qwen3_yarn": ("Qwen3", _QWEN | {"head_dim": 16, "rope_parameters": _YARN | {"rope_theta": 1_000_000.0}}),
    "qwen2_moe": ("Qwen2Moe", _QWEN | _MOE | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3Moe", _QWEN | _MOE | {"norm_topk_prob": True}),
    "qwen3_moe_tied": ("Qwen3Moe", _QWEN | _MOE | {"tie_word_embeddings": True, "mlp_only_layers": [1]}),
    "llama": ("Llama", _QWEN),
    "llama_tied_llama3": ("Llama", _QWEN | {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama_biases": ("Llama", _QWEN | {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "qwen3_5": ("Qwen3_5", _QWEN | _STATES),
    "qwen3_5_tied": ("Qwen3_5", _QWEN | _STATES | {"tie_word_embeddings": True, "num_hidden_layers": 4, "layer_types": None}),
    "qwen3_5_moe": ("Qwen3_5Moe", _WITHOUT_MLP | _STATES | _MOE | _SHARED_EXPERT | _TWO_LAYERS),
    "qwen3_next": ("Qwen3Next", _QWEN | _STATES | _MOE | _SHARED_EXPERT | {"mlp_only_layers": [1]}),
    "mistral": ("Mistral", _QWEN | {"head_dim": 8, "sliding_window": None}),
    "mistral_window": ("Mistral", _QWEN | {"head_dim": 8, "sliding_window": 24}),
    "qwen3_window": (
        "Qwen3",
        _QWEN
        | {"head_dim": 16, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
}

_SLIDING = {"sliding_window": 24, "head_dim": 16}
FAMILIES |= {
    "gemma3_window": (
        "Gemma3",
        _QWEN
        | _SLIDING
        | {
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gpt_oss_window": (
        "GptOss",
        _QWEN
        | _SLIDING
        | {
            "num_hidden_layers": 3,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.0,  # of 7, so that some numbers exceed it
            "rope_parameters": _YARN | {"rope_theta": 150_000.0, "truncate": False},
        },
    ),
}
WITH_STATES = [family for family in FAMILIES if family.startswith(("qwen3_5", "qwen3_next"))]


# family -> overrides that give it the width of GPT-2 and of Qwen3-0.6B
WIDE = {
    "gpt2": {"n_embd": 768, "n_head": 12},
    "qwen3": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # Triton's interpreter runs a program for each


def build(family: str, seed: int = 0, **overrides) -> transformers.PreTrainedModel:
    """transformers' model of a family with random weights, in fp32."""
    name, config = FAMILIES[family]
    has_text_config = name == "Gemma3" or name.startswith("Qwen3_5")
    config_class = getattr(transformers, f"{name}TextConfig" if has_text_config else f"{name}Config")
    model_class = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = model_class(config_class(**_SHARED | config | overrides)).eval()
    fill(model, seed)
    return model


def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Give a model random weights, the same for the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25, generator=generator)
            if parameter.ndim == 1:  # norms and biases
                parameter.add_(0.5)


def save(family: str, path: Path, *, seed: int = 0, **overrides) -> Path:
    """A checkpoint folder without a tokenizer."""
    build(family, seed, **overrides).save_pretrained(path)
    return path


MTP_FUSED = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


def add_mtp(path: Path, change=lambda tensors: tensors) -> Path:
    """Write a module for multi-token prediction into a checkpoint: one layer of transformers' model, and four tensors more.

    change: A function of all tensors of the file, which returns those to write.
    """
    tensors = load_file(path / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(path)
    size, generator = config.hidden_size, torch.Generator().manual_seed(5)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    layer = transformers.AutoModelForCausalLM.from_config(config).model.layers[0]
    shapes = {f"layers.0.{name}": weight.shape for name, weight in layer.named_parameters()}
    shapes |= {f"{name}.weight": (size,) for name in MTP_FUSED} | {"fc.weight": (size, 2 * size)}
    for name, shape in shapes.items():
        tensors[f"mtp.{name}"] = torch.randn(shape, generator=generator) * 0.25
    save_file(change(tensors), path / "model.safetensors", metadata={"format": "pt"})
    return path


def random_ids(rng, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def cramped(path: Path, num_tokens: int, num_more: int = 2, **settings) -> LLM:
    """An LLM with the blocks of a sequence of so many tokens and a few more, so that others are preempted."""
    probe = LLM(path, **settings | {"kv_cache_memory": 2**24})
    state_bytes = HybridSizes.of(read_config(Checkpoint.open(str(path)))[1]).bytes_per_state
    block_bytes = (probe.info.num_cache_bytes - probe.info.num_state_slots * state_bytes) // probe.info.num_blocks
    for_blocks = (probe.engine.block_manager.num_blocks_for(num_tokens) + num_more) * block_bytes
    for_states = min(for_blocks, 2 * settings["max_num_seqs"] * state_bytes)  # at most half of the memory
    return LLM(path, **settings | {"kv_cache_memory": for_blocks + for_states})


def clear_tokens(llm, prompts, params) -> list[list[int]]:
    """Greedy tokens until the two largest logits are closer than 8 roundings of bfloat16, which change no token before.

    llm: with logprobs_mode="raw_logits".
    """
    tokens = []
    for output in llm.generate(prompts, replace(params, logprobs=2), use_tqdm=False):
        pairs = [sorted((one.logprob for one in ranks.values()), reverse=True) for ranks in output.outputs[0].logprobs]
        is_clear = [first - second > 8 * 2**-8 * abs(first) for first, second, *_ in pairs]
        tokens.append(output.outputs[0].token_ids[: [*is_clear, False].index(False)])
    return tokens


def assert_nothing_is_left(llm) -> None:
    """However its requests ended, every block and slot is free, nobody holds one, and nobody waits."""
    manager = llm.engine.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    if getattr(manager, "state_slots", None) is not None:
        assert manager.state_slots.pool.num_free == len(manager.state_slots.pool.contents)
        assert set(manager.state_slots.pool.ref_counts) == {0}
    assert set(manager.blocks.ref_counts) == {0}
    assert llm.engine.num_unfinished == llm.engine.scheduler.num_unfinished == 0
