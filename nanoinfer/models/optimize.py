"""Replace the blocks of a loaded model by faster ones for its device.

In: a model with its weights. Out: the same model, some of its modules replaced. A model file has the plain definition and does
not depend on this module. cpu_blocks.CPU_BLOCKS and cuda_blocks.CUDA_BLOCKS are the tables: class of a block -> class of its
fast form.

To add a form for a family of your own, write a module whose `forward` has the arguments of your block and gives its result. Its
constructor takes the block, and on a CPU also a LinearOptimizer, which packs the linear layers. Its attribute `parts` names the
classes of the modules inside the block that it computes. Add it to the table (`CPU_BLOCKS[MyBlock] = MyCPUBlock`) before the
model is loaded. tests/models/test_optimize.py shows how to compare it with your block. If it also has a method `describe`, its
kernels run in one call with those of the other layers (cpu_program.py). This is for model files of this package, whose
`forward` runs the layers one after the other. A model without an entry runs too: on a CPU each nn.Linear is packed by itself,
on a GPU each RMSNorm becomes one kernel.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from nanoinfer.errors import UnsupportedError
from nanoinfer.models.cpu_blocks import CPU_BLOCKS
from nanoinfer.models.cpu_dense import dense_classes
from nanoinfer.models.cpu_linear import LinearOptimizer, LinearReport
from nanoinfer.models.cpu_program import compile_layers
from nanoinfer.models.cpu_quantized import MULTIPLE, quantized_classes
from nanoinfer.models.weights import progress_bar

logger = logging.getLogger(__name__)


def optimize_for_cpu(model: nn.Module, quantization: str | None = None) -> LinearReport:
    """Replace a model's blocks by those of CPU_BLOCKS, and every other nn.Linear by a packed one.

    One linear layer is replaced at a time and its plain weight freed, unless something else holds it: a tied head leaves the
    embedding its own copy. A subclass of nn.Linear is left alone, because it may do more than multiply.

    Args:
        model: a model on a CPU. Its modules are replaced in place.
        quantization: None, or "int8" or "int4" for weights in 8 or 4 bits, also the head's. An embedding keeps its table.

    Returns:
        How its linear layers are computed, and whether their rows are independent of each other.

    Raises:
        UnsupportedError: a layer that cannot be computed in this dtype or in 8 bits.
    """
    if quantization:
        _check_sizes(model, quantization)
    linears = LinearOptimizer(quantized_classes(quantization) if quantization else dense_classes())

    def optimized(module: nn.Module) -> nn.Module | None:
        if type(module) is nn.Linear:
            bar.update()
            return linears.optimize(module)
        block_class = _find_class(CPU_BLOCKS, module)
        bar.update(_num_linears(module) if block_class else 0)
        return block_class(module, linears) if block_class else None

    with torch.inference_mode(), progress_bar("packing weights", _num_linears(model)) as bar:
        _replace_modules(model, optimized)
        compile_layers(model)
    return linears.report()


def _num_linears(module: nn.Module) -> int:
    return sum(type(part) is nn.Linear for part in module.modules())


def optimize_for_cuda(model: nn.Module) -> None:
    """Replace a model's modules by those of CUDA_BLOCKS. Without Triton the model stays unchanged, and one log line says so."""
    try:
        table = import_module("nanoinfer.models.cuda_blocks").CUDA_BLOCKS
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        logger.info("triton is not installed: norms, rotations and gates run as torch's own operators, one after the other")
        return

    def optimized(module: nn.Module) -> nn.Module | None:
        block_class = _find_class(table, module)
        return block_class(module) if block_class else None

    _replace_modules(model, optimized)


def _find_class(table: dict[type[nn.Module], Any], module: nn.Module) -> Any:
    """Return the table's class for a module, or None.

    A subclass of a block may compute something else, and so may a block with a part of another class. Neither is replaced.
    """
    block_class = table.get(type(module))
    if block_class is None or not all(type(part) in block_class.parts for part in module.modules() if part is not module):
        return None
    return block_class


def _replace_modules(parent: nn.Module, optimized: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace the modules below `parent` for which `optimized` returns a module. What it returns is not searched further."""
    rest = []
    for name in [name for name, _ in parent.named_children()]:  # names: a list of modules would keep all weights alive
        module = optimized(getattr(parent, name))
        if module is None:
            rest.append(name)
        else:
            setattr(parent, name, module)
    for name in rest:
        _replace_modules(getattr(parent, name), optimized)


def _check_sizes(model: nn.Module, quantization: str) -> None:
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and layer.in_features % MULTIPLE:
            raise UnsupportedError(
                f"quantization={quantization!r} needs layers with inputs in multiples of {MULTIPLE}, and {name} has "
                f"{layer.in_features}; leave quantization out"
            )
