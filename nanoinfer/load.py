"""Make an LLMEngine from an EngineConfig: load the checkpoint with its draft model and its ranks, then call build.py."""

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

from nanoinfer.build import make_engine
from nanoinfer.config import EngineConfig
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import OutOfMemoryError, first_line, is_out_of_memory
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.scheduling.policies import scheduling_classes

if TYPE_CHECKING:
    from nanoinfer.features.distributed.runner import LeadingShards

_IMPORTED_BY = os.getpid()  # another process is a fork


def load_engine(config: EngineConfig) -> tuple[LLMEngine, Checkpoint]:
    """Load a checkpoint and make its engine. Returns the checkpoint too, for its generation_config. Raises: as LLM() does."""
    try:
        return _load_engine(config)
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"memory ran out while the model was loaded ({first_line(error)}); use quantization='int4', a smaller model or a "
            "lower kv_cache_memory, or raise the limit of this process (ulimit -v)"
        ) from error


def _load_engine(config: EngineConfig) -> tuple[LLMEngine, Checkpoint]:
    from nanoinfer.loading.loader import load
    from nanoinfer.system.process import prepare_threads

    prepare_threads(is_forked=os.getpid() != _IMPORTED_BY)
    scheduling_classes(config)  # raises for wrong classes before the model is loaded
    shards: LeadingShards | None = None
    if config.tensor_parallel_size > 1:
        from nanoinfer.features.distributed.launch import start

        config, shards = start(config)  # under torchrun, ranks above 0 serve rank 0 inside this call, and exit
    with nullcontext() if shards is None else shards.workers.watched():
        loaded, draft_model = load(config, shards), None
        if config.speculative is not None:
            from nanoinfer.features.drafts.build import load_draft

            draft_model = load_draft(config.speculative, config, loaded)
        engine = make_engine(
            loaded.model,
            config,
            weights=loaded.weights,
            draft_model=draft_model,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            shards=shards,
        )
    engine.observer.engine_loaded(engine, loaded.num_parameters)
    engine.observer.flush()
    return engine, loaded.checkpoint
