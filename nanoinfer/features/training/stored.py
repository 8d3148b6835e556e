"""Parameters that are still in the checkpoint, so that kernels lay them out piece by piece while they are read.

In: a model on the meta device, and the Sources of its parameters (loading/weights.py). Out: the same model with
StoredParameters. `load` reads those that no kernel has taken.
"""

import math
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanoinfer.loading.weights import Source, Sources, fill, places_of


class Identity(NamedTuple):
    """What tells the tensors of a checkpoint from all others, without reading them whole."""

    paths: list[str]  # of the files
    part: tuple[int, int]  # the rank that has this part of each tensor, and the number of ranks
    version: str  # differs whenever a tensor may differ from those of the same paths


class StoredParameter(nn.Parameter):
    """A parameter whose numbers are still in the checkpoint. As a tensor it is NaN everywhere, and takes no memory."""

    source: Source
    identity: Identity | None  # the checkpoint's. None: unknown

    @classmethod
    def of(cls, like: Tensor, source: Source, identity: Identity | None = None) -> "StoredParameter":
        """Return a parameter of the shape of another."""
        parameter = cls(torch.full((), math.nan, dtype=source.dtype).expand(like.shape), requires_grad=False)
        parameter.source, parameter.identity = source, identity
        return parameter

    def to(self, *args: Any, **kwargs: Any) -> "StoredParameter":
        """Return the parameter itself, which has no numbers to be moved to a device."""
        return self


def store(model: nn.Module, sources: Sources, kept: Container[Tensor] | None = None, identity: Identity | None = None) -> None:
    """Replace the parameters in `kept` by StoredParameters. None: all parameters."""
    for parameter, owners in places_of(model).items():
        if kept is None or parameter in kept:
            stored = StoredParameter.of(parameter, sources[parameter], identity)
            for module, leaf in owners:
                setattr(module, leaf, stored)


def load(model: nn.Module, device: torch.device) -> None:
    """Read the StoredParameters of a model into memory."""
    fill(model, {weight: weight.source for weight in model.parameters() if isinstance(weight, StoredParameter)}, device)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters that have their numbers."""
    return next(weight.device for weight in model.parameters() if not isinstance(weight, StoredParameter))


def pieces_of(weight: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a parameter in order: those of a StoredParameter piece by piece, any other's together."""
    if isinstance(weight, StoredParameter):
        yield from map(weight.source.read, weight.source.pieces())
    else:
        yield weight.detach()
