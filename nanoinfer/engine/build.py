"""Build an LLMEngine from a model with its weights: make_engine, and a function for each of its parts.

Each function imports torch when it is called, so that the rest of this folder runs without it.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import UnsupportedError
from nanoinfer.features import tracing
from nanoinfer.features.logprobs.prompt_logprobs import PromptLogprobs
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanoinfer.distributed.sharding import Shards
    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.execution.runtime import Runtime
    from nanoinfer.features.adapters.adapters import Adapters
    from nanoinfer.features.drafts.speculator import Proposer
    from nanoinfer.loading.loaded_weights import LoadedWeights
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
        from nanoinfer.execution.block_files import store_of

        store_of_executor = store_of(model, config, shards)  # reads the weights while the model still has them
    runtime = make_runtime(model, config, shards, weights, adapters)
    runtime, draft = make_draft(runtime, config, draft_model)
    tracer = None if config.tracer is None else tracing.EventBuffer(config.tracer)
    cache_of_draft = None if config.bits_of_draft else draft
    executor = make_executor(runtime, config, draft=cache_of_draft, tokenizer=tokenizer, tracer=tracer)
    return LLMEngine(
        executor,
        config,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        proposer=make_proposer(draft, config, executor),
        adapters=adapters,
        tracer=tracer,
        store=None if store_of_executor is None else store_of_executor(executor),
        features=[PromptLogprobs(executor.info.vocab_size, tokenizer)],
    )


def make_adapters(model: "Model", config: EngineConfig, shards: "Shards | None" = None) -> "Adapters | None":
    """Hook the adapters of requests into the layers, before kernels replace the layers. Raises: the errors of Adapters."""
    if not config.enable_lora:
        return None
    from nanoinfer.features.adapters.adapters import Adapters

    return Adapters(model, config.max_loras, config.max_lora_rank, shards)


def make_runtime(
    model: "Model",
    config: EngineConfig,
    shards: "Shards | None" = None,
    weights: "LoadedWeights | None" = None,
    adapters: "Adapters | None" = None,
) -> "Runtime":
    """Make the runtime of a model: the textbook's with enforce_eager, otherwise a faster one with the same result."""
    from nanoinfer.execution.runtime import plain_runtime

    runtime = plain_runtime(model, config, weights)
    if not config.enforce_eager:
        from nanoinfer.fast.accelerate import accelerate

        runtime = accelerate(runtime, config, {} if adapters is None else adapters.layers)
    if shards is not None:
        runtime = shards.connect(runtime)
    return runtime if adapters is None else adapters.join(runtime)  # after the ranks, because rank 0 knows the adapters


def make_draft(runtime: "Runtime", config: EngineConfig, draft_model: "Model | None") -> "tuple[Runtime, Runtime | None]":
    """Make the runtime of the drafter: a model, a module of the model, or its rounded copy. Returns the model's own first."""
    if config.bits_of_draft is not None:
        if runtime.drafter is None:
            raise UnsupportedError(
                "speculative_config with method 'quantized' needs C++ kernels on a CPU, and neither enforce_eager nor "
                "tensor_parallel_size; leave them out, or use method 'ngram' or 'draft_model'"
            )
        return runtime, replace(runtime, model=runtime.drafter)
    if config.speculative is None or draft_model is None:
        return runtime, None
    if config.speculative.method == "mtp":
        from nanoinfer.features.drafts.mtp_runner import with_drafter

        return with_drafter(runtime, draft_model)
    return runtime, make_runtime(draft_model, _draft_config(config))


def _draft_config(config: EngineConfig) -> EngineConfig:
    return EngineConfig(
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        cudagraph_capture=config.cudagraph_capture,
        screened_head=config.screened_head,
        cache=config.cache,
        scheduler=replace(config.scheduler, batch_invariant=False),
    )


def make_proposer(draft: "Runtime | None", config: EngineConfig, target: "LocalExecutor") -> "Proposer | None":
    """Make the proposer of drafts.

    Args:
        draft: the runtime of a draft model, of a module of the model, or of its rounded copy. None: no model drafts.
        target: the executor of the model. A rounded copy shares its cache. The cache of another drafter is attached to it, and
            holds as many tokens.
    """
    if config.speculative is None:
        return None
    if isinstance(proposer_cls := config.speculative.method, type):
        from nanoinfer.features.drafts.checked import CheckedProposer

        return CheckedProposer(proposer_cls(config.speculative), target.info.vocab_size)
    if draft is None:
        from nanoinfer.features.drafts.ngram import NGramProposer

        return NGramProposer(config.speculative)
    if config.bits_of_draft is not None:
        from nanoinfer.execution.local_executor import LocalExecutor
        from nanoinfer.features.drafts.quantized import QuantizedProposer

        return QuantizedProposer(LocalExecutor(draft, target.info, _draft_config(config), cache=target.runner.cache))
    if draft.sizes.num_state_layers:
        raise UnsupportedError(
            "the draft model keeps states, which cannot go back to an earlier token; choose one with attention in all "
            "layers, or use method 'ngram'"
        )
    num_blocks = -(-target.info.num_blocks * target.info.block_size // draft.block_size)
    executor = make_executor(draft, _draft_config(config), num_blocks=num_blocks)
    target.drafter = executor
    target.runner.cache.attached += executor.runner.cache.tensors()
    if config.speculative.method == "mtp":
        from nanoinfer.features.drafts.mtp import MTPProposer

        return MTPProposer(executor, config.scheduler)
    from nanoinfer.features.drafts.draft_model import DraftModelProposer

    return DraftModelProposer(executor, config.scheduler)


def make_executor(
    runtime: "Runtime",
    config: EngineConfig,
    *,
    draft: "Runtime | None" = None,
    num_blocks: int | None = None,
    tokenizer: Tokenizer | None = None,
    tracer: "tracing.EventBuffer | None" = None,
) -> "LocalExecutor":
    """Make the executor of a finished runtime. All ranks make their executors together.

    Args:
        draft: the runtime of a draft model, whose cache must fit into the memory as well. This executor does not run it.
        num_blocks: the number of blocks of the KV cache. None: as many as fit.
        tokenizer: the tokenizer that writes the texts in the tracer's events. None: the events have no texts.
    """
    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.execution.memory import size_cache
    from nanoinfer.system.process import return_freed_memory

    return_freed_memory()  # of loading, before the free memory is measured
    info = size_cache(runtime, config, draft=draft, num_blocks=num_blocks)
    if config.scheduler.batch_invariant and not runtime.is_batch_independent:
        why = "enforce_eager=True uses torch's products, whose bits do" if config.enforce_eager else "this machine's do"
        raise UnsupportedError(
            f"batch_invariant=True requires rows whose bits do not depend on the batch; {why}, for this model in "
            f"{info.dtype} on {runtime.device.type}; leave it out, or use a CPU with a C++ compiler"
        )
    return LocalExecutor(runtime, info, config, tokenizer=tokenizer, tracer=tracer)
