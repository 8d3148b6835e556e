"""The weights of a loaded model wherever they are held: as parameters, and in the layouts that kernels read.

In: the parameters that loading filled (weights.py), and the kernel weights that fast/ made of them. Out: `write`, which renews
a weight everywhere, and `tensors`, the memory of all weights. It knows no kernels: a KernelWeight is anything that can be
written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from nanoinfer.config import EngineConfig
from nanoinfer.execution.model_runner import ModelWeights
from nanoinfer.loading.weights import places_of
from nanoinfer.models.registry import ModelConfig, WeightRules

if TYPE_CHECKING:
    from nanoinfer.features.distributed.sharding import Shards
    from nanoinfer.features.training.freed_memory import FreedMemory


class KernelWeight(Protocol):
    """A linear layer's weights as a kernel reads them, perhaps together with those of other layers."""

    def write(self, name: str, values: Tensor, start: int) -> None:
        """Replace the weight or the bias of the outputs from `start` on, in place."""

    def arrays(self) -> list[Tensor]:
        """Return the tensors that hold the weights."""


class HookInKernels:
    """A forward hook of a linear layer that the layer's kernel computes too, as it does an adapter's (features/adapters)."""


@dataclass(frozen=True, slots=True)
class Origin:
    """How a model was loaded, for later updates of its weights (update.py). sizes: the whole model's config."""

    config: EngineConfig
    model_class: type[nn.Module]
    rules: WeightRules
    sizes: ModelConfig
    shards: "Shards | None"


class LoadedWeights(ModelWeights):
    """The weights of one model."""

    shards: "Shards | None"
    calibration_ids: Sequence[int] = ()  # the tokens of the user's text by which weights are rounded. Empty: there is none

    def __init__(self, model: nn.Module | None = None, origin: Origin | None = None, num_parameters: int = 0) -> None:
        """model: before modules are replaced. origin: None if not from a checkpoint. num_parameters: the checkpoint's."""
        self.origin, self.num_parameters = origin, num_parameters
        self.shards = None if origin is None else origin.shards
        owners = {} if model is None else places_of(model)
        # The modules of each parameter, and its name there. Rounded weights have none, because they cannot be replaced.
        self.places = {} if model is None else {name: owners[parameter] for name, parameter in model.named_parameters()}
        self._kernel_weights: dict[nn.Module, list[tuple[KernelWeight, int]]] = {}
        self._renewals: list[Callable[[], object]] = []
        self.freed: dict[str, FreedMemory] = {}  # "weights" or "kv_cache" -> the memory of a GPU that sleep() has freed

    def add_kernel_weight(self, linear: nn.Module, weight: KernelWeight, start: int) -> None:
        """Renew a kernel's weight whenever the layer's weights change. start: the index of the layer's first output in it."""
        self._kernel_weights.setdefault(linear, []).append((weight, start))

    def add_renewal(self, renew: Callable[[], object]) -> None:
        """Call a function after each update, which computes again what a kernel reads in place of parameters."""
        self._renewals.append(renew)

    @torch.inference_mode()
    def write(self, name: str, values: Tensor) -> None:
        """Replace a parameter, with its layer's shape, for the kernels as well. Call `finish` after the last parameter."""
        for module, leaf in self.places.get(name, ()):
            for weight, start in self._kernel_weights.get(module, ()):
                weight.write(leaf, values, start)
            if (parameter := getattr(module, leaf)) is not None:  # None: only kernels have it
                parameter.copy_(values)

    @torch.inference_mode()
    def finish(self) -> None:
        for renew in self._renewals:
            renew()

    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold all weights."""
        parameters = [getattr(module, leaf) for places in self.places.values() for module, leaf in places]
        arrays = [array for weights in self._kernel_weights.values() for weight, _ in weights for array in weight.arrays()]
        return [*(parameter for parameter in parameters if parameter is not None), *arrays]
