"""Checkpoints of compressed-tensors in the form "pack-quantized": integers of 4 or 8 bits for the weights alone.

    weight[out, in] = weight_scale[out, g] * (integer[out, in] - zero[out, g]),  g = weight_g_idx[in], or in // group_size

    weight_packed      int32 [out, in * bits / 32]      consecutive inputs, lowest bits first, as integer + 2^(bits - 1)
    weight_scale       float [out, groups]
    weight_zero_point  int32 [out * bits / 32, groups]  if not symmetric: consecutive outputs, as zero + 2^(bits - 1)
    weight_g_idx       int32 [in]                       with actorder "group" the groups are not in the inputs' order
    weight_shape       int64 [2]                        out and in

Integer and zero have the same offset, which cancels, so both are used as they are stored. The zero of a symmetric layer is
stored as 2^(bits - 1).

Source: compressors/pack_quantized of https://github.com/neuralmagic/compressed-tensors.
"""

from typing import Any

import torch

from nanoinfer.errors import UnsupportedError, WeightsError, shown
from nanoinfer.models.formats.packed import FLOATS, Fields, IntegerWeights, ceil_div, require, unpack_words


class CompressedWeights(IntegerWeights):
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")

    def read_settings(self) -> None:
        self.setting("format", ("pack-quantized",))
        self.setting("quantization_status", ("compressed",), "compressed")
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            self.setting(name, (None, {}))
        groups = self._settings.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise UnsupportedError(
                f"config_groups={shown(groups)} in quantization_config of {self._config_path} names no group"
            )
        found = {self._read_group(group) for group in groups.values()}
        if len(found) > 1:
            raise UnsupportedError(f"{self._config_path} quantises some layers differently from others, which is not supported")
        [(self.bits, self._group_size)] = found

    def _read_group(self, group: Any) -> tuple[int, int]:
        """Return the bits and the group size of one of config_groups. A group size of -1 is all inputs of an output."""
        path = self._config_path
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise UnsupportedError(f"a group of config_groups in {path} must have weights, got {shown(group)}")
        for name in ("input_activations", "output_activations"):  # the model would compute with activations in few bits
            require(group, name, (None,), path)
        require(group, "format", (None, "pack-quantized"), path)
        require(weights, "type", ("int",), path, "int")
        is_grouped = require(weights, "strategy", ("group", "channel"), path) == "group"
        sizes = (16, 32, 64, 128, 256, 512, 1024)
        group_size = require(weights, "group_size", sizes, path) if is_grouped else -1
        return require(weights, "num_bits", (4, 8), path), group_size

    def shape_of(self, layer: str) -> tuple[int, int]:
        per_word = 32 // self.bits
        num_outputs, num_words = self.part(layer, "weight_packed", ("I32",), None, None).shape
        shape = num_outputs, num_words * per_word
        self.part(layer, "weight_shape", ("I64", "I32"), 2)
        if (stored := tuple(self.files.read(layer + "weight_shape").tolist())) != shape:
            raise WeightsError(f"{layer}weight_shape is {list(stored)}, but weight_packed holds {list(shape)}")
        num_groups = 1 if self._group_size == -1 else ceil_div(shape[1], self._group_size)
        self.part(layer, "weight_scale", FLOATS, num_outputs, num_groups)
        if layer + "weight_zero_point" in self.files:
            self.part(layer, "weight_zero_point", ("I32",), ceil_div(num_outputs, per_word), num_groups)
        if layer + "weight_g_idx" in self.files:
            self.part(layer, "weight_g_idx", ("I32", "I64"), shape[1])
        return shape

    def fields(self, layer: str, rows: slice) -> Fields:
        num_outputs, num_inputs = self._shapes[layer]
        scales = self.files.read(layer + "weight_scale", rows).float()
        integers = unpack_words(self.files.read(layer + "weight_packed", rows), self.bits).flatten(1)  # [rows, in]
        group_size = num_inputs if self._group_size == -1 else self._group_size
        groups = self.group_of_inputs(layer, "weight_g_idx", num_inputs, scales.shape[1], group_size)
        if layer + "weight_zero_point" not in self.files:
            return Fields(integers, scales, torch.full_like(scales, 2 ** (self.bits - 1)), groups)
        zeros = unpack_words(self.files.read(layer + "weight_zero_point"), self.bits)  # [out * bits / 32, groups, 32 / bits]
        zeros = zeros.transpose(1, 2).flatten(0, 1)[:num_outputs][rows]
        return Fields(integers, scales, zeros, groups)
