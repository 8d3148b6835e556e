"""EngineConfig -> LLMEngine, with its checkpoint loaded and its executor made.

torch is imported when an engine is made, inside these functions, so that the rest of this folder runs without it.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import InvalidValueError
from nanoinfer.execution.executor import Executor
from nanoinfer.models.checkpoint import DEFAULT_MODEL, Checkpoint
from nanoinfer.speculative.draft_model import DraftModelProposer
from nanoinfer.speculative.ngram import NGramProposer
from nanoinfer.speculative.speculator import Proposer
from nanoinfer.tokenization.tokenizer import Tokenizer
from nanoinfer.tracing import EngineStarted, EventBuffer


def load_engine(config: EngineConfig) -> tuple[LLMEngine, Checkpoint]:
    """Load a checkpoint and make its engine. Returns the checkpoint too, for its generation_config.

    Raises: CheckpointNotFoundError, CheckpointError, WeightsError, UnsupportedError, InvalidValueError.
    """
    from nanoinfer.models.loader import load

    ranks: Any = None
    if config.tensor_parallel_size > 1:
        from nanoinfer.distributed.launch import start

        ranks = start(config)  # under torchrun, ranks above 0 work for rank 0 in here, and exit
        config = ranks.config
    with nullcontext() if ranks is None else ranks.watched():
        loaded = load(config, None if ranks is None else ranks.communicator)
        engine = make_engine(
            loaded.model,
            config,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            has_independent_rows=loaded.has_independent_rows,
            ranks=ranks,
        )
    if engine.tracer is not None:
        model, info = config.model or DEFAULT_MODEL, engine.executor.info
        engine.tracer.emit(
            EngineStarted(
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
    model: Any,
    config: EngineConfig,
    *,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    has_independent_rows: bool = False,
    ranks: Any = None,
) -> LLMEngine:
    """Make the engine of a models.registry.Model on its device. The arguments are those of UniProcExecutor and LLMEngine.

    ranks: distributed.launch.Ranks, if several share the model.

    Raises: CheckpointNotFoundError, CheckpointError, WeightsError, UnsupportedError, InvalidValueError, for a draft model.
    """
    from nanoinfer.execution.uniproc_executor import UniProcExecutor

    speculative = config.speculative
    draft_model = None if speculative is None or speculative.model is None else _load_draft_model(config, model, tokenizer)
    tracer = None if config.tracer is None else EventBuffer(config.tracer)
    executor = UniProcExecutor(
        model,
        config,
        tokenizer=tokenizer,
        tracer=tracer,
        has_independent_rows=has_independent_rows,
        draft_model=draft_model,
        communicator=None if ranks is None else ranks.communicator,
    )
    if ranks is not None:
        executor.runner = ranks.lead(executor.runner)
    proposer: Proposer | None = None
    if draft_model is not None:
        proposer = DraftModelProposer(_draft_executor(draft_model, config, executor), config.scheduler)
    elif speculative is not None:
        proposer = NGramProposer(speculative)
    return LLMEngine(executor, config, tokenizer=tokenizer, eos_token_ids=eos_token_ids, proposer=proposer, tracer=tracer)


def _load_draft_model(config: EngineConfig, model: Any, tokenizer: Tokenizer | None) -> Any:
    """Load the Model of speculative_config. Refuse one with different ids."""
    from nanoinfer.models.loader import load

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


def _draft_executor(draft_model: Any, config: EngineConfig, executor: Executor) -> Executor:
    """The executor of a draft model. Its cache has as many blocks as the model's own."""
    from nanoinfer.execution.uniproc_executor import UniProcExecutor

    draft_config = EngineConfig(
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        cache=replace(config.cache, block_size=executor.info.block_size),
        scheduler=replace(config.scheduler, batch_invariant=False),
    )
    return UniProcExecutor(draft_model, draft_config, num_blocks=executor.info.num_blocks)
