"""Merge LoRA adapters in peft's format into the weights while they are read. adapters.py has those of single requests.

    merged = weight + strength * scale * B @ A,  scale = alpha / r, or alpha / sqrt(r) with use_rslora

A is [r, in] and B is [out, r]. The sum is computed in fp32 and rounded once. The merged model is as fast as its base, which may
be quantised. All requests use the same adapters.

In: the base's Weights, and the adapters' folders. Out: Weights. Anything besides A and B is refused by name.
Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685. use_rslora: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732.
Format: peft's tuners/lora of https://github.com/huggingface/peft.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from nanoinfer.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError, WeightsError, first_ten, shown
from nanoinfer.loading.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_file, locate, read_json
from nanoinfer.loading.weights import DerivedWeights, TensorInfo, WeightFiles, Weights
from nanoinfer.models.registry import WeightRules

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")

# Settings of adapter_config.json that change the result, with the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "lora_bias": (False,), "use_qalora": (False,),
    "use_bdlora": (None, False), "modules_to_save": (None, []), "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}), "layer_replication": (None, []), "alora_invocation_tokens": (None, []),
    "arrow_config": (None,), "kasa_config": (None,), "monteclora_config": (None,),
    # Other values change the base's weights before training. peft can convert such an adapter to one that fits the base.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}  # fmt: skip


@dataclass(frozen=True)
class LowRankUpdate:
    """The update B @ A * scale of one adapter for a linear layer. The matrices are views of the file, in its dtype."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float


class LoraWeights(DerivedWeights):
    """The base's tensors with adapters merged in, each given as (folder or hub name, strength). Strength 1: as trained."""

    def __init__(self, base: Weights, adapters: Sequence[tuple[str, float]], rules: WeightRules) -> None:
        self.base = base
        self._rules = rules
        self.has_empty_biases = base.has_empty_biases
        self._updates: dict[str, list[LowRankUpdate]] = defaultdict(list)
        tensor_names = {name.removeprefix(rules.prefix): name for name in base}
        for adapter, strength in adapters:
            for module, update in read_adapter(adapter).items():
                name = tensor_names.get(f"{module}.weight".removeprefix(rules.prefix))
                shape = base[name].shape if name is not None else None
                is_transposed = name is not None and name.endswith(rules.transpose)
                check_fit(adapter, module, update, shape[::-1] if shape is not None and is_transposed else shape)
                self._updates[str(name)].append(replace(update, scale=update.scale * strength))
        super().__init__(base | {name: TensorInfo(base[name].shape, "F32") for name in self._updates})

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        weight = self.base.read(name, rows)
        for update in self._updates.get(name, ()):
            is_transposed = name.endswith(self._rules.transpose)  # [in, out]
            a, b = (update.a[:, rows], update.b) if is_transposed else (update.a, update.b[rows])
            change = a.float().T @ b.float().T if is_transposed else b.float() @ a.float()
            weight = weight.float() + update.scale * change
        return weight


def check_fit(adapter: str, module: str, update: LowRankUpdate, shape: tuple[int, ...] | None) -> None:
    """Refuse an update that does not fit the layer's shape [out, in]. shape: None if the model lacks the layer."""
    expected = (update.b.shape[0], update.a.shape[1])
    if shape != expected:
        found = "which the model does not have" if shape is None else f"of shape {list(shape)} in the model"
        raise WeightsError(
            f"the adapter {shown(adapter)} changes {shown(module)} of shape {list(expected)}, {found}; "
            "use it with the base model that its adapter_config.json names"
        )


def read_adapter(name: str) -> dict[str, LowRankUpdate]:
    """Read an adapter. Returns the update of each module that it changes, for strength 1."""
    try:
        folder = locate(name)
    except CheckpointError as error:
        reason = str(error).partition(";")[0]
        raise CheckpointNotFoundError(f"{reason}; give an adapter's folder, as peft saves it, or its hub name") from error
    config_path, weights_path = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    if not config_path.exists():
        raise CheckpointNotFoundError(f"{folder} has no adapter_config.json; a LoRA adapter is a folder as peft saves it")
    if not weights_path.exists():
        raise CheckpointNotFoundError(
            f"{folder} has no adapter_model.safetensors. A .bin file is a pickle and may run code; save the adapter with "
            "safe_serialization=True"
        )
    config = read_json(config_path)
    for key, allowed in _NEUTRAL.items():
        if key in config and not any(type(config[key]) is type(value) and config[key] == value for value in allowed):
            raise UnsupportedError(
                f"{key}={shown(config[key])} in {config_path} is not supported, only {' or '.join(map(repr, allowed))}; "
                "merge the adapter into its base with peft's merge_and_unload, and load the result"
            )
    check_file(weights_path)
    files = WeightFiles([weights_path])
    by_module: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor_name in files:
        match = _TENSOR.fullmatch(tensor_name)
        if match is None or len(files[tensor_name].shape) != 2:
            raise UnsupportedError(f"{weights_path} has {first_ten([tensor_name])}, which is neither A nor B of a linear layer")
        module, letter = match.groups()
        by_module[module][letter] = files.read(tensor_name)
    return {module: _update(config, config_path, module, **matrices) for module, matrices in by_module.items()}


def _update(
    config: dict[str, object], config_path: Path, module: str, A: Tensor | None = None, B: Tensor | None = None
) -> LowRankUpdate:
    """Pair A and B of a module, with its scale according to the config."""
    if A is None or B is None or A.shape[0] != B.shape[1] or not A.is_floating_point() or not B.is_floating_point():
        raise WeightsError(
            f"{shown(module)} in the adapter of {config_path} has no A and B that fit, in floats; download it again"
        )
    rank = _for_module(config, "r", "rank_pattern", module, config_path)
    alpha = _for_module(config, "lora_alpha", "alpha_pattern", module, config_path)
    if rank != A.shape[0]:
        raise WeightsError(
            f"{shown(module)} has the rank {A.shape[0]}, but {config_path} says {shown(rank)}; download it again"
        )
    return LowRankUpdate(A, B, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _for_module(config: dict[str, object], key: str, patterns_key: str, module: str, config_path: Path) -> float:
    """Return the number for a module: that of the first pattern that matches the end of its name, or else of `key`."""
    value: object = config.get(key)
    patterns = config.get(patterns_key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{patterns_key} in {config_path} must map names to numbers, got {shown(patterns)}")
    for pattern, number in patterns.items():
        if _matches(pattern, module, patterns_key, config_path):
            value = number
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
        raise CheckpointError(f"{key} of {shown(module)} in {config_path} must be a number above 0, got {shown(value)}")
    return value


def _matches(pattern: str, module: str, patterns_key: str, config_path: Path) -> bool:
    """Whether a pattern is the module's name, or its end after a dot.

    peft takes patterns for regular expressions, which could run for hours. Here only names are taken, with an escaped dot.
    """
    name = pattern.removeprefix("^").replace("\\.", ".")
    if not re.fullmatch(r"[\w.]+", name):
        raise UnsupportedError(f"{patterns_key} in {config_path} has the pattern {shown(pattern)}; only names are supported")
    return module == name or (not pattern.startswith("^") and module.endswith(f".{name}"))
