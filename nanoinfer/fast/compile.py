"""Compile a model's modules, each as far as it can be traced.

In: a copy of the model's modules (trace.py), and how a device lowers a trace. Out: a CompiledModel. cpu/accelerate.py and
cuda/accelerate.py lower for their devices.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx, nn

from nanoinfer.errors import first_line
from nanoinfer.fast.trace import LEAVES, Trace, trace
from nanoinfer.models.layers import Untraced


@dataclass(slots=True)
class CompiledModel:
    """A model with a compiled forward pass next to the plain one, and the list of what was compiled."""

    model: nn.Module  # a model with the plain model's attributes, methods and parameters
    compiled: dict[str, int] = field(default_factory=dict)  # module path -> its number of kernel calls. "" is the model
    left: dict[str, str] = field(default_factory=dict)  # module path -> why the module runs as it is
    num_plain_linears: int = 0  # the number of linear layers that torch computes


# Changes a trace in place, and returns the number of kernel calls. 0: the module is left as it is.
Lower = Callable[[Trace], int]


def compile_modules(module: nn.Module, lower: Lower, report: CompiledModel, path: str = "") -> None:
    """Compile a module by replacing its `forward`, or else compile its submodules. path: the module's, for the report."""
    if type(module).forward in LEAVES or (isinstance(module, Untraced) and not module._modules):
        return
    try:
        traced = trace(module)
    except Exception as error:  # raised by the module's own code, which was given symbols
        if type(module).forward is not nn.Module.forward:  # a list of modules has no forward
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
