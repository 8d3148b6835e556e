"""The only door of this folder: the parts of an engine become parts that give the same tokens in less time.

In: the plain parts, with the textbook model. Out: Parts. The factory passes through here unless enforce_eager=True, and a run
with enforce_eager=True imports nothing of this folder.

A model is traced (trace.py), fused (fuse.py), and compiled for its device (cpu/compile.py, cuda/compile.py). This needs no
knowledge of model families: a model file of a user's own is compiled by the same rules. What cannot be traced or has no kernel
runs as it is, and the CompiledModel says why. The forward pass of its `model` is the compiled one, and
`print(model.forward.__self__.code)` shows it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import fx, nn

from nanoinfer.config import EngineConfig
from nanoinfer.errors import first_line
from nanoinfer.execution.parts import Parts
from nanoinfer.fast.trace import LEAVES, Trace, trace

if TYPE_CHECKING:
    from nanoinfer.lora.layers import AdaptedLayers


@dataclass(slots=True)
class CompiledModel:
    """A model whose forward pass is compiled, beside the plain one, and what was compiled of it.

    Attributes:
        model: has the plain model's attributes, methods and parameters.
        compiled: the number of kernel calls of each compiled module, by its path. "" is the model.
        left: why a module runs as it is, by its path.
        num_plain_linears: linear layers that torch computes.
    """

    model: nn.Module
    compiled: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    num_plain_linears: int = 0


def accelerate(parts: Parts, config: EngineConfig, adapters: "AdaptedLayers") -> Parts:
    """Return faster parts for the device of the model, whose weights go where the kernels read them.

    Args:
        adapters: the linear layers that requests may adapt.

    Raises:
        UnsupportedError: a quantisation that the model's layers do not support.
    """
    if next(parts.model.parameters()).device.type == "cpu":
        from nanoinfer.fast.cpu.accelerate import accelerate_on_cpu

        return accelerate_on_cpu(parts, config, adapters)
    if config.enable_lora:
        return parts  # no kernel of a GPU knows adapters
    from nanoinfer.fast.cuda.accelerate import accelerate_on_cuda

    return accelerate_on_cuda(parts, config)


# Changes a trace in place, and returns the number of kernel calls. 0: the module is left as it is.
Lower = Callable[[Trace], int]


def compile_modules(module: nn.Module, lower: Lower, report: CompiledModel, path: str = "") -> None:
    """Compile a module, or else what is in it.

    Args:
        module: its `forward` is replaced.
        lower: compiles a trace for a device.
        report: gets the results.
        path: of the module, for the report.
    """
    if type(module).forward in LEAVES:
        return
    try:
        traced = trace(module)
    except Exception as error:  # of the module's own code, which was given symbols
        if type(module).forward is not nn.Module.forward:  # a list of modules has none
            report.left[path] = _why(error)
        inside = [(path, module)]
    else:
        if num_kernels := lower(traced):
            report.compiled[path] = num_kernels
            module.forward = fx.GraphModule(traced.owned, traced.graph).forward
        report.left |= {_joined(path, name): _why(error) for name, error in traced.untraced.items()}
        inside = [(_joined(path, name), called) for name, called in traced.called.items()]
    for outer, owner in inside:
        for name, child in owner.named_children():
            compile_modules(child, lower, report, _joined(outer, name))


def _why(error: Exception) -> str:
    return f"it cannot be traced: {first_line(error).partition('. ')[0]}"


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
