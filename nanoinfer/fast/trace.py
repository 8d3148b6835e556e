"""Record a module's forward pass as a graph of operations, by torch.fx.

In: a module. Out: a Trace, whose graph calls linear layers, norms, embeddings, the attention and torch's functions in the
order of the forward pass. A submodule whose forward pass depends on values (a router that sends tokens to experts) cannot be
recorded. It stays a single call, and the trace says why. An Untraced submodule also stays a single call: it reads the step
or reaches other processes, so symbols cannot enter it.

Source of the method: Reed et al. 2022, https://arxiv.org/abs/2112.08429
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import fx, nn

from nanoinfer.features.training.loaded_weights import HookInKernels
from nanoinfer.models.layers import RMSNorm, RotaryEmbedding, Untraced, ZeroCentredRMSNorm

# The forward passes of modules that stay a single call. A subclass counts as such unless it overrides forward.
_LEAVES = (nn.Linear, nn.LayerNorm, RMSNorm, ZeroCentredRMSNorm, nn.Embedding, RotaryEmbedding)
LEAVES = {module.forward for module in _LEAVES}

_NAMING = ("call_module", "get_attr")  # the operations whose target is a path in the module


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded forward pass."""

    graph: fx.Graph  # the torch.fx graph, whose placeholders are the arguments of the forward pass
    owned: dict[str, Any]  # name -> module or attribute to which the graph refers
    called: dict[str, nn.Module]  # path in the traced module -> submodule that is a single call of the graph
    untraced: dict[str, Exception]  # path of such a submodule -> what it raised when it was given symbols

    def module(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls. None: it calls none."""
        return self.owned[str(node.target)] if node.op == "call_module" else None

    def value(self, given: Any) -> Any:
        """Return an argument of a node: the attribute that it names, or the argument itself."""
        is_attribute = isinstance(given, fx.Node) and given.op == "get_attr"
        return self.owned[str(given.target)] if is_attribute else given

    def name(self, prefix: str, value: object) -> str:
        """Add a module to `owned`, and return the name by which the graph may call it."""
        name = f"{prefix}_{sum(name.startswith(prefix) for name in self.owned)}"
        self.owned[name] = value
        return name


def trace(module: nn.Module) -> Trace:
    """Record a module's forward pass.

    Raises:
        Exception: anything that the forward pass raises when it computes with symbols instead of tensors.
    """
    with _lock:
        tracer = _Tracer()
        graph = tracer.trace(module)
    owned = {str(node.target): attrgetter(str(node.target))(module) for node in graph.nodes if node.op in _NAMING}
    called = {name: value for name, value in owned.items() if isinstance(value, nn.Module)}
    return Trace(graph, owned, called, tracer.untraced)


def copied(module: nn.Module, copies: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Copy the tree of modules, so that the copy may be compiled. Parameters and leaves are shared."""
    copies = {} if copies is None else copies
    if type(module).forward in LEAVES:
        return module
    if module not in copies:
        copy = copies[module] = object.__new__(type(module))
        copy.__dict__ |= module.__dict__
        copy._modules = {name: child and copied(child, copies) for name, child in module._modules.items()}
    return copies[module]


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has forward hooks that a compiled module would not call."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(isinstance(hook, HookInKernels) for hook in hooks)


# torch.fx replaces nn.Module.__call__ and __getattr__ of the process while it traces. Calls of other threads pass through.
_lock = threading.Lock()


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self._thread = threading.get_ident()
        self.untraced: dict[str, Exception] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward in LEAVES or has_hooks(m) or isinstance(m, Untraced)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        last, stack = next(iter(reversed(self.graph.nodes))), self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:  # raised by the module's own code, which was given symbols
            for node in reversed(self.graph.nodes):
                if node is last:
                    break
                self.graph.erase_node(node)
            self.module_stack = stack
            path = self.path_of_module(m)
            self.untraced = {name: why for name, why in self.untraced.items() if not name.startswith(f"{path}.")}
            self.untraced[path] = error
            return self.create_proxy("call_module", path, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)
