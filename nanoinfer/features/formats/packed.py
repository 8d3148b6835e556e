"""Read quantised safetensors like plain ones: GPTQ, AWQ, compressed-tensors and FP8.

Such a checkpoint has several tensors instead of a layer's `weight`: packed integers, scales, zero points. PackedWeights shows
a `weight` in their place, and computes rows of it when they are read. Layers that the checkpoint left unquantised have their
`weight` and pass through, so no list of them is needed.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanoinfer.errors import UnsupportedError, WeightsError, shown
from nanoinfer.features.quantization.rounding import QuantizedWeight
from nanoinfer.loading.weights import DerivedWeights, TensorInfo, Weights

_FLOATS = ("F16", "BF16", "F32")  # of scales
_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)


class PackedWeights(DerivedWeights):
    """The tensors of a quantised checkpoint, with a `weight` for each quantised layer. settings: its quantization_config."""

    bits: int  # of a stored number
    suffixes: ClassVar[tuple[str, ...]]  # the tensors of a quantised layer. Every quantised layer, and no other, has the first

    def __init__(self, files: Weights, settings: dict[str, Any], config_path: Path) -> None:
        self.base = files
        self._settings = settings
        self._config_path = config_path
        self.read_settings()
        layers = [name.removesuffix(self.suffixes[0]) for name in files if name.endswith(f".{self.suffixes[0]}")]
        self._shapes = {layer: self.shape_of(layer) for layer in layers}  # "model.layers.0.mlp.up_proj." -> [out, in]
        hidden = {layer + suffix for layer in layers for suffix in self.suffixes}
        super().__init__((name, info) for name, info in files.items() if name not in hidden)
        self.update((f"{layer}weight", TensorInfo(shape, "F32")) for layer, shape in self._shapes.items())

    def read_settings(self) -> None:
        """Keep the settings that the format needs, and refuse what is not supported."""
        raise NotImplementedError

    def shape_of(self, layer: str) -> tuple[int, int]:
        """Return the shape [out, in] of a quantised layer, after checking its tensors by their headers."""
        raise NotImplementedError

    def unpack(self, layer: str, rows: slice) -> Tensor:
        """Return rows of a quantised layer's weight in fp32."""
        raise NotImplementedError

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        layer = self._quantised_layer(name)
        return self.base.read(name, rows) if layer is None else self.unpack(layer, rows)

    def _quantised_layer(self, name: str) -> str | None:
        layer = name.removesuffix("weight")
        return layer if name.endswith(".weight") and layer in self._shapes else None

    # ---- for the formats

    def setting(
        self, name: str, allowed: tuple[object, ...], default: object = None, *, settings: dict[str, Any] | None = None
    ) -> Any:
        """Return a setting, which must have one of the allowed values. settings: where it is. None: in the checkpoint's."""
        value = (self._settings if settings is None else settings).get(name, default)
        if not any(type(value) is type(known) and value == known for known in allowed):
            raise UnsupportedError(
                f"{name}={shown(value)} in quantization_config of {self._config_path} is not supported, only "
                f"{' or '.join(map(repr, allowed))}; take a different quantisation of the model, or the unquantised one"
            )
        return value

    def header(self, layer: str, name: str, dtypes: tuple[str, ...], *shape: int | None) -> TensorInfo:
        """Return the header of one of a layer's tensors. shape: the expected sizes. None: an axis may have any size."""
        info = self.base.get(layer + name)
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


class FP8Weights(PackedWeights):
    """FP8 checkpoints as Qwen and DeepSeek publish them: weights in float8 (e4m3), with a scale for each block of 128 x 128.

        weight[out, in] = float8[out, in] * weight_scale_inv[out // 128, in // 128]

    The checkpoint's own kernels also round activations to float8 (activation_scheme "dynamic"). Here only the weights are
    rounded, so logits are closer to those of the unquantised model.

    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 3.3.2, and transformers'
    integrations/finegrained_fp8.py.
    """

    bits = 8
    suffixes = ("weight_scale_inv", "weight")

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
        num_outputs, num_inputs = self.header(layer, "weight", ("F8_E4M3",), None, None).shape
        num_blocks = -(-num_outputs // self._block[0]), -(-num_inputs // self._block[1])
        self.header(layer, "weight_scale_inv", _FLOATS, *num_blocks)
        return num_outputs, num_inputs

    def unpack(self, layer: str, rows: slice) -> Tensor:
        num_outputs, num_inputs = self._shapes[layer]
        scales = self.base.read(layer + "weight_scale_inv").float()
        scales = scales[torch.arange(num_outputs)[rows] // self._block[0]]  # for each row
        scales = scales.repeat_interleave(self._block[1], dim=1)[:, :num_inputs]
        return self.base.read(layer + "weight", rows).float() * scales


# ---- integers with a scale and a zero point for each output and group of inputs


Fields = tuple[Tensor, Tensor, Tensor, Tensor]


class IntegerWeights(PackedWeights):
    """The tensors of a checkpoint whose quantised layers are integers of `bits`."""

    group_size: int  # the number of inputs that share a scale. -1: all inputs

    def fields(self, layer: str, rows: slice) -> Fields:
        """Return rows of a layer: weight[out, in] = scales[out, g] * (integers[out, in] - zeros[out, g]), g = groups[in].

        Returns: integers [rows, in], scales and zeros [rows, number of groups], all in fp32, and groups [in].
        """
        raise NotImplementedError

    def unpack(self, layer: str, rows: slice) -> Tensor:
        integers, scales, zeros, groups = self.fields(layer, rows)
        return (integers - zeros[:, groups]) * scales[:, groups]

    def integers(self, name: str, rows: slice = slice(None)) -> QuantizedWeight | None:
        layer = self._quantised_layer(name)
        if layer is None:
            return None
        integers, scales, zeros, groups = self.fields(layer, rows)
        num_inputs, num_groups = len(groups), scales.shape[1]
        in_order = torch.arange(num_inputs) // -(-num_inputs // num_groups)
        if num_inputs % num_groups or not torch.equal(groups, in_order) or zeros.max() > 255:
            return None
        return QuantizedWeight(self.bits, integers.to(torch.uint8), scales, zeros.to(torch.uint8))

    def num_groups(self, num_inputs: int) -> int:
        return 1 if self.group_size == -1 else -(-num_inputs // self.group_size)

    def group_of_inputs(self, layer: str, name: str) -> Tensor:
        """Return the group of each input. name: the tensor with each input's group, which layers with act-order have."""
        num_inputs = self._shapes[layer][1]
        if layer + name not in self.base:
            return torch.arange(num_inputs) // (num_inputs if self.group_size == -1 else self.group_size)
        groups, num_groups = self.base.read(layer + name).long(), self.num_groups(num_inputs)
        if len(groups) and (int(groups.min()) < 0 or int(groups.max()) >= num_groups):
            raise WeightsError(f"{layer}{name} names groups outside 0 .. {num_groups - 1}; download the checkpoint again")
        return groups


class GPTQWeights(IntegerWeights):
    """GPTQ checkpoints, in 4 or 8 bits.

        weight[out, in] = scales[g, out] * (integer[in, out] - zero[g, out]),  g = g_idx[in], or in // group_size

        qweight  int32 [in * bits / 32, out]      consecutive inputs of one output, lowest bits first
        qzeros   int32 [groups, out * bits / 32]  consecutive outputs. "gptq" stores zero - 1, "gptq_v2" stores zero
        scales   fp16  [groups, out]
        g_idx    int32 [in]                       with desc_act the groups are not in the inputs' order

    Source: Frantar et al. 2022, https://arxiv.org/abs/2210.17323, and the files as AutoGPTQ writes them (qlinear_cuda.py of
    https://github.com/AutoGPTQ/AutoGPTQ).
    """

    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    has_empty_biases = True  # AutoGPTQ writes a bias of zeros for a layer without a bias

    def read_settings(self) -> None:
        self.bits = self.setting("bits", (4, 8))
        self.group_size = self.setting("group_size", (-1, *_GROUP_SIZES))
        self.setting("pack_dtype", ("int32",), "int32")
        self.setting("dynamic", (None, {}))  # would give some layers other bits
        name = "checkpoint_format" if "checkpoint_format" in self._settings else "format"
        self._stored_zero = 1 if self.setting(name, ("gptq", "gptq_v2"), "gptq") == "gptq" else 0

    def shape_of(self, layer: str) -> tuple[int, int]:
        per_word = 32 // self.bits
        num_words, num_outputs = self.header(layer, "qweight", ("I32",), None, None).shape
        num_inputs = num_words * per_word
        self.header(layer, "qzeros", ("I32",), self.num_groups(num_inputs), num_outputs // per_word)
        self.header(layer, "scales", _FLOATS, self.num_groups(num_inputs), num_outputs)
        if layer + "g_idx" in self.base:
            self.header(layer, "g_idx", ("I32",), num_inputs)
        return num_outputs, num_inputs

    def fields(self, layer: str, rows: slice) -> Fields:
        scales = self.base.read(layer + "scales").float()[:, rows]
        zeros = unpack_words(self.base.read(layer + "qzeros"), self.bits).flatten(1)[:, rows] + self._stored_zero
        words = self.base.read(layer + "qweight")[:, rows]
        integers = unpack_words(words, self.bits).transpose(1, 2).flatten(0, 1)  # [in, rows]
        return integers.T, scales.T, zeros.T, self.group_of_inputs(layer, "g_idx")


class AWQWeights(IntegerWeights):
    """AWQ checkpoints in the "gemm" layout, with 4 bits.

        weight[out, in] = scales[g, out] * (integer[in, out] - zero[g, out]),  g = in // group_size

        qweight  int32 [in, out / 8]      eight outputs of an input in a word
        qzeros   int32 [groups, out / 8]  the same
        scales   fp16  [groups, out]

    The 4-bit fields of a word, lowest first, are its outputs 0, 2, 4, 6, 1, 3, 5, 7.

    Source: Lin et al. 2023, https://arxiv.org/abs/2306.00978, and awq/utils/packing_utils.py of
    https://github.com/casper-hansen/AutoAWQ.
    """

    bits = 4
    suffixes = ("qweight", "qzeros", "scales")
    field_of_output = (0, 4, 1, 5, 2, 6, 3, 7)

    def read_settings(self) -> None:
        self.setting("bits", (4,))
        self.group_size = self.setting("group_size", (-1, *_GROUP_SIZES))
        self.setting("zero_point", (True,))
        name = "version" if "version" in self._settings else "format"
        self.setting(name, ("gemm",), settings={name: str(self._settings.get(name, "gemm")).lower()})  # GEMM is the same

    def shape_of(self, layer: str) -> tuple[int, int]:
        num_inputs, num_words = self.header(layer, "qweight", ("I32",), None, None).shape
        self.header(layer, "qzeros", ("I32",), self.num_groups(num_inputs), num_words)
        self.header(layer, "scales", _FLOATS, self.num_groups(num_inputs), num_words * 8)
        return num_words * 8, num_inputs

    def fields(self, layer: str, rows: slice) -> Fields:
        start, stop, _ = rows.indices(self._shapes[layer][0])
        words = slice(start // 8, -(-stop // 8))

        def outputs(name: str) -> Tensor:
            """Return rows of the fields, in the order of the outputs: [n, words] -> [n, rows]."""
            fields = unpack_words(self.base.read(layer + name)[:, words], self.bits)[..., self.field_of_output]
            return fields.flatten(1)[:, start - words.start * 8 : stop - words.start * 8]

        scales = self.base.read(layer + "scales").float()[:, start:stop]
        return outputs("qweight").T, scales.T, outputs("qzeros").T, self.group_of_inputs(layer, "g_idx")


class CompressedWeights(IntegerWeights):
    """Checkpoints of compressed-tensors in the format "pack-quantized": 4 or 8 bits, for the weights alone.

        weight[out, in] = weight_scale[out, g] * (integer[out, in] - zero[out, g]),  g = weight_g_idx[in], or in // group_size

        weight_packed      int32 [out, in * bits / 32]      consecutive inputs, lowest bits first, as integer + 2^(bits - 1)
        weight_scale       float [out, groups]
        weight_zero_point  int32 [out * bits / 32, groups]  if not symmetric: consecutive outputs, as zero + 2^(bits - 1)
        weight_g_idx       int32 [in]                       with actorder "group" the groups are not in the inputs' order
        weight_shape       int64 [2]                        out and in

    Integer and zero have the same offset, which cancels, so both are used as stored. A symmetric layer's zero is 2^(bits - 1).

    Source: compressors/pack_quantized of https://github.com/neuralmagic/compressed-tensors.
    """

    suffixes = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")

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
        [(self.bits, self.group_size)] = found

    def _read_group(self, group: Any) -> tuple[int, int]:
        """Return the bits and the group size of one of config_groups."""
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise UnsupportedError(f"a group of config_groups in {self._config_path} must have weights, got {shown(group)}")
        for name in ("input_activations", "output_activations"):  # the model would compute with rounded activations
            self.setting(name, (None,), settings=group)
        self.setting("format", (None, "pack-quantized"), settings=group)
        self.setting("type", ("int",), "int", settings=weights)
        is_grouped = self.setting("strategy", ("group", "channel"), settings=weights) == "group"
        group_size = self.setting("group_size", _GROUP_SIZES, settings=weights) if is_grouped else -1
        return self.setting("num_bits", (4, 8), settings=weights), group_size

    def shape_of(self, layer: str) -> tuple[int, int]:
        per_word = 32 // self.bits
        num_outputs, num_words = self.header(layer, "weight_packed", ("I32",), None, None).shape
        shape = num_outputs, num_words * per_word
        self.header(layer, "weight_shape", ("I64", "I32"), 2)
        if (stored := tuple(self.base.read(layer + "weight_shape").tolist())) != shape:
            raise WeightsError(f"{layer}weight_shape is {list(stored)}, but weight_packed holds {list(shape)}")
        num_groups = self.num_groups(shape[1])
        self.header(layer, "weight_scale", _FLOATS, num_outputs, num_groups)
        if layer + "weight_zero_point" in self.base:
            self.header(layer, "weight_zero_point", ("I32",), -(-num_outputs // per_word), num_groups)
        if layer + "weight_g_idx" in self.base:
            self.header(layer, "weight_g_idx", ("I32", "I64"), shape[1])
        return shape

    def fields(self, layer: str, rows: slice) -> Fields:
        scales = self.base.read(layer + "weight_scale", rows).float()
        integers = unpack_words(self.base.read(layer + "weight_packed", rows), self.bits).flatten(1)  # [rows, in]
        zeros = torch.full_like(scales, 2 ** (self.bits - 1))
        if layer + "weight_zero_point" in self.base:
            packed = self.base.read(layer + "weight_zero_point")
            stored = unpack_words(packed, self.bits)  # [out * bits / 32, groups, 32 / bits]
            zeros = stored.transpose(1, 2).flatten(0, 1)[: self._shapes[layer][0]][rows]
        return integers, scales, zeros, self.group_of_inputs(layer, "weight_g_idx")


def unpack_words(words: Tensor, num_bits: int) -> Tensor:
    """Split int32 words into unsigned fields, lowest bits first: [..., n] -> [..., n, 32 / num_bits] in fp32."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << num_bits) - 1).float()


_FORMATS: dict[str, type[PackedWeights]] = {
    "gptq": GPTQWeights,
    "awq": AWQWeights,
    "compressed-tensors": CompressedWeights,
    "fp8": FP8Weights,
}


def open_packed(files: Weights, settings: object, config_path: Path) -> Weights:
    """Return the tensors of a checkpoint whose config.json has these settings. experts.py reads those of MXFP4."""
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method == "mxfp4":
        return files
    if not isinstance(method, str) or method not in _FORMATS or not isinstance(settings, dict):
        raise UnsupportedError(
            f"checkpoints quantised with {shown(method)} are not supported; {', '.join(_FORMATS)} and mxfp4 are. "
            "Take one of these, a GGUF file, or the unquantised checkpoint"
        )
    return _FORMATS[method](files, settings, config_path)
