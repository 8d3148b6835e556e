"""Linear layers whose weights are kept in 8 or 4 bits: how weights are rounded, and the plain version of such a layer.

Each group of inputs of an output channel has a scale and a zero: weight = scale * (integer - zero).
Sources: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339 (8 bits). Yao et al. 2022, https://arxiv.org/abs/2206.01861 (a
scale per group).
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from nanoinfer.config import BITS, EngineConfig
from nanoinfer.errors import UnsupportedError
from nanoinfer.features.training.stored import StoredParameter, pieces_of
from nanoinfer.loading.devices import check_bytes

logger = logging.getLogger(__name__)

WITHOUT_CALIBRATION = "weights are rounded to 4 bits without calibration, which costs quality: %s"
# bits -> numbers of inputs that may share a scale. The first that divides a layer's inputs is used.
GROUP_SIZES = {8: (128, 64, 32), 4: (64, 32)}
Moments = Mapping[str, Tensor]  # the name of a weight in the checkpoint -> the sums of squares of its inputs [in]
Round = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # groups -> integers [out, in], scales and zeros [out, groups]

MULTIPLE = 32  # the number of inputs must be a multiple of the smallest group


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix scales * (integers - zeros), with a scale and a zero for each output and group of inputs."""

    bits: int  # 8 or 4. Integers are in 0 .. 2**bits - 1
    integers: UInt8[Tensor, "out in"]
    scales: Float[Tensor, "out groups"]
    zeros: UInt8[Tensor, "out groups"]  # the integers that represent 0. In 4 bits a GPTQ checkpoint may have 16

    @property
    def group_size(self) -> int:
        """The number of inputs that share a scale."""
        return self.integers.shape[1] // self.scales.shape[1]

    def widened(self) -> Float[Tensor, "out in"]:
        """The weight in float32."""
        shifted: Tensor = self.integers.unflatten(1, (-1, self.group_size)).float() - self.zeros.unsqueeze(2)
        return (shifted * self.scales.unsqueeze(2)).flatten(1)


@runtime_checkable
class HasIntegers(Protocol):
    """The Weights of a format that stores integers."""

    def integers(self, name: str, rows: slice = slice(None)) -> QuantizedWeight | None:
        """Return rows of a matrix as the integers in the file. None: it has none, or a QuantizedWeight cannot hold them."""


class QuantizedLinear(nn.Module):
    """A linear layer whose weight is widened at each call, which saves memory but no time."""

    def __init__(self, linear: nn.Linear, bits: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        pieces = [(piece.integers, piece.scales, piece.zeros) for piece in quantized([linear.weight], bits)]
        self.weight = QuantizedWeight(bits, *(torch.cat(arrays).to(device) for arrays in zip(*pieces, strict=True)))
        self.bias = linear.bias
        self._forward_hooks = linear._forward_hooks  # so that an adapter's hooks (features/adapters) stay

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        return F.linear(x, self.weight.widened().to(x.dtype), self.bias)


def quantize_model(model: nn.Module, quantization: str, device: torch.device | str = "cpu") -> None:
    """Replace every nn.Linear by a QuantizedLinear on a device, in place. Embeddings keep their tables."""
    check_sizes(model)
    linears = [(path, module) for path, module in model.named_modules() if type(module) is nn.Linear]
    if quantization == "int4" and any(stored_integers(linear.weight, 4) is None for _, linear in linears):
        logger.warning(WITHOUT_CALIBRATION, "only torch computes, as with enforce_eager and without a compiler")
    for path, linear in linears:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, QuantizedLinear(linear, BITS[quantization], device))


def check_sizes(model: nn.Module) -> None:
    """Refuse a model with a layer whose number of inputs is not a multiple of MULTIPLE."""
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and layer.in_features % MULTIPLE:
            raise UnsupportedError(
                f"weights in 8 or 4 bits need layers with inputs in multiples of {MULTIPLE}, and {name} has "
                f"{layer.in_features}; leave out quantization, or speculative_config with method 'quantized'"
            )


def stored_integers(weight: Tensor, bits: int) -> QuantizedWeight | None:
    """Return the first row of a matrix whose integers are in the checkpoint and fit into `bits`. None: it is rounded."""
    first = _integers(weight, slice(1))
    return first if first is not None and first.bits <= bits else None


def _integers(weight: Tensor, rows: slice) -> QuantizedWeight | None:
    if not isinstance(weight, StoredParameter) or weight.source.is_transposed:
        return None
    files = weight.source.files
    return files.integers(weight.source.name, rows) if isinstance(files, HasIntegers) else None


def num_linear_bytes(model: nn.Module, bits: int) -> int:
    """Return the bytes that a model's linear layers take in kernels with 8 or 4 bits."""
    total = 0
    for weight in _linear_weights(model):  # integers, and a scale in fp32 and a zero for each group
        first = stored_integers(weight, bits)
        group_size = _group_size(weight.shape[1], bits) if first is None else first.group_size
        total += weight.numel() * bits // 8 + 5 * (weight.numel() // group_size)
    return total


def num_weight_bytes(model: nn.Module, quantization: str) -> int:
    """Return the bytes that a model's weights take in kernels with 8 or 4 bits.

    An embedding keeps its table where the head that shares it is rounded.
    """
    bits, linears = BITS[quantization], _linear_weights(model)
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    rounded = {weight for weight in tables & linears if stored_integers(weight, bits) is None}
    kept = sum(weight.numel() for weight in model.parameters() if weight not in linears - rounded)
    return num_linear_bytes(model, bits) + kept * torch.bfloat16.itemsize


def compare_memory(
    model: nn.Module, dtype: torch.dtype, device: torch.device, config: EngineConfig, num_stored_bits: float, num_ranks: int
) -> None:
    """Refuse weights that the device cannot hold, and log what `quantization` would save for a quantised file.

    num_stored_bits: those of a weight in the files, on average. num_ranks: the processes that load at the same time.
    """
    needed = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    runs_in = config.quantization or str(dtype).removeprefix("torch.")
    if config.quantization:
        needed = num_weight_bytes(model, config.quantization)
    elif num_stored_bits < 12:
        int8, int4 = (num_weight_bytes(model, name) for name in ("int8", "int4"))
        if needed - int4 >= 10**8:
            text = "%.1f bits per weight run in %s and take %.1f GB; quantization='int8' takes %.1f GB, 'int4' %.1f GB"
            logger.warning(text, num_stored_bits, runs_in, needed / 1e9, int8 / 1e9, int4 / 1e9)
    hint = "use " + ("a smaller model" if runs_in == "int4" else "quantization='int4' or a smaller model")
    text = f"the weights take {needed / 1e9:.1f} GB in {runs_in}"
    if config.bits_of_copy:
        needed += (copy := num_linear_bytes(model, config.bits_of_copy))
        text += f", and their copy in {config.bits_of_copy} bits, which drafts, {copy / 1e9:.1f} GB"
        hint = f"leave out speculative_config, or {hint}"
    check_bytes(needed, device, text, hint, num_ranks)


def _linear_weights(model: nn.Module) -> set[Tensor]:
    return {module.weight for module in model.modules() if type(module) is nn.Linear}


def quantized(
    weights: Sequence[Float[Tensor, "_ in"]], bits: int, in_four_bits: Round | None = None
) -> Iterator[QuantizedWeight]:
    """Join matrices that have the same inputs into a single matrix, in integers. Yield its rows piece by piece.

    A matrix keeps its checkpoint's integers, without a loss, if they fit into `bits`. Others are rounded, as `quantize` says.
    """
    kept = [stored_integers(weight, bits) for weight in weights]
    # All share a group size, which is smaller than that of a file with large groups: activations would lose more.
    group_size = math.gcd(_group_size(weights[0].shape[1], bits), *(first.group_size for first in kept if first is not None))
    rounded = partial(quantize, bits=bits, group_size=group_size, in_four_bits=in_four_bits)
    for weight, first in zip(weights, kept, strict=True):
        if isinstance(weight, StoredParameter) and first is not None:
            source = weight.source
            pieces = (_integers(weight, rows) or rounded(source.read(rows)) for rows in source.pieces())
        else:
            pieces = (rounded(piece) for piece in pieces_of(weight))
        for piece in pieces:
            repeats = piece.group_size // group_size
            scales, zeros = (array.repeat_interleave(repeats, dim=1) for array in (piece.scales, piece.zeros))
            yield QuantizedWeight(bits, piece.integers, scales, zeros)


def quantize(
    weight: Float[Tensor, "out in"], bits: int, group_size: int | None = None, in_four_bits: Round | None = None
) -> QuantizedWeight:
    """Round a weight to 8 or 4 bits. In 8 bits the zero is 128. In 4 bits the 16 values span the range of a group.

    Args:
        group_size: the number of inputs that share a scale. None: the largest of GROUP_SIZES that divides the number of inputs.
        in_four_bits: rounds to 4 bits in another way, such as by moments. None: as above.
    """
    group_size = group_size or _group_size(weight.shape[1], bits)
    rounded = _in_eight_bits if bits == 8 else in_four_bits or _in_four_bits
    rows = max(2**20 // weight.shape[1], 1)  # so many at a time that intermediate results stay in the processor's cache
    matrices = [rounded(some.unflatten(1, (-1, group_size)).float()) for some in weight.detach().split(rows)]
    integers, scales, zeros = (torch.cat(tensors) for tensors in zip(*matrices, strict=True))
    return QuantizedWeight(bits, integers, scales, zeros)


def _group_size(num_inputs: int, bits: int) -> int:
    return next((group_size for group_size in GROUP_SIZES[bits] if num_inputs % group_size == 0), MULTIPLE)


def _in_eight_bits(groups: Float[Tensor, "out groups group"]) -> tuple[Tensor, Tensor, Tensor]:
    scales = (groups.abs().amax(2) / 127).clamp(min=torch.finfo(torch.float32).tiny)  # a group of zeros may have any scale
    integers = (groups / scales.unsqueeze(2)).round() + 128
    return integers.to(torch.uint8).flatten(1), scales, torch.full_like(scales, 128, dtype=torch.uint8)


def _in_four_bits(groups: Float[Tensor, "out groups group"]) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)  # 0 is representable
    scales = ((high - low) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    zeros = (-low / scales).round().unsqueeze(2)
    integers = ((groups / scales.unsqueeze(2)).round() + zeros).clamp(0, 15)
    shifted = integers - zeros
    fitted = (groups * shifted).sum(2) / shifted.square().sum(2)  # the scale with the least squared error for these integers
    scales = torch.where(fitted > 0, fitted, scales)
    return integers.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8).squeeze(2)
