"""The attention of a step whose layers are in several KV groups: each layer attends by the block tables of its group.

In: the metadata of each group. Out: an Attend. Models whose layers form a single group do not use it.
"""

from torch import Tensor

from nanoinfer.attention.base import Attend, AttentionBackend, AttentionMetadata
from nanoinfer.attention.dense import Sinks, Window
from nanoinfer.attention.kv_cache import KVCache


class GroupedAttend:
    """Calls the Attend of a layer's group.

    Attributes:
        steps: the Attend of each group.
        group_of: the index of each layer's group.
    """

    def __init__(self, cache: KVCache, backend: AttentionBackend, metadata: tuple[AttentionMetadata, ...]) -> None:
        self.steps: list[Attend] = [backend.begin_step(cache, of_group) for of_group in metadata]
        self.group_of = {layer: index for index, group in enumerate(cache.groups) for layer in group.layers}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: Window = None, sinks: Sinks = None) -> Tensor:
        return self.steps[self.group_of[layer]](layer, q, k, v, window=window, sinks=sinks)
