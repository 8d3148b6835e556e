"""A whole decode step of a tiny model, compiled as for a GPU, and emulated: all of its kernels, in their order.

In: a family. Out: the error of its logits. Kernels of a step share memory and may overlap, which cases.py's cannot show.
"""

import torch
from torch import Tensor, nn

from nanoinfer.attention.dense import DenseAttention
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.triton import TritonBackend
from nanoinfer.fast.cuda.accelerate import compile_model
from nanoinfer.models.gemma3 import Gemma3ForCausalLM
from nanoinfer.models.llama import LlamaForCausalLM
from nanoinfer.models.qwen import QwenForCausalLM
from tests.emulated_gpu import writes
from tests.helpers.paged_cases import metadata_for, replaced

_COMMON = {
    "vocab_size": 70, "hidden_size": 96, "intermediate_size": 144, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
FAMILIES = {  # a family -> what is its own
    "qwen3": (QwenForCausalLM, {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}),
    "qwen2": (QwenForCausalLM, {"model_type": "qwen2", "tie_word_embeddings": False}),
    "llama": (LlamaForCausalLM, {"model_type": "llama", "tie_word_embeddings": False}),
    "gemma3": (
        Gemma3ForCausalLM,
        {
            "model_type": "gemma3_text",
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 256,
            "sliding_window_pattern": 2,
        },
    ),
}
_LENGTHS = [90, 3, 17, 64, 1, 33]  # tokens in the cache, of up to six rows
_BLOCK_SIZE, _NUM_STEPS = 16, 2


class _Filling(DenseAttention):
    """Dense attention of a prompt, which puts its keys and values into a cache."""

    def __init__(self, cache: KVCache, slots: Tensor) -> None:
        self.cache, self.slots = cache, slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.slots, k[: len(self.slots)], v[: len(self.slots)])
        return super().__call__(layer, q, k, v)


def _build(family: str) -> nn.Module:
    """Random weights in fp32, with which hidden values neither grow nor vanish."""
    model_class, config = FAMILIES[family]
    model = model_class(model_class.Config.from_hf(_COMMON | config))
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, weight.shape[-1] ** -0.5, generator)
    return model.eval()


@torch.inference_mode()
def check_step(family: str, num_rows: int, dtype: torch.dtype) -> float:
    """Compare the logits with the plain model's in fp32. The tolerance: 4 times the largest error of the plain model in dtype.

    The plain model rounds to dtype wherever a kernel does and in more places, so its error is what roundings make of the
    logits. That of the same number of roundings in another order is as large, up to its spread.
    """
    model = _build(family).to(dtype)
    exact = _build(family).to(dtype).float()
    config, lengths = model.config, _LENGTHS[:num_rows]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(70, (n + _NUM_STEPS,), generator=generator) for n in lengths]
    metadata = metadata_for([(0, n + _NUM_STEPS) for n in lengths], _BLOCK_SIZE, 32, generator)
    cache = KVCache(
        num_layers=config.num_hidden_layers, num_blocks=32, block_size=_BLOCK_SIZE, num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim, dtype=dtype, device="cpu", layout="NHD",
    )  # fmt: skip
    slots = metadata.slot_mapping.split([len(row) for row in ids])
    dense, expected = [], []
    for row, own, n in zip(ids, slots, lengths, strict=True):
        positions = torch.arange(len(row))
        dense.append(model.compute_logits(model(row, positions, _Filling(cache, own[:n])))[n:])
        expected.append(exact.compute_logits(exact(row, positions, DenseAttention()))[n:])
    compiled, outs = compile_model(model).model, []
    for i in range(_NUM_STEPS):
        new_slots, new_ids = (torch.stack([of[n + i] for of, n in zip(all, lengths, strict=True)]) for all in (slots, ids))
        step = metadata_for([(n + i, 1) for n in lengths], _BLOCK_SIZE, 32, generator)
        step = replaced(step, block_tables=metadata.block_tables, slot_mapping=new_slots)
        attend = TritonBackend().begin_step(cache, step)
        positions = torch.tensor(lengths) + i
        with writes.step():
            outs.append(compiled.compute_logits(compiled(new_ids, positions, attend)))
    plain, out, exactly = torch.stack(dense, 1), torch.stack(outs), torch.stack(expected, 1)
    return ((out.double() - exactly).abs().max() / (4 * (plain.double() - exactly).abs().max())).item()
