"""The textbook's parts: a backend for the model, a cache of its sizes, and the stages as they are listed."""

import pytest
import torch

from nanoinfer.config import CacheConfig, EngineConfig
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.memory import size_cache
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.execution.parts import make_runner, make_sampler, plain_parts
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.sampling.sampler import STAGES


@pytest.fixture(scope="module")
def model(qwen3_path):
    return load_model(Checkpoint.open(str(qwen3_path)))


def config_of(backend="reference", **cache):
    return EngineConfig(attention_backend=backend, cache=CacheConfig(**{"kv_cache_memory": 2**20, "block_size": 8} | cache))


def test_the_model_runs_as_its_file_says_and_nothing_is_promised(model):
    parts = plain_parts(model, config_of())
    assert parts.model is model
    assert (parts.backend_name, parts.block_size, parts.cache_dtype) == ("reference", 8, torch.float32)
    assert (parts.routes, parts.wrappers, parts.report, parts.is_batch_independent) == ((), (), None, False)
    assert plain_parts(model, config_of(block_size=None)).block_size == parts.backend.default_block_size


def test_a_block_takes_the_bytes_that_its_cache_takes(model):
    for parts in (plain_parts(model, config_of()), plain_parts(model, config_of(kv_cache_dtype="int8"))):
        cache = parts.make_cache(num_blocks=3, num_state_slots=0)
        assert sum(pages.nbytes for pages in cache.tensors()) == 3 * parts.bytes_per_block
        assert cache.layout == parts.backend.layout


def test_a_backend_without_8_bits_is_refused(model, monkeypatch):
    monkeypatch.setattr("nanoinfer.attention.reference.ReferenceBackend.supports_int8_cache", False)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='int8' needs the attention backend cpu or reference"):
        plain_parts(model, config_of(kv_cache_dtype="int8"))


def test_the_runner_is_wrapped_from_the_inside_out_and_the_sampler_has_the_users_stages(model):
    from dataclasses import replace

    config = config_of()
    order = []
    wrappers = tuple(lambda runner, name=name: order.append(name) or runner for name in ("inner", "outer"))
    parts = replace(plain_parts(model, config), wrappers=wrappers)
    info = size_cache(parts, config)
    assert isinstance(make_runner(parts, info), ModelRunner)
    assert order == ["inner", "outer"]
    mine = (*STAGES, lambda logits, batch: logits)
    assert not make_sampler(parts, info, config).has_user_stages
    assert make_sampler(parts, info, replace(config, stages=mine)).has_user_stages
