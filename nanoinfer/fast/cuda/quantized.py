"""Linear layers on a GPU in 8 and 4 bits.

In: linear layers, whose weights are still in the checkpoint or already on the GPU. Out: IntegerLinear, which compile.py puts
in their place. features/quantization has the definition: its integers, scales and zeros are kept as they are. Rows are not
rounded, as they are on a CPU, because a step with few rows takes the time of reading weights.

    1 to 4 rows    integer_kernels.py multiplies the integers
    5 to 16        linear_kernel.py widens a tile and multiplies it on tensor cores
    more           parts of the weight are widened into a scratch, which all layers share, and torch multiplies them

Weights are rounded on the CPU while they are read, so the GPU never has them in 16 bits. In 4 bits moments count, as on a CPU
(fast/cpu/calibration.py).
"""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.triton import uses_tensor_cores
from nanoinfer.fast.cuda import decode_kernels
from nanoinfer.fast.cuda.fused_kernels import Norm, gate_and_mul
from nanoinfer.fast.cuda.integer_kernels import integer_linear
from nanoinfer.fast.cuda.integers import Integers, packed_bytes, widen
from nanoinfer.fast.cuda.linear_kernel import MAX_ROWS as MAX_DOT_ROWS
from nanoinfer.fast.cuda.linear_kernel import Arrivals, few_rows_linear
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.fast.trace import Trace
from nanoinfer.features.quantization.rounding import Moments, QuantizedWeight, Round, quantize, quantized
from nanoinfer.features.training.loaded_weights import LoadedWeights
from nanoinfer.features.training.stored import StoredParameter

SCRATCH_BYTES = 2**25  # of widened weights. It stays in the L2 cache of large GPUs


class Scratch:
    """Memory for widened weights. It is written and read by one step at a time.

    Args:
        model: the model whose layers share it.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        sizes = [(module.weight.numel(), module.in_features) for module in model.modules() if type(module) is nn.Linear]
        most, widest = (max((size[i] for size in sizes), default=0) for i in range(2))
        self.dtype = dtype
        self._numbers = torch.empty(max(min(most, SCRATCH_BYTES // dtype.itemsize), widest), dtype=dtype, device=device)

    def parts(self, weight: Integers) -> Iterator[tuple[slice, Float[Tensor, "some in"]]]:
        """Yield the weight part by part: which outputs, and their widened rows, which are valid until the next part."""
        num_out, num_in = len(weight.packed), weight.num_in
        size = min(len(self._numbers) // num_in, num_out)
        for start in range(0, num_out, size):
            some = slice(start, min(start + size, num_out))
            out = self._numbers[: (some.stop - start) * num_in].view(-1, num_in)
            yield some, widen(weight.rows(some), out)


class IntegerLinear(nn.Module):
    """Linear layers with the same input, in integers, whose outputs are concatenated.

    Args:
        moments: how much each input counts when weights are rounded to 4 bits. Empty: they all count the same.
    """

    def __init__(self, fused: FusedLinear, bits: int, scratch: Scratch, device: torch.device, moments: Moments) -> None:
        super().__init__()
        self.in_features, self.out_features, self._bits = fused.in_features, fused.out_features, bits
        self._scratch, self._arrivals, bias = scratch, Arrivals(), fused.merged_bias()
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        weights = [linear.weight for linear in fused.linears]
        self._in_four_bits = _rounding(weights[0], moments)
        start = 0
        for piece in quantized(weights, bits, self._in_four_bits):
            if not start:
                made = partial(torch.empty, device=device)
                packed = made(self.out_features, fused.in_features * bits // 8, dtype=torch.uint8)
                sizes = self.out_features, piece.scales.shape[1]
                self.weight = Integers(packed, made(sizes), made(sizes, dtype=torch.uint8), bits)
            self._put(piece, start)
            start += len(piece.scales)

    def _put(self, piece: QuantizedWeight, start: int) -> None:
        """Write the weights of the outputs from `start` on, in place, since graphs hold the addresses."""
        for array, values in zip(self.arrays(), (packed_bytes(piece), piece.scales, piece.zeros), strict=True):
            array[start : start + len(values)] = values.to(array.device)

    def write(self, name: str, values: Float[Tensor, "*shape"], start: int) -> None:
        """Replace the weight or the bias of the outputs from `start` on, as KernelWeight (features/training) says."""
        if name == "bias":
            cast(Tensor, self.bias)[start : start + len(values)] = values
        else:
            self._put(quantize(values, self._bits, self.weight.group_size, self._in_four_bits), start)

    def arrays(self) -> list[Tensor]:
        """Return the tensors that hold the weights: integers, scales and zeros."""
        return [*self.weight[:3]]

    def forward(
        self,
        x: Float[Tensor, "*rows in"],
        residual: Float[Tensor, "*rows out"] | None = None,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        in_place: bool = False,
    ) -> Float[Tensor, "*rows out"]:
        """Compute the layers.

        Args:
            residual: added to the outputs. Contiguous.
            norm: computed before the product, of rows that `takes_norm` accepts. None: no norm.
            activation: of a gate. The layers are gate and up, and activation(gate) * up is returned. None: there is no gate.
            in_place: the result is written over the residual.
        """
        bias, is_gated = cast("Tensor | None", self.bias), activation is not None
        if x.ndim == 2 and x.stride(1) == 1 and x.dtype is self._scratch.dtype:
            given: dict[str, Any] = {"residual": residual, "in_place": in_place}
            given |= {} if activation is None else {"gated": True, "activation": activation}
            if len(x) <= decode_kernels.MAX_ROWS:
                return integer_linear(x, self.weight, bias, norm=norm, **given)
            if len(x) <= MAX_DOT_ROWS and x.element_size() == 2 and uses_tensor_cores():
                return few_rows_linear(x, self.weight, bias, arrivals=None if is_gated else self._arrivals, **given)
        rows = x.flatten(0, -2)
        out = rows.new_empty(len(rows), self.out_features) if residual is None or not in_place else residual
        for some, weight in self._scratch.parts(self.weight):
            added = residual[:, some] if residual is not None else None if bias is None else bias[some]
            if added is None:
                torch.mm(rows, weight.t(), out=out[:, some])
            else:
                torch.addmm(added, rows, weight.t(), out=out[:, some])
        if residual is not None and bias is not None:
            out += bias
        return gate_and_mul(out, activation) if activation else out.unflatten(0, x.shape[:-1])

    def takes_norm(self, x: Tensor, norm: Norm) -> bool:
        """Whether `forward` computes a norm of x before the product."""
        is_fitting = x.ndim == 2 and x.stride(1) == 1 and norm.weight.is_contiguous() and len(x) <= decode_kernels.MAX_ROWS
        return is_fitting and x.dtype is norm.weight.dtype is self._scratch.dtype


class IntegerLayers:
    """Makes the IntegerLinears of a model, as Merges (compile.py) makes its layers in 16 bits.

    Args:
        weights: receives the layers, so that an update of a plain weight renews its copy in integers.
        moments: as in IntegerLinear.
    """

    def __init__(self, model: nn.Module, bits: int, weights: LoadedWeights, moments: Moments) -> None:
        plain = next(weight for weight in model.parameters() if not isinstance(weight, StoredParameter))
        scratch, self._device = Scratch(model, plain.dtype, plain.device), plain.device
        self._make = partial(IntegerLinear, bits=bits, scratch=scratch, device=plain.device, moments=moments)
        self._weights, self._made = weights, dict[tuple[nn.Linear, ...], IntegerLinear]()

    def merged(self, fused: FusedLinear, trace: Trace | None = None) -> IntegerLinear:
        """Return the layer that computes the layers of `fused`."""
        if fused.linears not in self._made:
            layer = self._made[fused.linears] = self._make(fused)
            for linear, start in fused.starts():
                self._weights.add_kernel_weight(linear, layer, start)
        return self._made[fused.linears]

    added = merged

    def finish(self, trace: Trace) -> int:
        """Put integers into the layers of a trace that no kernel of compile.py computes. Returns their number."""
        num_replaced = 0
        for name, value in trace.owned.items():
            if isinstance(value, StoredParameter):  # the model reads a weight itself
                trace.owned[name] = value.source.load(self._device)
        for node in trace.graph.nodes:
            module = trace.module(node)
            layer: nn.Module | None = None
            if isinstance(module, FusedLinear):
                alone = [cast(nn.Linear, self._alone(linear)) for linear in module.linears]
                layer = FusedLinear(*alone, activation=module.activation)
            elif type(module) is nn.Linear:
                layer = self._alone(module)
            if layer is not None:
                node.target = trace.name("kernel", layer)
                num_replaced += 1
        return num_replaced

    def replace_others(self, model: nn.Module) -> None:
        """Replace the linear layers that are in no trace, such as the LM head."""
        in_traces = set(chain.from_iterable(self._made))
        for path, linear in list(model.named_modules()):
            if type(linear) is nn.Linear and linear not in in_traces:
                parent, _, name = path.rpartition(".")
                model.get_submodule(parent).register_module(name, self._alone(linear))

    def _alone(self, linear: nn.Linear) -> IntegerLinear:
        layer = self.merged(FusedLinear(linear))
        layer._forward_hooks = linear._forward_hooks
        return layer


def _rounding(weight: Tensor, moments: Moments) -> Round | None:
    """Return what rounds a weight of the checkpoint to 4 bits by its inputs' moments. None: they are not known."""
    known = moments.get(weight.source.name) if isinstance(weight, StoredParameter) else None
    if known is None:
        return None
    from nanoinfer.fast.cpu.quantized import rounded  # moments are known, so there is a C++ compiler

    return partial(rounded, moments=known)
