"""The configs split by owner: ranges, what contradicts itself, and names of classes."""

import pytest

from nanoinfer.config import (
    CacheConfig,
    EngineArgs,
    EngineConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from nanoinfer.errors import InvalidTypeError, InvalidValueError, NanoinferError
from nanoinfer.scheduling.scheduler import Scheduler


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (CacheConfig, {"block_size": 0}, "block_size must be >= 1, got 0"),
        (CacheConfig, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be 'auto' or 'int8', got 'fp8'"),
        (CacheConfig, {"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        (CacheConfig, {"prefix_cache_dir": "a", "enable_prefix_caching": False}, "with enable_prefix_caching, got 'a'"),
        (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        (SchedulerConfig, {"scheduling_policy": "lifo"}, "must be 'fcfs', 'priority' or 'deadline', got 'lifo'"),
        (SchedulerConfig, {"scheduling_policy": "priority", "scheduler_cls": Scheduler}, "were given; leave one out"),
        (
            SpeculativeConfig,
            {"method": "magic"},
            "method must be 'ngram', 'draft_model', 'mtp', 'quantized', or a class .*, got 'magic'",
        ),
        (SpeculativeConfig, {"method": "ngram", "num_speculative_tokens": 65}, r"must be in 1 \.\. 64, got 65"),
        (SpeculativeConfig, {"method": "ngram", "prompt_lookup_max": 1}, r"must be >= prompt_lookup_min \(2\), got 1"),
        (SpeculativeConfig, {"method": "draft_model"}, "is None; pass a folder"),
        (SpeculativeConfig, {"method": "ngram", "model": "a"}, "is 'a'; leave it out"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_with_what_is_allowed(config, given, message):
    with pytest.raises(InvalidValueError, match=message):
        config(**given)


@pytest.mark.parametrize(
    ("given", "grid"),
    [
        ({}, 1024),
        ({"chunk_size": 64}, 64),
        ({"max_num_batched_tokens": 100}, 100),  # a chunk fits an otherwise empty step
        ({"enable_chunked_prefill": False}, 4096),
    ],
    ids=str,
)
def test_prompts_are_cut_at_multiples_of(given, grid):
    assert SchedulerConfig(**given).chunk_grid == grid


def test_speculative_config_is_a_dict_with_known_names():
    assert config_of(speculative_config=None).speculative is None
    assert SpeculativeConfig.of({"method": "ngram"}) == SpeculativeConfig(method="ngram")
    for given, error in (("ngram", InvalidTypeError), ({}, InvalidValueError), ({"method": "ngram", "k": 1}, InvalidTypeError)):
        with pytest.raises(error, match="speculative_config"):
            SpeculativeConfig.of(given)


def config_of(**given):
    return EngineArgs(**given).to_config()


def test_a_class_may_be_named():
    name = "nanoinfer.scheduling.scheduler.Scheduler"
    for given in (Scheduler, name, name.replace("r.S", "r:S")):
        assert config_of(scheduler_cls=given).scheduler.scheduler_cls is Scheduler
    assert config_of().scheduler.scheduler_cls is None
    for wrong in ("Scheduler", "nowhere.Mine", "nanoinfer.scheduling.scheduler.Mine", 5):
        with pytest.raises(NanoinferError, match="scheduler_cls must be a class or its name"):
            config_of(scheduler_cls=wrong)


def test_adapters_to_merge_are_folders_with_strengths():
    assert config_of().lora == ()
    assert config_of(lora="a").lora == (("a", 1.0),)
    assert config_of(lora={"a": 0.5, "b": 2}).lora == (("a", 0.5), ("b", 2.0))
    for wrong in (5, [5], {"a": "b"}):
        with pytest.raises(InvalidTypeError, match="lora"):
            config_of(lora=wrong)


def test_the_arguments_of_llm_become_the_configs_of_their_owners():
    config = config_of(model="tiny-gpt2", max_num_seqs=3, block_size=8, speculative_config={"method": "ngram"})
    assert isinstance(config, EngineConfig)
    assert (config.model, config.scheduler.max_num_seqs, config.cache.block_size) == ("tiny-gpt2", 3, 8)
    assert config.speculative == SpeculativeConfig(method="ngram")
