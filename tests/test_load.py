"""From a config to an engine: what is refused before the model is loaded, and what a tracer hears first."""

import pytest
import torch

from nanoinfer.config import CacheConfig, EngineConfig
from nanoinfer.errors import OutOfMemoryError
from nanoinfer.features.tracing import EngineStarted, Recorder
from nanoinfer.load import load_engine
from nanoinfer.loading import loader

CACHE = CacheConfig(kv_cache_memory=2**22)


def test_the_engine_has_the_checkpoints_model_its_end_ids_and_its_tokenizer():
    engine, checkpoint = load_engine(EngineConfig(model="tiny-gpt2", enforce_eager=True, cache=CACHE))
    assert checkpoint.path.name == "tiny-gpt2"
    assert engine.executor.info.vocab_size == checkpoint.config["vocab_size"]
    assert engine.eos_token_ids == checkpoint.eos_token_ids
    assert engine.inputs.tokenizer.decode(engine.inputs.tokenizer.encode("Once")) == "Once"


def test_memory_that_runs_out_while_a_model_is_loaded_is_an_error_in_one_sentence(monkeypatch):
    config = EngineConfig(model="tiny-gpt2", cache=CACHE)
    monkeypatch.setattr(loader, "load", lambda *_: torch.empty(2**60))
    with pytest.raises(OutOfMemoryError, match=r"memory ran out while the model was loaded \(.*\); use quantization='int4'"):
        load_engine(config)
    monkeypatch.setattr(loader, "load", lambda *_: torch.empty(2) @ torch.empty(3))
    with pytest.raises(RuntimeError, match="size"):
        load_engine(config)


def test_the_first_event_describes_the_engine():
    recorder = Recorder()
    engine, checkpoint = load_engine(EngineConfig(model="tiny-gpt2", enforce_eager=True, cache=CACHE, tracer=recorder))
    [event] = recorder.events
    assert isinstance(event, EngineStarted)
    info = engine.executor.info
    assert (event.model, event.num_blocks, event.block_size) == ("tiny-gpt2", info.num_blocks, info.block_size)
    assert (event.dtype, event.device, event.attention_backend) == (info.dtype, info.device, info.attention_backend)
    assert 10_000 < event.num_parameters < checkpoint.path.joinpath("model.safetensors").stat().st_size
