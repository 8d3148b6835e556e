"""Build an LLMEngine from a model with its weights: make_engine, and a function for each of its parts.

Each function imports torch and the features when it is called, so that importing this file takes no time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING
from weakref import ref

from nanoinfer.config import EngineConfig
from nanoinfer.engine.inputs import PreparedRequest, RequestFeature
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.observer import Observer, Planner, together
from nanoinfer.errors import UnsupportedError
from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.observer import NOBODY, SchedulingObserver
from nanoinfer.scheduling.scheduler import scheduling_classes
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanoinfer.execution.executor import ExecutorInfo
    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.execution.runtime import Runtime
    from nanoinfer.features.adapters.adapters import Adapters
    from nanoinfer.features.disk_cache.block_files import BlockFiles
    from nanoinfer.features.distributed.sharding import Shards
    from nanoinfer.features.structured.grammar import GrammarCompiler
    from nanoinfer.features.training.loaded_weights import LoadedWeights
    from nanoinfer.models.registry import Model


def make_engine(
    model: "Model",
    config: EngineConfig,
    *,
    weights: "LoadedWeights | None" = None,
    draft_model: "Model | None" = None,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    shards: "Shards | None" = None,
) -> LLMEngine:
    """Make the engine of a model on its device. Unless enforce_eager is set, kernels take the weights out of the model.

    Args:
        weights: the model's weights as the loader holds them. None: they cannot be replaced.
        draft_model: the model or module that config.speculative names, on the same device. None: no model drafts.
        shards: the ranks that share the model, which make their engines together. None: this process has the whole model.

    Raises: the errors of LLM(), also for the draft model.
    """
    adapters = make_adapters(model, config, shards)
    store_of_executor = None
    if config.cache.prefix_cache_dir is not None:
        from nanoinfer.features.disk_cache.block_files import store_of

        store_of_executor = store_of(model, config, shards)  # reads the weights while the model still has them
    runtime = make_runtime(model, config, shards, weights, adapters)
    drafts = None
    if config.speculative is not None:
        from nanoinfer.features.drafts.build import Drafts

        drafts = Drafts(config.speculative, runtime, config, draft_model)
        runtime = drafts.runtime
    executor = make_executor(runtime, config)
    store = None if store_of_executor is None else store_of_executor(executor)
    observer = make_observer(executor, config, tokenizer)
    return LLMEngine(
        executor,
        config,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        planner=make_planner(executor, config) if drafts is None else drafts.planner(executor),
        block_manager=make_block_manager(executor.info, config, observer, store),
        observer=observer,
        features=[*adapters, ParameterFeatures(tokenizer, executor, config.logprobs_mode)],
    )


class ParameterFeatures(RequestFeature):
    """Adds to a request what features do for its parameters. A feature is imported for the first request that asks for it."""

    def __init__(self, tokenizer: Tokenizer | None, executor: "LocalExecutor", logprobs_mode: str = "raw") -> None:
        self._tokenizer, self._vocab_size, self._logprobs_mode = tokenizer, executor.info.vocab_size, logprobs_mode
        self._executor = ref(executor)  # LLM.close frees what the executor holds
        self._lock = Lock()  # threads of an AsyncLLM prepare requests at the same time

    def prepare(self, prepared: PreparedRequest, options: dict[str, object]) -> PreparedRequest:
        params, constraints = prepared.params, list(prepared.constraints)
        if params.reports and (executor := self._executor()) is not None:  # None: the LLM was closed meanwhile
            from nanoinfer.features.logprobs.token_logprobs import report_by

            with self._lock:
                report_by(executor, self._logprobs_mode)
        if params.prompt_logprobs is not None:
            from nanoinfer.features.logprobs.prompt_logprobs import reader_of

            prepared = replace(prepared, reader=reader_of(params, self._tokenizer, self._vocab_size))
        if params.bad_words or params.no_repeat_ngram_size or params.repetition_detection:
            from nanoinfer.features.structured.words import word_constraints

            constraints += word_constraints(params, self._tokenizer, self._vocab_size)
        if params.thinking_token_budget is not None:
            from nanoinfer.features.reasoning.thinking import reasoning_of

            constraints.append(reasoning_of(prepared, self._tokenizer, self._vocab_size))
        prepared = replace(prepared, constraints=tuple(constraints)) if constraints else prepared
        if params.structured_outputs:
            with self._lock:
                form, grammars = params.structured_outputs, self._grammars
            prepared = replace(prepared, compile=partial(grammars.compile, form), check=partial(grammars.check, form))
        return prepared

    @cached_property
    def _grammars(self) -> "GrammarCompiler":
        from nanoinfer.features.structured.grammar import GrammarCompiler

        return GrammarCompiler(self._tokenizer, self._vocab_size)


def make_adapters(model: "Model", config: EngineConfig, shards: "Shards | None" = None) -> "list[Adapters]":
    """Hook the adapters of requests into the layers, before kernels replace the layers. Raises: the errors of Adapters."""
    if not config.enable_lora:
        return []
    from nanoinfer.features.adapters.adapters import Adapters

    return [Adapters(model, config.max_loras, config.max_lora_rank, shards)]


def make_runtime(
    model: "Model",
    config: EngineConfig,
    shards: "Shards | None" = None,
    weights: "LoadedWeights | None" = None,
    adapters: "Sequence[Adapters]" = (),
) -> "Runtime":
    """Make the runtime of a model: the textbook's with enforce_eager, otherwise a faster one with the same result."""
    from nanoinfer.execution.runtime import plain_runtime
    from nanoinfer.features.training.loaded_weights import LoadedWeights

    weights = weights or LoadedWeights()
    if any(getattr(model.config, name, False) for name in ("layer_windows", "has_sinks", "state_shapes")):
        from nanoinfer.features.hybrid.runtime import hybrid_runtime

        runtime: Runtime = hybrid_runtime(model, config, weights)
    else:
        runtime = plain_runtime(model, config, weights)
    if config.cache.kv_cache_dtype == "int8":
        from nanoinfer.features.int8_cache.cache import with_int8_cache

        runtime = with_int8_cache(runtime)
    if config.scheduler.batch_invariant:
        from nanoinfer.features.batch_invariant.single_queries import InvariantRunner

        runtime = replace(runtime, wrappers=(InvariantRunner,))
    if not config.enforce_eager:
        from nanoinfer.fast.accelerate import accelerate

        runtime = accelerate(runtime, config)
    if shards is not None:
        runtime = shards.connect(runtime)
    for one in adapters:  # after the ranks, because rank 0 knows the adapters
        runtime = one.join(runtime)
    return runtime


def make_executor(
    runtime: "Runtime", config: EngineConfig, *, num_blocks: int | None = None, is_drafter: bool = False
) -> "LocalExecutor":
    """Make the executor of a finished runtime. All ranks make their executors together.

    Args:
        num_blocks: the number of blocks of the KV cache. None: as many as fit.
        is_drafter: whether a proposer of drafts plans the steps, and no engine.
    """
    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.execution.memory import size_cache
    from nanoinfer.system.process import return_freed_memory

    return_freed_memory()  # of loading, before the free memory is measured
    info = size_cache(runtime, config, num_blocks=num_blocks)
    if config.scheduler.batch_invariant and not runtime.is_batch_independent:
        why = "enforce_eager=True uses torch's products, whose bits do" if config.enforce_eager else "this machine's do"
        raise UnsupportedError(
            f"batch_invariant=True requires rows whose bits do not depend on the batch; {why}, for this model in "
            f"{info.dtype} on {runtime.device.type}; leave it out, or use a CPU with a C++ compiler "
            "or a GPU with attention_backend='triton'"
        )
    if config.logits_processors or config.stages is not None:
        from nanoinfer.features.own_code.logits_processors import with_processors

        config = with_processors(config, runtime.device, info)
    if config.enforce_eager or is_drafter:
        return LocalExecutor(runtime, info, config)
    from nanoinfer.fast.accelerate import executor_class

    return executor_class(runtime, config)(runtime, info, config)


def make_planner(executor: "LocalExecutor", config: EngineConfig) -> Planner:
    """Make what plans the steps of an engine without drafts."""
    if config.enforce_eager:
        return Planner()
    from nanoinfer.fast.accelerate import planner_of

    return planner_of(executor)


def make_block_manager(
    info: "ExecutorInfo", config: EngineConfig, observer: SchedulingObserver = NOBODY, store: "BlockFiles | None" = None
) -> BlockManager:
    """Make the manager of the cache's blocks: config's class or BlockManager, unless layers keep less or there is a store."""
    cls, caching = scheduling_classes(config)[1], config.cache.enable_prefix_caching
    if store is None and info.windows == (None,) and not info.num_state_slots:
        return cls(info.num_blocks, info.block_size, caching, observer)
    from nanoinfer.features.hybrid.block_manager import with_groups

    layout = info.windows, config.scheduler.chunk_grid, info.num_state_slots
    if store is None:
        return with_groups(cls)(info.num_blocks, info.block_size, caching, observer, *layout)
    from nanoinfer.features.disk_cache.stored_blocks import StoredBlockManager

    return with_groups(cls, StoredBlockManager)(info.num_blocks, info.block_size, caching, observer, *layout, store=store)


def make_observer(executor: "LocalExecutor", config: EngineConfig, tokenizer: Tokenizer | None) -> Observer:
    """Make what watches the engine: metrics, and the events of config.tracer with the tokenizer's texts."""
    from nanoinfer.features.metrics.engine_metrics import EngineMetrics

    if config.tracer is None:
        return EngineMetrics()
    from nanoinfer.features.tracing.observer import TracingObserver
    from nanoinfer.features.tracing.stage_trace import TracingSampler

    tracing = TracingObserver(config.tracer, executor.info.block_size, tokenizer)
    if tracing.wants_stages:
        executor.sampler = TracingSampler(executor.sampler, tracing)
    return together(EngineMetrics(), tracing)
