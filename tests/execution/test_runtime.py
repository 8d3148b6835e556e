"""The textbook's parts: a backend for the model, a cache of its sizes, and the stages as they are listed."""

import pytest
import torch

from nanoinfer.build import make_runtime
from nanoinfer.config import CacheConfig, EngineConfig
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.memory import size_cache
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.execution.runtime import make_runner, make_sampler, plain_runtime
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.sampling.sampler import STAGES


@pytest.fixture(scope="module")
def model(qwen3_path):
    return load_model(Checkpoint.open(str(qwen3_path)))


def config_of(backend="reference", **cache):
    sizes = CacheConfig(**{"kv_cache_memory": 2**20, "block_size": 8} | cache)
    return EngineConfig(attention_backend=backend, enforce_eager=True, cache=sizes)


def test_the_model_runs_as_its_file_says_and_nothing_is_promised(model):
    runtime = plain_runtime(model, config_of())
    assert runtime.model is model
    assert (runtime.backend_name, runtime.block_size, runtime.cache_dtype) == ("reference", 8, torch.float32)
    assert (runtime.routes, runtime.wrappers, runtime.report, runtime.is_batch_independent) == ((), (), None, False)
    assert plain_runtime(model, config_of(block_size=None)).block_size == runtime.backend.default_block_size


def test_a_block_takes_the_bytes_that_its_cache_takes(model):
    for runtime in (plain_runtime(model, config_of()), make_runtime(model, config_of(kv_cache_dtype="int8"))):
        cache = runtime.make_cache(num_blocks=3)
        assert sum(pages.nbytes for pages in cache.tensors()) == 3 * runtime.bytes_per_block
        assert cache.layout == runtime.backend.layout


def test_a_backend_without_8_bits_is_refused(model, monkeypatch):
    monkeypatch.setattr("nanoinfer.attention.reference.ReferenceBackend.supports_int8_cache", False)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='int8' needs the attention backend cpu, triton or ref"):
        make_runtime(model, config_of(kv_cache_dtype="int8"))


def test_the_runner_is_wrapped_from_the_inside_out_and_the_sampler_has_the_users_stages(model):
    from dataclasses import replace

    config = config_of()
    order = []
    wrappers = tuple(lambda runner, name=name: order.append(name) or runner for name in ("inner", "outer"))
    runtime = replace(plain_runtime(model, config), wrappers=wrappers)
    info = size_cache(runtime, config)
    assert isinstance(make_runner(runtime, info), ModelRunner)
    assert order == ["inner", "outer"]
    mine = (*STAGES, lambda logits, batch: logits)
    assert not make_sampler(runtime, config).has_user_stages
    assert make_sampler(runtime, replace(config, stages=mine)).has_user_stages
