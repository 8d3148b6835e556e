"""Solutions of notebook 04. Exercise 2 prints what this machine does."""

import os
from unittest.mock import patch

import torch
import transformers

from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import on_meta
from nanoinfer_lab.bench import random_models, roofline

FP32 = torch.float32
tiny, _ = on_meta(Checkpoint.open("tiny-qwen3"))

# Exercise 1: from which length on does causal attention take more FLOPs than everything with weights?
config_class, differing, _ = random_models.RANDOM_MODELS["qwen3-0.6b"]
for name, c in (("tiny-qwen3", tiny.config), ("Qwen3-0.6B", getattr(transformers, config_class)(**differing))):
    n, m, d, h = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
    per_layer = h * (n + 2 * m) * d + n * d * h + 3 * h * c.intermediate_size  # weights that meet every token
    # s tokens: 2 s L per_layer + 2 h V (head) against 2 L n d s (s + 1) (causal). Without the head: s = per_layer / (n d) - 1.
    without_head = per_layer / (n * d) - 1
    s = 1
    while c.num_hidden_layers * (2 * n * d * s * (s + 1) - 2 * s * per_layer) <= 2 * h * c.vocab_size:
        s += 1
    print(f"{name}: from s = {s} on; without the head from {without_head:.0f} on")
    if name == "tiny-qwen3":
        for length in (s - 1, s):
            parts = roofline.count(tiny, FP32, num_seqs=1, num_new=length, context=length)
            attention = next(part.num_operations for part in parts if part.name == "attention")
            assert (attention > sum(part.num_operations for part in parts) - attention) == (length == s)

# Exercise 2: the two roofs with one core and with all
for num_threads in (1, os.cpu_count() or 1):
    torch.set_num_threads(num_threads)
    with patch.dict(roofline.GEMM_SIZE, cpu=1024):  # smaller products, to be quick
        machine = roofline.measure_machine(torch.device("cpu"), FP32)
    gb, rate = machine.bandwidth / 1e9, machine.gemm_rates[FP32] / 1e9
    print(f"{num_threads} threads: {gb:.0f} GB/s, {rate:.0f} GFLOP/s, balance {rate / gb:.1f}")
# Cores multiply independently, and share the way to memory. So the flat roof usually rises more than the slope, the balance
# moves to the right, and decode needs a larger batch before it is compute-bound.

# Exercise 3: grouped-query attention on paper
sizes = {"vocab_size": 8192, "n_embd": 512, "n_layer": 6, "n_head": 8}


def parts_with_gqa(num_seqs, context, factor):
    """FLOPs and bytes of a decode step of the notebook's small model, with the cache divided by factor."""
    h, layers = sizes["n_embd"], sizes["n_layer"]
    weights = layers * 12 * h * h + sizes["vocab_size"] * h
    num_operations = num_seqs * (2 * weights + layers * 4 * context * h)
    return num_operations, 4 * weights + num_seqs * 4 * layers * 2 * context * h / factor


for factor in (1, 4):
    curve = [parts_with_gqa(b, 1024, factor) for b in (1, 16, 256, 4096, 2**20)]
    operations, num_bytes = parts_with_gqa(1, 1024, factor)
    ceiling = operations / (
        num_bytes - parts_with_gqa(0, 1024, factor)[1]
    )  # a sequence's FLOPs over the bytes of its own cache
    print(f"cache divided by {factor}:", *(f"{ops / num:.1f}" for ops, num in curve), f"FLOPs per byte, ceiling {ceiling:.1f}")
    assert abs(curve[-1][0] / curve[-1][1] / ceiling - 1) < 0.01
# The ceiling rises by the same factor of 4: the FLOPs stay, and the bytes of the cache are a quarter.
