"""The runtime of a model whose layers differ in what they keep: keys and values of all tokens, of a window, or a state.

In: the plain runtime. Out: the same, with the steps and the cache of such layers.
"""

from dataclasses import fields

from nanoinfer.attention.base import Attend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.runtime import Runtime
from nanoinfer.features.hybrid.groups import GroupedAttend, groups_of
from nanoinfer.features.hybrid.states import AttendWithStates, updates_of


class HybridRuntime(Runtime):
    """A Runtime whose layers form KV groups or keep states."""

    __slots__ = ()

    def begin_step(self, cache: KVCache, batch: ForwardBatch) -> Attend:
        """Return the object with which the layers of a step attend, each in its group, and keep their states."""
        if len(self.sizes.groups) > 1:
            attend: Attend = GroupedAttend(cache, self.backend, groups_of(batch, self.block_size))
        else:
            attend = super().begin_step(cache, batch)
        if cache.states is not None:
            is_single = batch.attention.max_query_len == 1
            attend = AttendWithStates(attend, cache.states, updates_of(batch), is_single=is_single)
        return attend


def hybrid_runtime(runtime: Runtime) -> HybridRuntime:
    return HybridRuntime(**{one.name: getattr(runtime, one.name) for one in fields(runtime)})
