"""Linear layers on a CPU in float32 and bfloat16, computed by dense_linear.cpp.

In: an nn.Linear. Out: a CPULinear. It is one of several forms of a layer: cpu_linear.py chooses the fastest on the machine.

A call of oneDNN costs some 12 us before it reads the weight. dense_linear.cpp takes 0.45 to 0.9 of oneDNN's time at one row,
0.6 to 1.0 at 16, 0.9 to 1.0 at 64 and 0.97 to 1.07 at 1,020 (2 cores, AVX512-BF16). Where a processor has matrix units (AMX),
oneDNN uses them, and this kernel does not.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor, nn

from nanoinfer.devices import native
from nanoinfer.errors import UnsupportedError
from nanoinfer.models.cpu_linear import CLASSES, Activation, CompiledLinear, CPULinear


class DenseLinear(CompiledLinear):
    """The weight laid out for dense_linear.cpp, which also applies the activation and adds the residual.

    Raises:
        UnsupportedError: the kernel does not support the dtype or the number of inputs, or cannot be compiled.
    """

    def __init__(self, linear: nn.Linear, activation: Activation | None = None, *, adds_residual: bool = False) -> None:
        super().__init__(linear, activation, adds_residual=adds_residual)
        dtype = linear.weight.dtype
        library = native.load(Path(__file__).with_name("dense_linear.cpp"), *native.definitions_of(dtype))
        tile, per_term = (ctypes.c_int.in_dll(library, name).value for name in ("tile_size", "num_per_term"))
        if linear.in_features % per_term:
            raise UnsupportedError(f"dense_linear.cpp needs inputs in multiples of {per_term}, got {linear.in_features}")
        self._weight = _tiled(linear.weight.detach(), tile, per_term)
        self._bias = None if self._bias is None else self._bias.to(dtype).contiguous()
        self.set_kernel(library.linear, (self._weight, self._bias), (linear.out_features, linear.in_features))

    def product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if x.dtype != self._weight.dtype:
            raise UnsupportedError(f"the layer's weight is in {self._weight.dtype}, got rows in {x.dtype}")
        return self.call_kernel(x, residual)


def _tiled(weight: Shaped[Tensor, "out in"], tile: int, per_term: int) -> Shaped[Tensor, "tiles terms tile per_term"]:
    """Lay out the weight tile by tile. A tile has each term of all its outputs in turn. The last one is padded with zeros."""
    num_out, num_terms = len(weight), weight.shape[1] // per_term
    num_whole, rest = divmod(num_out, tile)
    tiled = weight.new_empty(num_whole + (rest > 0), num_terms, tile, per_term)
    tiled[:num_whole] = weight[: num_whole * tile].view(num_whole, tile, num_terms, per_term).transpose(1, 2)
    if rest:
        tiled[-1] = F.pad(weight[-rest:], (0, 0, 0, tile - rest)).view(tile, num_terms, per_term).transpose(0, 1)
    return tiled


def dense_classes() -> dict[str, Callable[..., CPULinear]]:
    """The classes that a layer in 16 or 32 bits may become, by their names in verdicts."""
    return {"tiled": DenseLinear, **CLASSES}
