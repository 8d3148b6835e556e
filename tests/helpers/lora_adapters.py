"""LoRA adapters of random matrices, in peft's format, for the tiny checkpoints."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanoinfer.features.adapters.request import LoRARequest

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False, "init_lora_weights": True}


def write_adapter(path, shapes, *, rank=4, ranks=None, seed=0, tensors=None, **config):
    """Save an adapter of random matrices. Returns {module: (A, B)}."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    pairs, stored = {}, dict(tensors or {})
    for module, (num_outputs, num_inputs) in shapes.items():
        r = (ranks or {}).get(module, rank)
        a, b = (torch.randn(size, generator=generator) / 8 for size in ((r, num_inputs), (num_outputs, r)))
        pairs[module] = (a, b)
        stored |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    save_file(stored, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return pairs


def linear_shapes(checkpoint):
    """{module: (outputs, inputs)} of the linear layers of a checkpoint that an adapter of a request can change."""
    shapes = {}
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is not a dict)
            shape, module = file.get_slice(name).get_shape(), name.removesuffix(".weight")
            last = module.rpartition(".")[2]
            if len(shape) == 2 and ".experts." not in name and last not in ("wte", "wpe", "embed_tokens", "lm_head"):
                shapes[module] = shape[::-1] if last.startswith("c_") else shape  # GPT-2 stores [in, out]
    return shapes


def write_requests(checkpoint, folder, ranks):
    """Write an adapter of all linear layers for each rank. Returns LoRARequests with the ids 1, 2 and so on."""
    shapes = {module: shape for module, shape in linear_shapes(checkpoint).items() if not module.startswith("mtp.")}
    requests = []
    for i, rank in enumerate(ranks, 1):
        write_adapter(folder / f"adapter{i}", shapes, seed=i, rank=rank, r=rank, lora_alpha=16)
        requests.append(LoRARequest(f"adapter{i}", i, str(folder / f"adapter{i}")))
    return requests
