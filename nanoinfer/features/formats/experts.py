"""Divide tensors that hold all experts of a layer into a matrix and a bias for each expert.

In: Weights with such tensors. Out: Weights with the names of the model's experts. All other tensors pass through.

gpt-oss stores them "interleaved":

    gate_up_proj       [experts, in, 2 * out]  gate_proj has the even outputs, up_proj the odd outputs
    gate_up_proj_bias  [experts, 2 * out]
    down_proj          [experts, in, out]
    down_proj_bias     [experts, out]

transformers' Qwen models, and some checkpoints of Qwen3.5, store them in "halves":

    gate_up_proj       [experts, 2 * out, in]  gate_proj has the first half of the outputs, up_proj the second half
    down_proj          [experts, out, in]

A checkpoint of gpt-oss in MXFP4 has, instead of a matrix, numbers of 4 bits and a scale for 32 inputs of each output:

    *_proj_blocks      uint8 [experts, outputs, in / 32, 16]  two numbers in a byte, the lower bits first
    *_proj_scales      uint8 [experts, outputs, in / 32]      weight = FP4[number] * 2 ** (scale - 127)

bfloat16 holds such a weight exactly. Source: https://arxiv.org/abs/2310.10537, and transformers' integrations/mxfp4.py.
"""

import re
from typing import Literal

import torch
from torch import Tensor

from nanoinfer.features.quantization.rounding import HasIntegers, QuantizedWeight
from nanoinfer.loading.weights import DerivedWeights, TensorInfo, Weights

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_POWERS = torch.tensor([2.0 ** (scale - 127) for scale in range(256)])  # torch.ldexp may be off by a rounding

_TENSOR = re.compile(r"(?P<layer>.+\.experts\.)(?P<projection>gate_up_proj|down_proj)(?P<kind>|_bias|_blocks)")
_NUM_AXES = {"": 3, "_bias": 2, "_blocks": 4}
_MAX_TENSORS = 2**20  # after the division. gpt-oss-120b has 28,000


def unpack_fp4(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return FP4[numbers] * 2 ** (scales - 127) in fp32, [..., n]. numbers: uint8 [..., n]. scales: uint8 [...]."""
    return FP4[numbers.int()] * _POWERS[scales.int()].unsqueeze(-1)


class ExpertWeights(DerivedWeights):
    """The tensors of `base`, with those of all experts divided. A tensor of an unexpected shape keeps its name."""

    def __init__(self, base: Weights, layout: Literal["interleaved", "halves"]) -> None:
        super().__init__(base)
        self.base, self._layout = base, layout
        self.has_empty_biases = base.has_empty_biases
        self._sources: dict[str, tuple[str, int, slice]] = {}  # name -> a tensor of `base`, the expert, its outputs
        for name, info in base.items():
            match = _TENSOR.fullmatch(name)
            if match is None or len(info.shape) != _NUM_AXES[match["kind"]] or 0 in info.shape or len(self) > _MAX_TENSORS:
                continue
            if match["kind"] == "_blocks":
                scales = base.get(_scales_of(name))
                if scales is None or (scales.shape, scales.dtype) != (info.shape[:-1], "U8") or info.shape[3] != 16:
                    continue
                del self[_scales_of(name)]
            del self[name]
            self._divide(name, info, match)

    def _divide(self, name: str, info: TensorInfo, match: re.Match[str]) -> None:
        num_experts, num_outputs, *inputs = info.shape
        if match["kind"] == "_blocks":
            inputs = [32 * info.shape[2]]
        elif not match["kind"] and self._layout == "interleaved":
            inputs, num_outputs = [info.shape[1]], info.shape[2]
        leaf, dtype = ("weight" if inputs else "bias"), ("BF16" if match["kind"] == "_blocks" else info.dtype)
        half = num_outputs // 2
        slices = {"down_proj": slice(None)}  # the outputs of each projection
        if match["projection"] == "gate_up_proj" and self._layout == "interleaved":
            slices = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        elif match["projection"] == "gate_up_proj":
            slices = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
        for projection, outputs in slices.items():
            own = TensorInfo((len(range(num_outputs)[outputs]), *inputs), dtype)
            for expert in range(num_experts):
                self[f"{match['layer']}{expert}.{projection}.{leaf}"] = own
                self._sources[f"{match['layer']}{expert}.{projection}.{leaf}"] = name, expert, outputs

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        if name not in self._sources:
            return self.base.read(name, rows)
        source, expert, outputs = self._sources[name]
        tensor = self.base.read(source, slice(expert, expert + 1))[0]
        if source.endswith("_blocks"):
            blocks = tensor[outputs][rows]  # [rows, groups, 16]
            [scales] = self.base.read(_scales_of(source), slice(expert, expert + 1))
            return unpack_fp4(torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2), scales[outputs][rows]).flatten(1)
        is_transposed = self._layout == "interleaved" and not source.endswith("_bias")
        return (tensor.T if is_transposed else tensor)[outputs][rows]

    def integers(self, name: str, rows: slice = slice(None)) -> QuantizedWeight | None:
        if not isinstance(self.base, HasIntegers) or name in self._sources:
            return None
        return self.base.integers(name, rows)


def _scales_of(name: str) -> str:
    return name.removesuffix("_blocks") + "_scales"
