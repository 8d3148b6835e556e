"""EngineConfig -> LLMEngine, with its checkpoint loaded and its executor made.

torch is imported when an engine is made, inside these functions, so that the rest of this folder runs without it.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer import tracing
from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine, scheduling_classes
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.loading.checkpoint import DEFAULT_MODEL, Checkpoint
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanoinfer.distributed.sharding import Shards
    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.execution.parts import Parts
    from nanoinfer.loading.held_weights import HeldWeights
    from nanoinfer.lora.layers import AdaptedLayers
    from nanoinfer.models.registry import Model
    from nanoinfer.speculative.speculator import Proposer


def load_engine(config: EngineConfig) -> tuple[LLMEngine, Checkpoint]:
    """Load a checkpoint and make its engine. Returns the checkpoint too, for its generation_config. Raises: as LLM() does."""
    from nanoinfer.loading.loader import load
    from nanoinfer.system.process import limit_threads

    limit_threads()
    scheduling_classes(config)  # wrong ones are refused before the model is loaded
    shards: Any = None
    if config.tensor_parallel_size > 1:
        from nanoinfer.distributed.launch import start

        config, shards = start(config)  # under torchrun, ranks above 0 work for rank 0 in here, and exit
    with nullcontext() if shards is None else shards.workers.watched():
        loaded = load(config, shards)
        engine = make_engine(
            loaded.model,
            config,
            weights=loaded.weights,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            shards=shards,
        )
    if engine.tracer is not None:
        model, info = config.model or DEFAULT_MODEL, engine.executor.info
        engine.tracer.emit(
            tracing.EngineStarted(
                model=os.path.basename(os.path.normpath(model)) if os.path.exists(model) else model,
                num_parameters=loaded.num_parameters,
                device=info.device,
                dtype=info.dtype,
                attention_backend=info.attention_backend,
                vocab_size=info.vocab_size,
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
                max_model_len=info.max_model_len,
            )
        )
        engine.flush_trace()
    return engine, loaded.checkpoint


def make_engine(
    model: "Model",
    config: EngineConfig,
    *,
    weights: "HeldWeights | None" = None,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    shards: "Shards | None" = None,
) -> LLMEngine:
    """Make the engine of a model on its device. Unless enforce_eager, the model's modules are replaced by faster ones.

    Raises: as LLM() does, for the draft model too.
    """
    speculative = config.speculative
    keep_blocks = None
    if config.cache.prefix_cache_dir is not None:
        from nanoinfer.execution.block_files import keeper

        keep_blocks = keeper(model, config)
    parts, draft = make_parts(model, config, shards, weights), None
    if speculative is not None and speculative.method == "mtp":
        from nanoinfer.execution.mtp_runner import DrafterRunner, KeepingRunner
        from nanoinfer.loading.drafter import load_drafter

        drafter = load_drafter(parts.model, config)  # of the faster model, whose head it shares
        parts = replace(parts, runner_class=KeepingRunner)
        draft = replace(parts, model=drafter, runner_class=DrafterRunner)
    elif speculative is not None and speculative.model is not None:
        draft = make_parts(_load_draft_model(config, model, tokenizer), _draft_config(config, parts))
    tracer = None if config.tracer is None else tracing.EventBuffer(config.tracer)
    executor = make_executor(parts, config, shards=shards, draft=draft, tokenizer=tokenizer, tracer=tracer)
    proposer: Proposer | None = None
    if draft is not None:
        proposer = _make_proposer(draft, config, executor)
    elif speculative is not None:
        from nanoinfer.speculative.ngram import NGramProposer

        proposer = NGramProposer(speculative)
    config = config if keep_blocks is None else keep_blocks(executor)
    engine = LLMEngine(executor, config, tokenizer=tokenizer, eos_token_ids=eos_token_ids, proposer=proposer, tracer=tracer)
    engine.inputs.adapters = getattr(executor.runner, "adapters", None)
    return engine


def _draft_config(config: EngineConfig, parts: "Parts") -> EngineConfig:
    return EngineConfig(
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        cache=replace(config.cache, block_size=parts.block_size),
        scheduler=replace(config.scheduler, batch_invariant=False),
    )


def _make_proposer(draft: "Parts", config: EngineConfig, executor: "LocalExecutor") -> "Proposer":
    """Make what drafts by a module of the executor's model, or by a smaller model."""
    draft_executor = make_executor(draft, _draft_config(config, draft), num_blocks=executor.info.num_blocks)
    if hasattr(draft.model, "target"):
        from nanoinfer.speculative.mtp import MTPProposer

        return MTPProposer(draft_executor, config.scheduler, executor.runner)
    from nanoinfer.speculative.draft_model import DraftModelProposer

    if hasattr(draft.model.config, "state_shapes"):
        raise UnsupportedError(
            "the draft model keeps states, which cannot go back to an earlier token; choose one with attention in all "
            "layers, or use method 'ngram'"
        )
    if draft_executor.info.windows != (None,):
        raise UnsupportedError(
            "the draft model has sliding windows, which free blocks that it would need again after a rejected draft; "
            "choose one with full attention in every layer, or use method 'ngram'"
        )
    return DraftModelProposer(draft_executor, config.scheduler)


def make_parts(
    model: "Model", config: EngineConfig, shards: "Shards | None" = None, weights: "HeldWeights | None" = None
) -> "Parts":
    """Make the parts that run a model: the textbook's with enforce_eager, otherwise faster ones with the same result."""
    from nanoinfer.execution.parts import plain_parts

    parts = plain_parts(model, config, weights)
    adapters: AdaptedLayers = {}
    if config.enable_lora:
        from nanoinfer.lora.adapters import with_adapters

        parts, found = with_adapters(parts, config)
        adapters = found.layers
    if not config.enforce_eager:
        from nanoinfer.fast.accelerate import accelerate

        parts = accelerate(parts, config, adapters)
    return parts if shards is None else shards.connect(parts)


def make_executor(
    parts: "Parts",
    config: EngineConfig,
    *,
    shards: "Shards | None" = None,
    draft: "Parts | None" = None,
    num_blocks: int | None = None,
    tokenizer: Tokenizer | None = None,
    tracer: "tracing.EventBuffer | None" = None,
) -> "LocalExecutor":
    """Make the executor of finished parts. All ranks of `shards` make theirs together.

    Args:
        draft: of a draft model, whose cache must fit into the memory as well. It is not run by this executor.
        num_blocks: of the KV cache. None: as many as fit.
        tokenizer: for the token texts in the tracer's events.
    """
    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.execution.memory import describe_cache, size_cache
    from nanoinfer.execution.parts import make_runner, make_sampler

    if num_blocks is not None:
        info = describe_cache(parts, config, num_blocks)
    else:
        info = size_cache(parts, config, draft=draft, shards=shards)
    if config.scheduler.batch_invariant and not parts.is_batch_independent:
        why = "enforce_eager=True uses torch's products, whose bits do" if config.enforce_eager else "this machine's do"
        raise UnsupportedError(
            f"batch_invariant=True requires rows whose bits do not depend on the batch; {why}, for this model in "
            f"{info.dtype} on {parts.device.type}; leave it out, or use a CPU with a C++ compiler"
        )
    return LocalExecutor(
        make_runner(parts, info),
        make_sampler(parts, info, config),
        info,
        is_batch_independent=parts.is_batch_independent,
        batch_invariant=config.scheduler.batch_invariant,
        tokenizer=tokenizer,
        tracer=tracer,
    )


def _load_draft_model(config: EngineConfig, model: "Model", tokenizer: Tokenizer | None) -> "Model":
    """Load the Model of speculative_config. Refuse one with different ids."""
    from nanoinfer.loading.loader import load

    assert config.speculative is not None
    name = config.speculative.model
    loaded = load(EngineConfig(model=name, dtype=config.dtype, device=config.device, enforce_eager=config.enforce_eager))
    ours, theirs = model.config.vocab_size, loaded.model.config.vocab_size
    way_out = "choose a draft model of the same family"
    if theirs != ours:
        raise InvalidValueError(f"the draft model {name!r} has {theirs} token ids, the model has {ours}; {way_out}")
    if tokenizer and loaded.tokenizer and tokenizer.hf.get_vocab() != loaded.tokenizer.hf.get_vocab():
        raise InvalidValueError(f"the draft model {name!r} has a different tokenizer; {way_out}")
    return loaded.model
