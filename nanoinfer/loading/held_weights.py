"""A loaded model's weights where they are held: as parameters, and in the forms that kernels read.

In: the places that loading filled (weights.py), and the forms that fast/ laid out from them. Out: `write`, which renews a
weight in every form, and `tensors`, all memory that the weights take. It knows no kernel: a form is what can be written to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from nanoinfer.config import EngineConfig
from nanoinfer.loading.weights import Places, Weights
from nanoinfer.models.registry import ModelConfig, WeightRules

if TYPE_CHECKING:
    from nanoinfer.loading.formats.lora import LowRankUpdate


@runtime_checkable
class Form(Protocol):
    """A linear layer's weights, perhaps among those of others, as a kernel reads them."""

    def write(self, name: str, values: Tensor, start: int) -> None:
        """Replace the weight or the bias of the outputs from `start` on, in place."""
        ...

    def arrays(self) -> list[Tensor]:
        """The memory that the weights take."""
        ...


class HookInKernels:
    """A forward hook of a linear layer that the layer's kernel computes as well: the adapters of requests (lora/layers.py)."""


@runtime_checkable
class Shards(Protocol):
    """The part of a model that one of several ranks has (distributed/sharding.py)."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> Tensor: ...  # the tensors of all ranks
    def minimum(self, number: int) -> int: ...  # of the ranks' numbers
    def split(self, model: Any, weights: Weights) -> tuple[Any, Weights]: ...
    def part_of(self, weights: Weights, model_class: type[nn.Module], config: ModelConfig) -> Weights: ...
    def join(self, model: Any, vocab_size: int) -> None: ...
    def part_of_update(self, layer: str, update: "LowRankUpdate") -> "LowRankUpdate": ...
    @property
    def whole(self) -> nn.Module: ...  # the model before it was split, on the meta device


@dataclass(frozen=True, slots=True)
class Origin:
    """How a model was loaded, which an update of its weights must know (update.py). sizes: the whole model's config."""

    config: EngineConfig
    model_class: type[nn.Module]
    rules: WeightRules
    sizes: ModelConfig
    shards: Shards | None


class HeldWeights:
    """The weights of one model.

    Attributes:
        places: of each parameter. Rounded weights have none, because they cannot be replaced.
        origin: None for a model that was not loaded from a checkpoint.
    """

    def __init__(self, places: Places | None = None, origin: Origin | None = None) -> None:
        self.places, self.origin = places or {}, origin
        self._forms: dict[nn.Module, list[tuple[Form, int]]] = {}
        self._renewals: list[Callable[[], object]] = []

    @property
    def shards(self) -> Shards | None:
        """This rank's view of the ranks that share the model. None: there is one."""
        return None if self.origin is None else self.origin.shards

    def add_form(self, linear: nn.Module, form: Form, start: int) -> None:
        """Renew a form whenever the layer's weights change. start: the layer's first output in it."""
        self._forms.setdefault(linear, []).append((form, start))

    def add_renewal(self, renew: Callable[[], object]) -> None:
        """Call a function after each update: it computes again what a kernel reads in place of parameters."""
        self._renewals.append(renew)

    @torch.inference_mode()
    def write(self, name: str, values: Tensor) -> None:
        """Replace a parameter, as its layer has it, in all of its forms. After the last one comes `finish`."""
        for module, leaf in self.places.get(name, ()):
            for form, start in self._forms.get(module, ()):
                form.write(leaf, values, start)
            if (parameter := getattr(module, leaf)) is not None:  # None: it is only in the kernels' forms
                parameter.copy_(values)

    @torch.inference_mode()
    def finish(self) -> None:
        for renew in self._renewals:
            renew()

    def tensors(self) -> list[Tensor]:
        """The memory of all weights."""
        parameters = [getattr(module, leaf) for places in self.places.values() for module, leaf in places]
        arrays = [array for forms in self._forms.values() for form, _ in forms for array in form.arrays()]
        return [*(parameter for parameter in parameters if parameter is not None), *arrays]
