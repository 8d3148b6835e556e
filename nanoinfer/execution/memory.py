"""How many bytes the KV cache may take: what a machine can spare after the weights are loaded, less what a step needs."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.config import EngineConfig
from nanoinfer.errors import InvalidValueError
from nanoinfer.models.registry import Model
from nanoinfer.sampling.routes import Route

# On a CPU the cache takes at most this many bytes and at most half of the free memory, unless kv_cache_memory is set.
DEFAULT_CPU_MEMORY = 4 * 2**30

LOGITS_COPIES = 12  # fp32 copies of [num_rows, vocab] that a sampler with every parameter may hold. int64 weights count twice


def memory_for_cache(
    device: torch.device, kv_cache_memory: int | None, gpu_memory_utilization: float, *, step_bytes: int = 0
) -> int:
    """The number of bytes for the cache: kv_cache_memory, or else what the machine can spare. Call it after loading weights.

    Raises: InvalidValueError, if kv_cache_memory is more than is free.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        spare = int(total * gpu_memory_utilization) - (total - free) - step_bytes
        way_out = "lower kv_cache_memory, or leave it out"
    else:
        free = available_cpu_memory()
        spare = min(DEFAULT_CPU_MEMORY, free // 2)
        way_out = "lower kv_cache_memory, or leave it out to take at most half of what is free"
    if kv_cache_memory is None:
        return max(spare, 0)
    if kv_cache_memory > free:
        raise InvalidValueError(f"kv_cache_memory is {kv_cache_memory} bytes, but {free} are free on {device}; {way_out}")
    return kv_cache_memory


def available_cpu_memory() -> int:
    """Bytes that can be allocated without swapping, within the limit of the container, if there is one (cgroup v2)."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: half of the machine's memory, or 8 GiB if that is unknown
        has_sysconf = hasattr(os, "sysconf")
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if has_sysconf else 2 * DEFAULT_CPU_MEMORY
    try:
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        file_cache = int(stat["inactive_file"]) + int(stat["active_file"])  # counted as used, but reclaimed on demand
        available = min(available, limit - used + file_cache)
    except (OSError, ValueError, KeyError):  # no container, or "max": no limit
        pass
    return max(available, 0)


@torch.inference_mode()
def peak_step_bytes(model: Model, config: EngineConfig, device: torch.device, routes: Sequence[Route]) -> int:
    """The bytes that the largest step takes on a GPU, besides weights and cache. Measured with a step without attention.

    The sampler is counted as LOGITS_COPIES copies of the logits, and what its routes reserve.
    """
    num_rows = config.max_num_rows

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.contiguous()

    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(config.scheduler.max_num_batched_tokens + num_rows, dtype=torch.int64, device=device)
    hidden = model(ids, ids, attend)
    logits = model.compute_logits(hidden[:num_rows]).float()
    sampler = LOGITS_COPIES * logits.nbytes + sum(route.reserved_bytes(logits.nbytes) for route in routes)
    needed = torch.cuda.max_memory_allocated(device) - before + sampler
    del hidden, logits
    torch.cuda.empty_cache()
    return needed
