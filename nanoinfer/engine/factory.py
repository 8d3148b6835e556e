"""EngineConfig -> LLMEngine, with its checkpoint loaded and its executor made.

torch is imported when an engine is made, inside these functions, so that the rest of this folder runs without it.
"""

import os
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.models.checkpoint import DEFAULT_MODEL, Checkpoint
from nanoinfer.tokenization.tokenizer import Tokenizer
from nanoinfer.tracing import EngineStarted, EventBuffer


def load_engine(config: EngineConfig) -> tuple[LLMEngine, Checkpoint]:
    """Load a checkpoint and make its engine. Returns the checkpoint too, for its generation_config.

    Raises: CheckpointNotFoundError, CheckpointError, WeightsError, UnsupportedError, InvalidValueError.
    """
    from nanoinfer.models.loader import load

    loaded = load(config)
    engine = make_engine(
        loaded.model,
        config,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        has_independent_rows=loaded.has_independent_rows,
    )
    if engine.tracer is not None:
        model, info = config.model or DEFAULT_MODEL, engine.executor.info
        engine.tracer.emit(
            EngineStarted(
                model=os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model,
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
) -> LLMEngine:
    """Make the engine of a models.registry.Model on its device. The arguments are those of UniProcExecutor and LLMEngine."""
    from nanoinfer.execution.uniproc_executor import UniProcExecutor

    tracer = None if config.tracer is None else EventBuffer(config.tracer)
    executor = UniProcExecutor(model, config, tokenizer=tokenizer, tracer=tracer, has_independent_rows=has_independent_rows)
    return LLMEngine(executor, config, tokenizer=tokenizer, eos_token_ids=eos_token_ids, tracer=tracer)
