"""The figures of scaling.md: what a node of 8 H200 and a cluster of 100 nodes can give on paper. `python docs/scaling.py`
writes them into the page.

A step takes at least the sum over its parts of max(bytes / bandwidth, operations / rate), as in
nanoinfer/lab/bench/roofline.py. Split over some ranks, each rank has its share of every part, and two all_reduces a layer are
added.
"""

import re
from pathlib import Path

import torch

from nanoinfer.attention.cache_sizes import CacheSizes
from nanoinfer.config import CacheConfig
from nanoinfer.lab.bench.random_models import RANDOM_MODELS
from nanoinfer.lab.bench.roofline import Machine, Part, count
from nanoinfer.models.qwen import QwenForCausalLM

PAGE = Path(__file__).with_suffix(".md")
MARKED = re.compile(r"(?<=<!-- python docs/scaling.py -->\n).*?(?=<!-- end -->)", re.DOTALL)

DTYPE = torch.bfloat16
H200 = Machine(bandwidth=4.8e12, gemm_rates={DTYPE: 989e12})  # NVIDIA's data sheet, without sparsity
MEMORY = 141e9 * CacheConfig.gpu_memory_utilization  # bytes for weights and cache
NVLINK = 450e9  # bytes per second in one direction, half of the 900 GB/s of both
ALL_REDUCE_LATENCY = (
    10e-6  # seconds, assumed: NCCL takes 6 us for two H100 (NVIDIA/nccl issue 1259), and more ranks take longer
)
NUM_GPUS, NUM_NODES = 8, 100
RANKS = (1, 2, 4, 8)
CONTEXT, LONG_CONTEXT = 4096, 32768

SMALLEST = RANDOM_MODELS["qwen3-0.6b"][1] | {"model_type": "qwen3"}
MODELS = {  # name -> what differs from Qwen3-0.6B. Source: config.json of Qwen/Qwen3-1.7B and so on, on the hub
    "0.6B": {},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
UNTIED = ("8B", "14B", "32B")


def build(name: str) -> QwenForCausalLM:
    """The model on the meta device: shapes without weights."""
    with torch.device("meta"):
        return QwenForCausalLM(
            QwenForCausalLM.Config.from_hf(SMALLEST | MODELS[name] | {"tie_word_embeddings": name not in UNTIED})
        )


def num_parameters(model: QwenForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def cache_bytes(model: QwenForCausalLM) -> int:
    """Bytes of one token's keys and values."""
    return CacheSizes.of(model.config).bytes_per_token(DTYPE)


def num_users(model: QwenForCausalLM, ranks: int, context: int) -> int:
    """How many users of this many tokens fit beside the weights of one replica, which is split over the ranks."""
    return int((ranks * MEMORY - num_parameters(model) * DTYPE.itemsize) // (context * cache_bytes(model)))


def all_reduce_s(num_bytes: int, ranks: int) -> float:
    """Seconds of a ring all_reduce: every rank sends and receives 2 (ranks - 1) / ranks of the bytes."""
    return ALL_REDUCE_LATENCY + 2 * (ranks - 1) / ranks * num_bytes / NVLINK if ranks > 1 else 0.0


def all_reduces_s(model: QwenForCausalLM, num_tokens: int, ranks: int) -> float:
    """Seconds of the two all_reduces of a layer: of [num_tokens, hidden] behind the attention and behind the MLP."""
    return 2 * all_reduce_s(num_tokens * model.config.hidden_size * DTYPE.itemsize, ranks)


def step_s(model: QwenForCausalLM, ranks: int, *, num_seqs: int, num_new: int) -> float:
    """Seconds of a step of sequences of CONTEXT tokens, num_new of each new."""
    parts = count(model, DTYPE, num_seqs=num_seqs, num_new=num_new, context=CONTEXT)
    return least_s(parts) / ranks + model.config.num_hidden_layers * all_reduces_s(model, num_seqs * num_new, ranks)


def all_reduce_share(model: QwenForCausalLM, ranks: int, *, num_seqs: int, num_new: int) -> float:
    """The share of a layer's time in which it waits for all_reduces."""
    parts = count(model, DTYPE, num_seqs=num_seqs, num_new=num_new, context=CONTEXT)
    layers = tuple(part for part in parts if part.name not in ("embedding", "LM head"))
    waiting = all_reduces_s(model, num_seqs * num_new, ranks)
    return waiting / (waiting + least_s(layers) / ranks / model.config.num_hidden_layers)


def least_s(parts: tuple[Part, ...]) -> float:
    return sum(part.seconds(H200.bandwidth, H200.gemm_rates[DTYPE]) for part in parts)


def node_decode(model: QwenForCausalLM, ranks: int) -> float:
    """Tokens per second of a node of replicas split over the ranks, whose memory is full of users."""
    users = num_users(model, ranks, CONTEXT)
    return NUM_GPUS // ranks * users / step_s(model, ranks, num_seqs=users, num_new=1)


def node_prefill(model: QwenForCausalLM) -> float:
    """Prompt tokens per second of a node of one replica per GPU."""
    return NUM_GPUS * CONTEXT / step_s(model, 1, num_seqs=1, num_new=CONTEXT)


def figures() -> str:
    """The tables of the page."""
    models = {name: build(name) for name in MODELS}
    steps = ({"num_seqs": 1, "num_new": 1}, {"num_seqs": 64, "num_new": 1}, {"num_seqs": 1, "num_new": CONTEXT})
    memory, throughput, latency, shares = [], [], [], []
    for name, model in models.items():
        weights, per_token = num_parameters(model) * DTYPE.itemsize, cache_bytes(model)
        sizes = [f"{weights / 1e9:.1f}", f"{per_token / 1e3:.0f}", f"{CONTEXT * per_token / 1e9:.2f}"]
        memory.append([name, *sizes, *(num_users(model, n, context) for context in (CONTEXT, LONG_CONTEXT) for n in (1, 8))])
        decode, prefill = [node_decode(model, ranks) for ranks in RANKS], node_prefill(model)
        millions = (prefill, NUM_NODES * max(decode), NUM_NODES * prefill)
        throughput.append([name, *(f"{rate / 1e3:.1f} k" for rate in decode), *(f"{rate / 1e6:.1f} M" for rate in millions)])
        latency.append([name, *(f"{step_s(model, ranks, **steps[0]) * 1e3:.2f}" for ranks in RANKS)])
        shares.append([name, *(f"{all_reduce_share(model, ranks, **step):.0%}" for step in steps for ranks in (2, 8))])
    ways = [f"decode {NUM_GPUS // ranks} x {ranks}" for ranks in RANKS]
    return f"""
**Memory.** How many users of {CONTEXT:,} and of {LONG_CONTEXT:,} tokens fit beside the weights, on one GPU and on
eight GPUs that hold the weights once:

{table(["Qwen3", "weights, GB", "cache, KB/token", "GB/user", "users, 1", "users, 8", "long, 1", "long, 8"], memory)}

**Tokens per second of a node** whose memory is full of users of {CONTEXT:,} tokens. "4 x 2" is four replicas, each split
over two GPUs. Prefill is of prompts of {CONTEXT:,} tokens, one replica per GPU. The cluster is {NUM_NODES} nodes of the
best arrangement:

{table(["Qwen3", *ways, "prefill", "cluster: decode", "cluster: prefill"], throughput)}

**Milliseconds per token of a single user** with {CONTEXT:,} tokens, by the number of ranks:

{table(["Qwen3", *RANKS], latency)}

**The share of the two all_reduces in a layer's time**, over 2 and over 8 ranks, in a decode step of one user, in one of 64
users, and in a prefill of {CONTEXT:,} tokens:

{table(["Qwen3", "1 user, 2", "1 user, 8", "64, 2", "64, 8", "prefill, 2", "prefill, 8"], shares)}

"""


def table(header: list[object], rows: list[list[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows))


def with_figures(page: str) -> str:
    return MARKED.sub(lambda _: figures(), page)


if __name__ == "__main__":
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
