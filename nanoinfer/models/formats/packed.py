"""Quantised safetensors as plain ones: what gptq.py, awq.py, compressed_tensors.py and fp8.py have in common.

Such a checkpoint has several tensors in place of a layer's `weight`: packed integers, scales, zero points. PackedWeights shows
one `weight` in their place, and computes rows of it when they are read. Layers that the checkpoint left unquantised have their
`weight` and pass through, so no list of them is needed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nanoinfer.errors import UnsupportedError, WeightsError, shown
from nanoinfer.models.weights import QuantizedWeight, TensorInfo, WeightFiles, Weights


class PackedWeights(Weights):
    """The tensors of a quantised checkpoint, each quantised layer with one `weight`.

    Args:
        files: the checkpoint's tensors.
        settings: quantization_config of config.json.
        config_path: for messages.

    Raises:
        UnsupportedError: settings that are not supported.
        WeightsError: a layer whose tensors are missing, or contradict each other in shape or dtype.
    """

    parts: ClassVar[tuple[str, ...]]  # names of a quantised layer's tensors. Every one has the first, and only those have it

    def __init__(self, files: WeightFiles, settings: dict[str, Any], config_path: Path) -> None:
        self.files = files
        self._settings = settings
        self._config_path = config_path
        self.read_settings()
        layers = [name.removesuffix(self.parts[0]) for name in files if name.endswith(f".{self.parts[0]}")]
        self._shapes = {layer: self.shape_of(layer) for layer in layers}  # [out, in] by "model.layers.0.mlp.up_proj."
        hidden = {layer + part for layer in layers for part in self.parts}
        self._names = [name for name in files if name not in hidden] + [f"{layer}weight" for layer in layers]

    def read_settings(self) -> None:
        """Keep what the format needs of the settings, and refuse what is not supported."""
        raise NotImplementedError

    def shape_of(self, layer: str) -> tuple[int, int]:
        """Return [out, in] of a quantised layer. Check its tensors by their headers."""
        raise NotImplementedError

    def unpack(self, layer: str, rows: slice) -> Tensor:
        """Return rows of a quantised layer's weight in fp32."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> TensorInfo:
        layer = self._quantised_layer(name)
        return self.files[name] if layer is None else TensorInfo(self._shapes[layer], "F32")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        layer = self._quantised_layer(name)
        return self.files.read(name, rows) if layer is None else self.unpack(layer, rows)

    def _quantised_layer(self, name: str) -> str | None:
        layer = name.removesuffix("weight")
        return layer if name.endswith(".weight") and layer in self._shapes else None

    # ---- for the formats

    def setting(self, name: str, allowed: tuple[object, ...], default: object = None) -> Any:
        """Return a setting, one of the allowed values. `default` is its value where it is absent."""
        return require(self._settings, name, allowed, self._config_path, default)

    def part(self, layer: str, name: str, dtypes: tuple[str, ...], *shape: int | None) -> TensorInfo:
        """Return the header of one of a layer's tensors. None stands for any size of an axis."""
        info = self.files.get(layer + name)
        if info is None:
            raise WeightsError(f"{layer}{name} is missing; download the checkpoint again")
        fits = len(info.shape) == len(shape) and all(b in (None, a) for a, b in zip(info.shape, shape, strict=True))
        if info.dtype not in dtypes or not fits:
            expected = ["any" if size is None else size for size in shape]
            raise WeightsError(
                f"{layer}{name} is {info.dtype} of shape {list(info.shape)}, expected is {' or '.join(dtypes)} of shape "
                f"{expected}; are the weights and quantization_config of the same checkpoint?"
            )
        return info


class Fields(NamedTuple):
    """Rows of a quantised layer: weight[out, in] = scales[out, g] * (integers[out, in] - zeros[out, g]), g = groups[in].

    Attributes:
        integers: [rows, in] in fp32.
        scales, zeros: [rows, number of groups] in fp32.
        groups: [in], the group of each input.
    """

    integers: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor


class IntegerWeights(PackedWeights):
    """The tensors of a checkpoint whose quantised layers are integers of `bits`, with a scale and a zero for each group."""

    has_integers = True
    bits: int

    def fields(self, layer: str, rows: slice) -> Fields:
        """Return rows of a quantised layer."""
        raise NotImplementedError

    def unpack(self, layer: str, rows: slice) -> Tensor:
        integers, scales, zeros, groups = self.fields(layer, rows)
        return (integers - zeros[:, groups]) * scales[:, groups]

    def integers(self, name: str) -> QuantizedWeight | None:
        layer = self._quantised_layer(name)
        if layer is None:
            return None
        integers, scales, zeros, groups = self.fields(layer, slice(None))
        num_inputs, num_groups = len(groups), scales.shape[1]
        in_order = torch.arange(num_inputs) // ceil_div(num_inputs, num_groups)
        if num_inputs % num_groups or not torch.equal(groups, in_order) or zeros.max() > 255:
            return None
        return QuantizedWeight(self.bits, integers.to(torch.uint8), scales, zeros.to(torch.uint8))

    def group_of_inputs(self, layer: str, name: str, num_inputs: int, num_groups: int, group_size: int) -> Tensor:
        """Return the group of each input. `name` is the tensor of groups out of their order, where the layer has one."""
        if layer + name not in self.files:
            return torch.arange(num_inputs) // group_size
        groups = self.files.read(layer + name).long()
        if len(groups) and (int(groups.min()) < 0 or int(groups.max()) >= num_groups):
            raise WeightsError(f"{layer}{name} names groups outside 0 .. {num_groups - 1}; download the checkpoint again")
        return groups


FLOATS = ("F16", "BF16", "F32")  # dtypes of scales


def require(settings: dict[str, Any], name: str, allowed: tuple[object, ...], path: Path, default: object = None) -> Any:
    """Return a setting that has one of the allowed values."""
    value = settings.get(name, default)
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise UnsupportedError(
            f"{name}={shown(value)} in quantization_config of {path} is not supported, only {' or '.join(map(repr, allowed))}; "
            "take a different quantisation of the model, or the unquantised one"
        )
    return value


def unpack_words(words: Tensor, num_bits: int) -> Tensor:
    """Split int32 words into unsigned fields, lowest bits first: [..., n] -> [..., n, 32 / num_bits] in fp32."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << num_bits) - 1).float()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
