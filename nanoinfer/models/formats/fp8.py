"""FP8 checkpoints as Qwen and DeepSeek publish them: weights in float8 (e4m3), a scale for each block of 128 x 128.

    weight[out, in] = float8[out, in] * weight_scale_inv[out // 128, in // 128]

The checkpoint's own kernels also round activations to float8 (activation_scheme "dynamic"). Here only the weights are rounded,
so logits are closer to the unquantised model's.

Source: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.3.2, and transformers' integrations/finegrained_fp8.py.
"""

from typing import Any

import torch
from torch import Tensor

from nanoinfer.errors import UnsupportedError, shown
from nanoinfer.models.formats.packed import FLOATS, PackedWeights, ceil_div


class FP8Weights(PackedWeights):
    parts = ("weight_scale_inv", "weight")

    def read_settings(self) -> None:
        self.setting("fmt", ("e4m3",), "e4m3")
        self.setting("activation_scheme", ("dynamic",), "dynamic")
        block: Any = self._settings.get("weight_block_size")
        is_pair = isinstance(block, list | tuple) and len(block) == 2
        if not is_pair or not all(type(size) is int and 1 <= size <= 2**16 for size in block):
            raise UnsupportedError(
                f"weight_block_size={shown(block)} in quantization_config of {self._config_path} must be two sizes, such as "
                "[128, 128]; other forms of FP8 are not supported. Take the unquantised checkpoint"
            )
        self._block: tuple[int, int] = (block[0], block[1])

    def shape_of(self, layer: str) -> tuple[int, int]:
        num_outputs, num_inputs = self.part(layer, "weight", ("F8_E4M3",), None, None).shape
        blocks = ceil_div(num_outputs, self._block[0]), ceil_div(num_inputs, self._block[1])
        self.part(layer, "weight_scale_inv", FLOATS, *blocks)
        return num_outputs, num_inputs

    def unpack(self, layer: str, rows: slice) -> Tensor:
        num_outputs, num_inputs = self._shapes[layer]
        scales = self.files.read(layer + "weight_scale_inv").float()
        scales = scales[torch.arange(num_outputs)[rows] // self._block[0]]  # of each row
        scales = scales.repeat_interleave(self._block[1], dim=1)[:, :num_inputs]
        return self.files.read(layer + "weight", rows).float() * scales
