"""How many blocks a cache gets, and the longest sequence that they hold, by hand."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanoinfer.attention.cache_sizes import DEFAULT_CPU_MEMORY
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoinfer.errors import InvalidValueError
from nanoinfer.execution import memory
from nanoinfer.execution.memory import describe_graphs, memory_for_cache, size_cache
from nanoinfer.execution.runtime import Runtime, plain_runtime
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.system.process import mapped_file_bytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(qwen3_path):
    return load_model(Checkpoint.open(str(qwen3_path)))


def sized(model, kv_cache_memory, *, max_num_seqs=256, **given):
    cache = CacheConfig(block_size=8, kv_cache_memory=kv_cache_memory)
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs)
    config = EngineConfig(attention_backend="reference", cache=cache, scheduler=scheduler, **given)
    runtime = plain_runtime(model, config)
    return size_cache(runtime, config), runtime.bytes_per_block


def test_the_cache_has_the_blocks_that_fit_and_a_sequence_all_of_them(model):
    _, block_bytes = sized(model, 2**20)
    info, _ = sized(model, 3 * block_bytes + block_bytes // 2)
    assert (info.num_blocks, info.num_cache_bytes, info.max_model_len) == (3, 3 * block_bytes, 24)


def test_no_more_blocks_than_the_running_sequences_can_fill(model):
    info, _ = sized(model, 2**28, max_num_seqs=2, max_model_len=20)
    assert (info.num_blocks, info.max_model_len) == (2 * 3, 20)


def test_a_length_beyond_the_models_and_a_cache_without_a_block_are_refused(model):
    limit = model.config.max_position_embeddings
    with pytest.raises(InvalidValueError, match=f"max_model_len must be <= {limit}, the positions this model knows"):
        sized(model, 2**20, max_model_len=limit + 1)
    with pytest.raises(InvalidValueError, match="less than one block of 8 tokens"):
        sized(model, 100)


def test_a_length_that_the_cache_does_not_hold_is_shortened_with_a_warning(model, caplog):
    _, block_bytes = sized(model, 2**20)
    info, _ = sized(model, 2 * block_bytes, max_model_len=30)
    assert info.max_model_len == 16
    assert "max_model_len is 16, not 30: the KV cache holds no more; raise kv_cache_memory" in caplog.text


@pytest.mark.parametrize(
    ("free", "reserved_bytes", "num_ranks", "expected"),
    [
        (2**20, 0, 1, 2**19),
        (2**20, 2**19, 1, 2**18),
        (2**40, 0, 1, DEFAULT_CPU_MEMORY),
        (100, 200, 1, 0),
        (2**20, 2**18, 2, 2**17),  # each rank has adapters, and half of the rest of its half
        (2**40, 0, 2, DEFAULT_CPU_MEMORY // 2),
    ],
)
def test_a_cpu_gives_half_of_what_is_free_and_at_most_4_gib(monkeypatch, free, reserved_bytes, num_ranks, expected):
    monkeypatch.setattr(memory, "available_cpu_memory", lambda: free)
    monkeypatch.setattr(memory, "mapped_file_bytes", lambda: 0)
    assert memory_for_cache(CPU, None, 0.9, reserved_bytes=reserved_bytes, num_ranks=num_ranks) == expected


def test_files_that_are_mapped_keep_their_memory(monkeypatch):
    monkeypatch.setattr(memory, "available_cpu_memory", lambda: 2**20)
    monkeypatch.setattr(memory, "mapped_file_bytes", lambda: 2**19)
    assert memory_for_cache(CPU, None, 0.9) == 2**18
    assert memory_for_cache(CPU, None, 0.9, num_ranks=2) == 0
    assert memory_for_cache(CPU, 2**19, 0.9) == 2**19  # the argument
    with pytest.raises(InvalidValueError, match="kv_cache_memory is 524289 bytes, but 524288 are free on cpu; lower"):
        memory_for_cache(CPU, 2**19 + 1, 0.9)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_the_pages_of_a_mapped_file_are_counted_whatever_the_processs_name_is(tmp_path, request):
    """Ray names its actors "ray::ServeReplica:..."."""
    comm = Path("/proc/self/comm")
    request.addfinalizer(partial(comm.write_text, comm.read_text()))
    comm.write_text("ray::a:b")
    (tmp_path / "file").write_bytes(bytes(2**24))
    before = mapped_file_bytes()
    mapped = torch.from_file(str(tmp_path / "file"), shared=False, size=2**24, dtype=torch.uint8)
    mapped.sum()
    assert mapped_file_bytes() - before == pytest.approx(2**24, rel=0.1)


def test_a_gpus_cache_leaves_room_for_other_allocations_and_for_a_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))  # free, total
    cuda = torch.device("cuda")
    assert memory_for_cache(cuda, None, 0.9) == 500  # 900 in all, less the 400 that are taken
    assert memory_for_cache(cuda, None, 0.9, step_bytes=120) == 380
    assert memory_for_cache(cuda, None, 0.9, step_bytes=800) == 0
    assert memory_for_cache(cuda, 600, 0.9, step_bytes=120) == 600  # the argument
    with pytest.raises(InvalidValueError, match="601 bytes, but 600 are free on cuda; lower kv_cache_memory"):
        memory_for_cache(cuda, 601, 0.9)
    assert memory_for_cache(cuda, None, 0.9, step_bytes=120, reserved_bytes=80) == 300
    with pytest.raises(InvalidValueError, match="600 bytes, but 599 are free on cuda"):
        memory_for_cache(cuda, 600, 0.9, reserved_bytes=1)


class GPU:
    """A device of 10,000,000 free bytes that says that a step takes 1000 bytes for each token."""

    def __init__(self, monkeypatch, model):
        self.peak, self.free = 0, 10_000_000
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        monkeypatch.setattr(Runtime, "device", SimpleNamespace(type="cuda"))
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
        model.register_forward_pre_hook(lambda model, inputs: setattr(self, "peak", 1000 * len(inputs[0])))

    def reset_peak_memory_stats(self, device):
        self.peak = 0

    def memory_allocated(self, device):
        return 0

    def max_memory_allocated(self, device):
        return self.peak

    def mem_get_info(self, device):
        return self.free, self.free

    def empty_cache(self):
        pass


def on_a_gpu(monkeypatch, model, **cache):
    """A model, a runtime that captures steps of up to 32 decodes and 64 prompt tokens, and its config."""
    gpu = GPU(monkeypatch, model)
    config = EngineConfig(
        cache=CacheConfig(block_size=8, gpu_memory_utilization=1.0, **cache),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=64), max_model_len=50,
    )  # fmt: skip
    runtime = plain_runtime(model, EngineConfig(attention_backend="reference", cache=CacheConfig(block_size=8)))
    return gpu, replace(runtime, num_graph_rows=32, prompt_graph_sizes=(16, 64)), config


def test_the_memory_of_graphs_is_that_of_the_largest_step_with_its_inputs_its_hidden_rows_and_the_padding_block(
    model, monkeypatch
):
    _, runtime, config = on_a_gpu(monkeypatch, model)
    hidden_bytes = 4 * model.config.hidden_size
    for num_tokens, num_seqs in ((0, 32), (64, 32 + 16)):
        rows = num_tokens + 32
        expected = 1000 * rows + hidden_bytes * rows + num_seqs * 7 * 4 + 8 * (3 * rows + num_seqs) + runtime.bytes_per_block
        assert memory.peak_graph_bytes(runtime, config, num_tokens) == expected
    assert memory.peak_graph_bytes(replace(runtime, num_graph_rows=0), config, 64) == 0


def test_the_cache_gets_what_a_step_and_its_graphs_leave(model, monkeypatch):
    gpu, runtime, config = on_a_gpu(monkeypatch, model)
    taken = memory.peak_step_bytes(runtime, config) + memory.peak_graph_bytes(runtime, config, 64)
    gpu.free = taken + 9 * memory.peak_graph_bytes(runtime, config, 64)
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=5000))
    monkeypatch.setattr(memory, "peak_step_bytes", lambda runtime, config: taken - memory.peak_graph_bytes(runtime, config, 64))
    info = size_cache(runtime, config)
    assert info.num_graph_bytes == memory.peak_graph_bytes(runtime, config, 64)
    assert info.num_cache_bytes == (gpu.free - taken) // runtime.bytes_per_block * runtime.bytes_per_block


@pytest.mark.parametrize(("num_times", "num_graph_tokens"), [(9, 64), (6, 16), (2, 0)])
def test_graphs_of_many_prompt_tokens_are_left_out_where_they_would_take_much_of_the_cache(
    num_times, num_graph_tokens, model, monkeypatch
):
    gpu, runtime, config = on_a_gpu(monkeypatch, model)
    largest = memory.peak_graph_bytes(runtime, config, 64)
    gpu.free = memory.peak_step_bytes(runtime, config) + largest + num_times * largest
    info = size_cache(runtime, config)
    assert info.num_graph_tokens == num_graph_tokens
    assert info.num_graph_bytes == memory.peak_graph_bytes(runtime, config, num_graph_tokens)
    said = f"steps of up to 32 decodes and {num_graph_tokens} prompt tokens" + ": the memory is too small for 64" * (
        num_times < 9
    )
    assert describe_graphs(runtime, num_graph_tokens) == said


def test_what_steps_of_others_take_is_kept_free_as_well(model, monkeypatch):
    _, runtime, config = on_a_gpu(monkeypatch, model)
    kept, last = [], []
    monkeypatch.setattr(memory, "memory_for_cache", lambda *_, step_bytes, **__: kept.append(step_bytes) or 2**30)
    for num_bytes in (0, 1000):
        size_cache(replace(runtime, kept_step_bytes=num_bytes), config)
        last.append(kept[-1])
    assert last[1] - last[0] == 1000


def test_a_cache_of_a_given_size_leaves_room_for_the_graphs_or_they_are_fewer(model, monkeypatch):
    gpu, runtime, config = on_a_gpu(monkeypatch, model, kv_cache_memory=100_000)
    most = memory.peak_step_bytes(runtime, config) + memory.peak_graph_bytes(runtime, config, 64) + 100_000
    for gpu.free, expected in ((most, 64), (most - 1, 16)):
        assert size_cache(runtime, config).num_graph_tokens == expected
