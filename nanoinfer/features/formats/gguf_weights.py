"""Read the weights of a GGUF file as the model's parameters, with blocks of few bits unpacked to floats.

In: a GGUFFile. Out: Weights with the model's own names, read piece by piece. A piece takes a few times the memory
of its floats, and no tensor is unpacked whole unless its axes are swapped.

A block has `d`, its scale in fp16, and integers of 4 to 8 bits. Formats that end in _1, and K formats of 4 and 5 bits, have a
minimum too. K blocks have 256 weights in groups of 16 or 32, and a scale for each group.
Source: ggml-quants.c of https://github.com/ggml-org/ggml, dequantize_row_*
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nanoinfer.errors import WeightsError, shown
from nanoinfer.features.formats.experts import unpack_fp4
from nanoinfer.features.formats.gguf import MAX_TENSORS, GGUFFile, GGUFTensor
from nanoinfer.features.formats.gguf_families import WITH_STATES, parameter_name
from nanoinfer.features.quantization.rounding import QuantizedWeight
from nanoinfer.loading.weights import FLOAT_DTYPES, TensorInfo, Weights
from nanoinfer.system.pages import release_pages

_GPT2_LINEAR = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # [in, out] in GPT-2's checkpoints, [out, in] in GGUF
_TILED = ("qwen35", "qwen35moe")  # architectures with value heads in another order
_REORDERED = {"llama": (".q_proj.", ".k_proj.")} | dict.fromkeys(WITH_STATES, (".linear_attn.",))


class GGUFWeights(Weights):
    """The tensors of a GGUF file, with the names and the order of the family's safetensors.

    The changes of llama.cpp's converter are undone:

    rows of q and k    of "llama". llama.cpp rotates neighbouring numbers of a head, (0, 1), (2, 3), ..., and Llama's
                       checkpoints the two halves, (0, n/2), (1, n/2 + 1), ...
    norms              of Gemma 3, Qwen3-Next and Qwen3.5 have the 1 added that ZeroCentredRMSNorm adds
    experts            of a layer are a single tensor for each projection
    value heads        of Qwen3.5: the first of each key head come first, then the second of each. In the checkpoint the value
                       heads of a key head are together
    b and a            of Qwen3-Next are a single matrix, in which the rows of a key head are together
    A_log              is stored as -exp(A_log)
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tensors: dict[str, GGUFTensor] = {}
        for stored, tensor in file.tensors.items():
            if (name := parameter_name(file, stored)) is not None:
                self._tensors |= _parameters(name, tensor)
        for name, tensor in self._tensors.items():
            if len(tensor.shape) == 1 and tensor.block_type.num_weights > 1:
                raise WeightsError(
                    f"{shown(name)} in {file.path} has one axis and the type {tensor.block_type.name}, whose blocks are of "
                    "matrices; download it again"
                )
        # Mapped, not read. The mapping is private, because torch has no read-only tensors.
        size = file.path.stat().st_size
        self._bytes = torch.from_file(str(file.path), shared=False, size=size, dtype=torch.uint8)
        super().__init__((name, self._info(name)) for name in self._tensors)

    def _info(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        shape = tensor.shape[::-1] if self._is_transposed(name) else tensor.shape
        if tensor.block_type.name not in FLOAT_DTYPES:
            return TensorInfo(shape, "F32")
        is_in_order = not any(part in name for part in _REORDERED.get(self._file.architecture, ()))
        return TensorInfo(shape, tensor.block_type.name, is_mapped=is_in_order)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        if self._is_transposed(name):
            return self._unpack(name).T[rows]
        weight = self._unpack(name, rows)
        if self._file.architecture in ("gemma3", *WITH_STATES):
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                return weight.float() - 1
            if name.endswith("A_log"):
                return (-weight.float()).log()
            if self._has_tiled_inputs(name):
                return weight[:, self._grouped(weight.shape[1])]
        return weight

    def release(self) -> None:
        release_pages(self._bytes)

    def integers(self, name: str, rows: slice = slice(None)) -> QuantizedWeight | None:
        tensor = self._tensors[name]
        found = _WITHOUT_MINIMUM.get(tensor.block_type.name)
        if found is None or found[0] == 5 or self._has_tiled_inputs(name):  # a QuantizedWeight has 4 or 8 bits
            return None
        bits, zero, unpack = found
        stored = self._rows(name, rows)
        blocks = stored.reshape(-1, tensor.block_type.num_bytes)
        integers, scales = unpack(blocks).view(len(stored), -1), _half(blocks, 0).view(len(stored), -1)
        return QuantizedWeight(bits, integers, scales, torch.full_like(scales, zero, dtype=torch.uint8))

    def _is_transposed(self, name: str) -> bool:
        return self._file.architecture == "gpt2" and name.endswith(_GPT2_LINEAR)

    def _has_tiled_inputs(self, name: str) -> bool:
        """Whether the inputs of a matrix are in llama.cpp's order of value heads."""
        return self._file.architecture in _TILED and name.endswith("linear_attn.out_proj.weight")

    def _grouped(self, num_rows: int) -> Tensor:
        """Return, for each row or input of the value heads, its place in the file."""
        num_key_heads, num_heads = self._file.get("ssm.group_count"), self._file.get("ssm.time_step_rank")
        return torch.arange(num_rows).view(num_heads // num_key_heads, num_key_heads, -1).transpose(0, 1).flatten()

    def _order(self, name: str) -> Tensor | None:
        """Return, for each row of a parameter, its row in the file. None: the rows are in order."""
        file, num_rows = self._file, self._tensors[name].shape[0]
        leaf = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if file.architecture == "llama" and leaf in ("q_proj", "k_proj"):
            num_heads = file.get("attention.head_count")
            num_heads = num_heads if leaf == "q_proj" else file.get("attention.head_count_kv", num_heads)
            return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()
        if file.architecture == "qwen3next" and leaf in ("in_proj_b", "in_proj_a"):
            heads = torch.arange(2 * num_rows).view(file.get("ssm.group_count"), 2, -1)
            return heads[:, 0 if leaf == "in_proj_b" else 1].flatten()
        if file.architecture in _TILED and leaf in ("in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias"):
            return self._grouped(num_rows)
        if file.architecture in _TILED and leaf in ("in_proj_qkv", "conv1d"):  # the values come last
            num_values = file.get("ssm.inner_size")
            return torch.cat([torch.arange(num_rows - num_values), num_rows - num_values + self._grouped(num_values)])
        return None

    def _unpack(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return rows of a parameter: in the file's dtype if it is a float, otherwise in fp32."""
        tensor, stored = self._tensors[name], self._rows(name, rows)
        if dtype := FLOAT_DTYPES.get(tensor.block_type.name):
            return stored.view(dtype).view(len(stored), *tensor.shape[1:])
        blocks = stored.reshape(-1, tensor.block_type.num_bytes)
        if tensor.block_type.name in _WITHOUT_MINIMUM:
            _, zero, integers = _WITHOUT_MINIMUM[tensor.block_type.name]
            weights = _half(blocks, 0) * (integers(blocks).float() - zero)
        else:
            weights = _OTHERS[tensor.block_type.name](blocks)
        return weights.view(len(stored), *tensor.shape[1:])

    def _rows(self, name: str, rows: slice) -> Tensor:
        """Return rows of a parameter as they are stored, uint8 [rows, bytes of whole blocks]."""
        tensor, order = self._tensors[name], self._order(name)
        num_bytes = math.prod(tensor.shape[1:]) * tensor.block_type.num_bytes // tensor.block_type.num_weights
        stored = self._bytes[tensor.start : tensor.start + tensor.num_bytes].view(-1, num_bytes)
        return stored[rows] if order is None else stored[order[rows]]


def _parameters(name: str, tensor: GGUFTensor) -> dict[str, GGUFTensor]:
    """Return the parameters that a tensor holds, by name, with their shapes."""
    layer, found, projection = name.partition(".experts.")
    if found and tensor.shape[0] <= MAX_TENSORS:
        expert = replace(tensor, shape=tensor.shape[1:], num_bytes=tensor.num_bytes // tensor.shape[0])
        starts = [tensor.start + i * expert.num_bytes for i in range(tensor.shape[0])]
        return {f"{layer}.experts.{i}.{projection}": replace(expert, start=start) for i, start in enumerate(starts)}
    if name.endswith("linear_attn.in_proj_ba.weight"):
        half = replace(tensor, shape=(tensor.shape[0] // 2, *tensor.shape[1:]))
        return {name.replace("_ba.", "_b."): half, name.replace("_ba.", "_a."): half}
    if name.endswith("linear_attn.conv1d.weight"):
        tensor = replace(tensor, shape=(*tensor.shape[:1], 1, *tensor.shape[1:]))
    elif name.endswith("mlp.shared_expert_gate.weight"):
        tensor = replace(tensor, shape=(1, *tensor.shape[-1:]))
    return {name: tensor}


# ---- blocks [num_blocks, num_bytes] uint8 -> weights [num_blocks, num_weights] fp32


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the fp16 number at a byte of each block, [num_blocks, 1] in fp32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, num_bits: int, num_bytes: int) -> Tensor:
    """Split bytes into fields: for each run of num_bytes, the lowest field of every byte, then the next."""
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8).view(-1, 1)
    runs = packed.reshape(len(packed), -1, 1, num_bytes)
    return (runs >> shifts & (1 << num_bits) - 1).view(len(packed), -1)


def _four_bits(blocks: Tensor) -> Tensor:
    return _fields(blocks[:, -16:], 4, 16)


def _five_bits(blocks: Tensor) -> Tensor:
    return _four_bits(blocks) | _fields(blocks[:, -20:-16], 1, 1) << 4


def _k_groups(blocks: Tensor, integers: Tensor) -> Tensor:
    """Compute d * scale * integer - dmin * minimum for 8 groups of 32.

    The scales and minima have 6 bits: first four bytes with the low bits of each, then the rest.
    """
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = _half(blocks, 0) * torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=1)
    minima = _half(blocks, 2) * torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=1)
    return (scales.unsqueeze(-1) * integers.view(-1, 8, 32) - minima.unsqueeze(-1)).view(len(blocks), 256)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high = _fields(blocks[:, :128], 4, 64), _fields(blocks[:, 128:192], 2, 32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)  # for groups of 16
    return (scales.unsqueeze(-1) * ((low | high << 4).float() - 32).view(-1, 16, 16)).view(len(blocks), 256)


# type -> (bits, the integer that represents 0, blocks -> integers): d * (integer - zero)
_WITHOUT_MINIMUM: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (4, 8, _four_bits),
    "Q5_0": (5, 16, _five_bits),
    "Q8_0": (8, 128, lambda blocks: blocks[:, 2:] ^ 128),  # signed + 128
}
_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_1": lambda blocks: _half(blocks, 0) * _four_bits(blocks) + _half(blocks, 2),
    "Q5_1": lambda blocks: _half(blocks, 0) * _five_bits(blocks) + _half(blocks, 2),
    "Q4_K": lambda blocks: _k_groups(blocks, _fields(blocks[:, 16:], 4, 32)),
    "Q5_K": lambda blocks: _k_groups(blocks, _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4),
    "Q6_K": _q6_k,
    "MXFP4": lambda blocks: unpack_fp4(_four_bits(blocks), blocks[:, 0]),
}
