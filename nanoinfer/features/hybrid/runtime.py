"""The runtime of a model whose layers differ in what they keep: keys and values of all tokens, of a window, or a state."""

from dataclasses import fields

from nanoinfer.attention.base import Attend
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.attention.reference import ReferenceBackend
from nanoinfer.config import EngineConfig
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelWeights
from nanoinfer.execution.runtime import Runtime, plain_runtime
from nanoinfer.features.hybrid.attention import HybridReferenceBackend, NoAttention
from nanoinfer.features.hybrid.cache import HybridCache, make_states
from nanoinfer.features.hybrid.groups import GroupedAttend, groups_of
from nanoinfer.features.hybrid.sizes import HybridSizes
from nanoinfer.features.hybrid.states import AttendWithStates, updates_of
from nanoinfer.models.registry import Model


class HybridRuntime(Runtime):
    """A Runtime whose layers form KV groups, have sinks or keep states."""

    __slots__ = ()
    sizes: HybridSizes

    def begin_step(self, cache: KVCache, batch: ForwardBatch) -> Attend:
        """Return the object with which the layers of a step attend, each in its group, and keep their states."""
        assert isinstance(cache, HybridCache)
        if cache.num_groups > 1:
            attend: Attend = GroupedAttend(cache, self.backend, groups_of(batch, self.block_size), self.sizes.groups)
        else:
            attend = super().begin_step(cache, batch)
        if cache.states:
            is_single = batch.attention.max_query_len == 1
            attend = AttendWithStates(attend, cache.states, updates_of(batch), is_single=is_single)
        return attend

    def no_attention(self) -> Attend:
        return NoAttention(self.sizes.state_shapes)

    def make_cache(self, num_blocks: int, num_state_slots: int = 0) -> HybridCache:
        """Make a cache with so many blocks, which the groups share, and so many state slots."""
        sizes = self.sizes
        states = make_states(sizes.num_state_layers, num_state_slots, sizes.state_shapes, self.device)
        bases = (HybridCache,) if self.cache_class is KVCache else (HybridCache, self.cache_class)
        make: type[HybridCache] = type("HybridCache", bases, {})
        return make(num_groups=len(sizes.groups), states=states, **self.cache_options(num_blocks))


def hybrid_runtime(model: Model, config: EngineConfig, weights: ModelWeights) -> HybridRuntime:
    """Do what plain_runtime does, for layers that are not all alike."""
    sizes = HybridSizes.of(model.config)
    needed = [*["supports_windows"] * any(sizes.windows), *["supports_sinks"] * sizes.has_sinks]
    runtime = plain_runtime(model, config, weights, needed)
    own = {one.name: getattr(runtime, one.name) for one in fields(runtime)} | {"sizes": sizes}
    if isinstance(runtime.backend, ReferenceBackend):
        users = type(runtime.backend)
        bases = (HybridReferenceBackend,) if users is ReferenceBackend else (users, HybridReferenceBackend)
        own["backend"] = type(users.__name__, bases, {})(enforce_eager=config.enforce_eager)
    return HybridRuntime(**own)
