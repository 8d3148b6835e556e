"""The configs split by owner: ranges, what contradicts itself, and names of classes."""

import pytest

from nanoinfer import AsyncEngineArgs
from nanoinfer.config import EngineArgs, EngineConfig, SchedulerConfig, SpeculativeConfig
from nanoinfer.errors import InvalidTypeError, NanoinferError
from nanoinfer.scheduling.scheduler import Scheduler

CLASS = "must be a class or its name, such as 'my_module.MyClass'"


def config_of(**given):
    return EngineArgs(**given).to_config()


def ngram(**given):
    return {"speculative_config": {"method": "ngram"} | given}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_size": 0}, "block_size must be >= 1, got 0"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be 'auto' or 'int8', got 'fp8'"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be in (0, 1], got 0"),
        ({"seed": -1}, "seed must be in 0 .. 2**64 - 1, got -1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ({"tokenizer": 5}, "tokenizer must be a string or a path, got 5"),
        ({"lora": {"a": 1e9}}, "a strength in lora must be in -1e6 .. 1e6, got 1000000000.0"),
        ({"stages": 5}, "stages must be a list of functions (logits, SamplingBatch) -> logits, got 5"),
        ({"logits_processors": [dict]}, "logits_processors must be a list of classes with apply, is_argmax_invariant, update"),
        ({"logits_processors": [5]}, f"each of logits_processors {CLASS}, got 5"),
        ({"scheduler_cls": "Scheduler"}, f"scheduler_cls {CLASS}, got 'Scheduler' ("),
        ({"scheduler_cls": "math.pi"}, f"scheduler_cls {CLASS}, got 3.14159"),
        ({"scheduler_cls": "nowhere.Mine"}, f"scheduler_cls {CLASS}, got 'nowhere.Mine' (No module named 'nowhere'); the"),
        ({"scheduler_cls": "nanoinfer.scheduling.scheduler.Mine"}, f"scheduler_cls {CLASS}, got 'nanoinfer"),
        # what contradicts itself
        ({"quantization": "int8", "dtype": "float32"}, "quantization='int8' computes in bfloat16, got dtype='float32'; leave"),
        ({"tokenizer": "a", "skip_tokenizer_init": True}, "tokenizer='a' and skip_tokenizer_init=True were given; leave"),
        ({"max_loras": 2}, "max_loras and max_lora_rank need enable_lora=True; pass it, or leave them out"),
        ({"max_lora_rank": 8}, "max_loras and max_lora_rank need enable_lora=True; pass it, or leave them out"),
        (
            {"prefix_cache_dir": "a", "enable_prefix_caching": False},
            "prefix_cache_dir must be a folder, with enable_prefix_caching, got 'a'",
        ),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be 'fcfs', 'priority' or 'deadline', got 'lifo'"),
        ({"scheduling_policy": "priority", "scheduler_cls": Scheduler}, "scheduling_policy='priority' and scheduler_cls=<"),
        # speculative_config
        ({"speculative_config": "ngram"}, "speculative_config must be a dict such as {'method': 'ngram'}, got 'ngram'"),
        ({"speculative_config": {}}, "speculative_config needs a method, 'ngram', 'draft_model', 'mtp', 'quantized', or"),
        (ngram(x=1), "speculative_config has no 'x'; known are method, num_speculative_tokens, adaptive, prompt_lookup_min"),
        (ngram(method="magic"), "speculative_config's method must be 'ngram', 'draft_model', 'mtp', 'quantized', or a class"),
        (ngram(method="a:B"), f"speculative_config's method {CLASS}, got 'a:B' (No module"),
        (ngram(method=dict), "speculative_config's method must be a class with __init__(config), propose(sequences, limits)"),
        (ngram(num_speculative_tokens=65), "num_speculative_tokens must be in 1 .. 64, got 65"),
        (ngram(num_speculative_tokens=0), "num_speculative_tokens must be in 1 .. 64, got 0"),
        (ngram(adaptive=1), "adaptive must be True or False, got 1"),
        (ngram(prompt_lookup_min=0), "prompt_lookup_min must be >= 1, got 0"),
        (ngram(prompt_lookup_max=1), "prompt_lookup_max must be >= prompt_lookup_min (2), got 1"),
        (ngram(method="draft_model"), "speculative_config's model, with method 'draft_model', is None; pass a folder, a hub"),
        (ngram(model="x"), "speculative_config's model, with method 'ngram', is 'x'; leave it out"),
        (ngram() | {"async_scheduling": True}, "speculative_config needs every token before the next step; leave async"),
        (ngram() | {"stages": [print]}, "speculative_config with stages of your own is not supported; leave one of the two"),
        # names
        ({"max_num_seq": 3}, "EngineArgs has no argument 'max_num_seq'; did you mean max_num_seqs?"),
        ({"temperature": 0}, "EngineArgs has no argument 'temperature'; it is an argument of SamplingParams: SamplingParams("),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported; use tensor_parallel_size=N to split the"),
        ({"swap_space": 3}, "swap_space=3 is not supported; leave it out (it acts as 0)"),
    ],
    ids=str,
)
def test_a_value_that_is_wrong_or_contradicts_another_is_refused_with_what_is_allowed(given, message):
    with pytest.raises(NanoinferError) as caught:
        config_of(**given)
    assert str(caught.value).startswith(message)


def test_the_arguments_of_an_async_engine_are_checked_too():
    for given, message in (
        ({"max_num_queued_requests": -1}, "max_num_queued_requests must be >= 0, got -1"),
        ({"streaming": 1}, "streaming must be True or False, got 1"),
        ({"stream": True}, r"AsyncEngineArgs has no argument 'stream'; did you mean streaming\?"),
    ):
        with pytest.raises(NanoinferError, match=message):
            AsyncEngineArgs(**given)


def test_prompts_are_cut_at_multiples_of_a_chunk_that_fits_an_otherwise_empty_step():
    cases = (({}, 1024), ({"chunk_size": 64}, 64), ({"max_num_batched_tokens": 100}, 100))
    for given, grid in (*cases, ({"enable_chunked_prefill": False}, 4096)):
        assert SchedulerConfig(**given).chunk_grid == grid


def test_a_class_may_be_named():
    name = "nanoinfer.scheduling.scheduler.Scheduler"
    for given in (Scheduler, name, name.replace("r.S", "r:S")):
        assert config_of(scheduler_cls=given).scheduler.scheduler_cls is Scheduler
    assert config_of().scheduler.scheduler_cls is None


def test_adapters_to_merge_are_folders_with_strengths():
    assert config_of().lora == ()
    assert config_of(lora="a").lora == (("a", 1.0),)
    assert config_of(lora={"a": 0.5, "b": 2}).lora == (("a", 0.5), ("b", 2.0))
    for wrong in (5, [5], {"a": "b"}):
        with pytest.raises(InvalidTypeError, match="lora"):
            config_of(lora=wrong)


def test_the_arguments_of_llm_become_the_configs_of_their_owners():
    config = config_of(model="tiny-gpt2", max_num_seqs=3, block_size=8, **ngram())
    assert isinstance(config, EngineConfig)
    assert (config.model, config.scheduler.max_num_seqs, config.cache.block_size) == ("tiny-gpt2", 3, 8)
    assert config.speculative == SpeculativeConfig(method="ngram")
    assert config_of(speculative_config=None).speculative is None
