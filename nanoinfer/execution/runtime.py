"""The runtime of a model: the textbook's, which `fast/` may replace by a faster one with the same result.

In: a model with its weights. Out: a Runtime, from which build.py makes an executor.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from nanoinfer.attention.base import Attend, AttentionBackend, select_backend
from nanoinfer.attention.cache_sizes import CacheSizes
from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.config import EngineConfig
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner, ModelWeights, Replayer
from nanoinfer.models.registry import Model
from nanoinfer.sampling.routes import Route, RoutedSampler
from nanoinfer.sampling.sampler import Sampler
from nanoinfer.sampling.stages import STAGES

GRAPH_CHUNKS = 16  # the most prompt chunks of a step that is captured as a CUDA graph


@runtime_checkable
class CompileReport(Protocol):
    """Which modules of a model were compiled (fast/compile.py), by their paths. "" is the model."""

    compiled: dict[str, int]  # path -> number of kernel calls
    left: dict[str, str]  # path -> why the module runs as it is


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything that an executor is built from."""

    model: Model  # the model on its device
    backend: AttentionBackend  # the model's attention. It serves this model only
    backend_name: str  # the backend's name in attention.base.BACKENDS
    sizes: CacheSizes  # what the model's layers keep in the KV cache
    block_size: int  # the number of tokens in a cache block
    cache_dtype: torch.dtype  # the dtype of stored keys and values
    cache_class: type[KVCache] = KVCache  # the class of the KV cache
    routes: tuple[Route, ...] = ()  # the sampler's fast routes, in the order in which they are tried
    # returns the object that replays steps, given the cache's size. None: every step runs eagerly
    make_step_graphs: Callable[[ExecutorInfo], Replayer] | None = None
    num_graph_rows: int = 0  # the most decodes of a step that make_step_graphs captures. 0: every step runs eagerly
    # the numbers of prompt tokens to which make_step_graphs pads steps, in order. Empty: it does not
    prompt_graph_sizes: tuple[int, ...] = ()
    # whether a prompt's rows were found to have the same bits in any batch on this machine. The plain runtime has False,
    # because torch's products depend on the number of rows
    is_batch_independent: bool = False
    report: CompileReport | None = None  # which modules were compiled. None: compilation was not tried
    reserved_bytes: int = 0  # the bytes on the device that the runner allocates later
    reserved_hint: str = ""  # how to reserve fewer bytes, for the error of a cache without room. "": no bytes are reserved
    weights: ModelWeights = field(default_factory=ModelWeights)  # the model's weights, as parameters and as kernels read them
    # functions that wrap the runner, innermost first, such as for the other ranks or adapters
    wrappers: tuple[Callable[[ModelRunner], ModelRunner], ...] = ()
    kept_bytes_per_token: int = 0  # the bytes that others keep for each token of the cache, besides its keys and values
    kept_step_bytes: int = 0  # the bytes that must stay free on a GPU for the steps of others, besides those of the model
    # makes a context that surrounds the computations of each step
    in_step: Callable[[], AbstractContextManager[object]] = nullcontext
    rounded_copy: Model | None = None  # the model with weights of config.bits_of_copy bits. None: it has no such copy

    @property
    def bytes_per_block(self) -> int:
        """The bytes of a block of the cache."""
        return self.sizes.bytes_per_block(self.block_size, self.cache_dtype)

    def begin_step(self, cache: KVCache, batch: ForwardBatch) -> Attend:
        """Return the object with which all layers of a step attend."""
        return self.backend.begin_step(cache, batch.attention)

    def no_attention(self) -> Attend:
        """Return an Attend that computes nothing, to measure what the other parts of a step take."""
        return lambda layer, q, k, v, **options: q.contiguous()

    def make_cache(self, num_blocks: int, num_state_slots: int = 0) -> KVCache:
        """Make a cache. num_state_slots: for a runtime whose layers keep states (features/hybrid)."""
        return self.cache_class(**self.cache_options(num_blocks))

    def cache_options(self, num_blocks: int) -> dict[str, Any]:
        """The arguments of KVCache."""
        sizes = {name: getattr(self.sizes, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
        kind = {"dtype": self.cache_dtype, "device": self.device, "layout": self.backend.layout}
        return {"num_blocks": num_blocks, "block_size": self.block_size, **sizes, **kind}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype


def plain_runtime(
    model: Model, config: EngineConfig, weights: ModelWeights | None = None, needed: Sequence[str] = ()
) -> Runtime:
    """Select the attention backend of a model. The model runs as its file says, and the sampler stage by stage.

    needed: as in select_backend.
    """
    weight = next(model.parameters())
    sizes = CacheSizes.of(model.config)
    name, backend = select_backend(
        config.attention_backend,
        weight.device,
        weight.dtype,
        sizes.head_dim,
        block_size=config.cache.block_size,
        enforce_eager=config.enforce_eager,
        needed=needed,
    )
    block_size = config.cache.block_size or backend.default_block_size
    # Triton launches kernels on the current device.
    is_cpu = weight.device.type == "cpu"
    in_step = nullcontext if is_cpu else partial(torch.get_device_module(weight.device).device, weight.device)
    return Runtime(model, backend, name, sizes, block_size, weight.dtype, weights=weights or ModelWeights(), in_step=in_step)


def make_runner(runtime: Runtime, info: ExecutorInfo, cache: KVCache | None = None) -> ModelRunner:
    """Make the runner of the model. cache: the KV cache of another runner. None: a new one is allocated."""
    graphs = None if runtime.make_step_graphs is None else runtime.make_step_graphs(info)
    if cache is None:
        cache = runtime.make_cache(info.num_blocks + (graphs is not None), info.num_state_slots)
    runner: ModelRunner = ModelRunner(runtime.model, cache, runtime.begin_step, graphs, runtime.weights)
    for wrap in runtime.wrappers:
        runner = wrap(runner)
    return runner


def make_sampler(runtime: Runtime, config: EngineConfig) -> Sampler:
    """Make the sampler: with the runtime's routes, unless users have added stages."""
    stages = STAGES if config.stages is None else config.stages
    return RoutedSampler(runtime.routes) if runtime.routes and stages == STAGES else Sampler(stages)
