"""The figures of scaling.md: what a node of 8 H200 can give on paper. `python docs/scaling.py`
writes them into the page.

The sizes, the steps and the all_reduces are those of `nanoinfer simulate` (nanoinfer_lab/simulate/costs.py), without what is
measured besides.
"""

import re
from functools import cache
from pathlib import Path

from nanoinfer.config import CacheConfig
from nanoinfer_lab.bench.random_models import RANDOM_MODELS
from nanoinfer_lab.simulate.costs import FORMATS, ModelSizes, StepCosts, work_of
from nanoinfer_lab.simulate.hardware import HARDWARE

PAGE = Path(__file__).with_suffix(".md")
MARKED = re.compile(r"(?<=<!-- python docs/scaling.py -->\n).*?(?=<!-- end -->)", re.DOTALL)

DTYPE, H200 = FORMATS["bfloat16"], HARDWARE["H200"]
MEMORY = H200.memory_bytes * CacheConfig.gpu_memory_utilization  # bytes for weights and cache
NUM_GPUS = 8
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
SHOWN = ("0.6B", "8B", "14B", "32B")  # on the page


@cache
def costs_of(name: str, ranks: int) -> StepCosts:
    """The costs of a model that is split over some ranks."""
    sizes = ModelSizes.of(SMALLEST | MODELS[name] | {"tie_word_embeddings": name not in UNTIED})
    return StepCosts(sizes=sizes, hardware=H200, dtype=DTYPE, num_ranks=ranks)


def num_users(sizes: ModelSizes, ranks: int, context: int) -> int:
    """How many users of this many tokens fit beside the weights of one replica, which is split over the ranks."""
    left = ranks * MEMORY - sizes.num_weight_bytes(DTYPE)
    return int(left // (context * sizes.cache.bytes_per_token(DTYPE)))


def step_s(name: str, ranks: int, *, num_seqs: int, num_new: int) -> float:
    """Seconds of a step of sequences of CONTEXT tokens, num_new of each new."""
    costs = costs_of(name, ranks)
    return costs.device_s(work_of(costs.sizes, [(num_new, CONTEXT)] * num_seqs))


def all_reduce_share(name: str, ranks: int, *, num_seqs: int, num_new: int) -> float:
    """The share of a step's time in which it waits for all_reduces."""
    return costs_of(name, ranks).communication_s(num_seqs * num_new) / step_s(name, ranks, num_seqs=num_seqs, num_new=num_new)


def node_decode(name: str, ranks: int) -> float:
    """Tokens per second of a node of replicas split over the ranks, whose memory is full of users."""
    users = num_users(costs_of(name, ranks).sizes, ranks, CONTEXT)
    return NUM_GPUS // ranks * users / step_s(name, ranks, num_seqs=users, num_new=1)


def node_prefill(name: str) -> float:
    """Prompt tokens per second of a node of one replica per GPU."""
    return NUM_GPUS * CONTEXT / step_s(name, 1, num_seqs=1, num_new=CONTEXT)


def figures() -> str:
    """The tables of the page."""
    user, prompt = {"num_seqs": 1, "num_new": 1}, {"num_seqs": 1, "num_new": CONTEXT}
    memory, throughput, latency = [], [], []
    for name in SHOWN:
        sizes_of = costs_of(name, 1).sizes
        weights, per_token = sizes_of.num_weight_bytes(DTYPE), sizes_of.cache.bytes_per_token(DTYPE)
        sizes = [f"{weights / 1e9:.1f}", f"{per_token / 1e3:.0f}"]
        memory.append([name, *sizes, *(num_users(sizes_of, n, context) for context in (CONTEXT, LONG_CONTEXT) for n in (1, 8))])
        decode = [f"{node_decode(name, ranks) / 1e3:.1f} k" for ranks in RANKS]
        throughput.append([name, *decode, f"{node_prefill(name) / 1e6:.1f} M"])
        times = [f"{step_s(name, ranks, **user) * 1e3:.2f}" for ranks in RANKS]
        shares = [f"{all_reduce_share(name, ranks, **step):.0%}" for step in (user, prompt) for ranks in (2, 8)]
        latency.append([name, *times, *shares])
    return f"""
**Users** of {CONTEXT:,} and of {LONG_CONTEXT:,} tokens that fit beside the weights, on one GPU and on eight that
share one copy:

{table(["Qwen3", "weights, GB", "cache, KB/token", "users, 1", "users, 8", "long, 1", "long, 8"], memory)}

**Tokens per second of a node** whose memory is full of users of {CONTEXT:,} tokens. "4 x 2" is four replicas, each split over
two GPUs. Prefill is of prompts of {CONTEXT:,} tokens, one replica per GPU.

{table(["Qwen3", *(f"{NUM_GPUS // ranks} x {ranks}" for ranks in RANKS), "prefill"], throughput)}

**Milliseconds per token of one user** with {CONTEXT:,} tokens, by the number of ranks, and the share of the all_reduces in the
time of this step and of a prefill of {CONTEXT:,} tokens:

{table(["Qwen3", *map(str, RANKS), "share, 2", "share, 8", "prefill, 2", "prefill, 8"], latency)}

"""


def table(header: list[object], rows: list[list[object]]) -> str:
    lines = [f"| {' | '.join(map(str, row))} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def with_figures(page: str) -> str:
    return MARKED.sub(lambda _: figures(), page)


if __name__ == "__main__":
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
