"""Rows for tests of the sampler: parameters of every group, random logits with ties, rows without a token."""

import math

import torch

from nanoinfer import SamplingParams
from nanoinfer.features.logprobs.token_logprobs import ReportingSampler
from nanoinfer.features.own_code.logits_processors import checked_stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.routes import RoutedSampler
from nanoinfer.sampling.sampler import STAGES, HeadRows, Sampler
from nanoinfer.scheduling.sequence import Sequence
from tests.helpers.growing import grow

INF, NAN = math.inf, math.nan
PARAMS = {  # that put a row into each group of RowGroups
    "greedy": {"temperature": 0},
    "top_k": {"top_k": 5, "top_p": 0.95},
    "top_p": {"top_p": 0.9},
    "other": {"temperature": 0.8, "min_p": 0.01},
}


def sampling_by(*routes, stages=STAGES, **options):
    """The sampler with these routes, as a function of logits. Without a route it runs stage by stage: the definition."""
    is_routed = routes and tuple(stages) == STAGES
    sampler = ReportingSampler(RoutedSampler(routes) if is_routed else Sampler(checked_stages(tuple(stages))), **options)
    return lambda logits, batch: sampler(HeadRows(logits, the_same), batch)


def the_same(hidden):
    """An LM head for logits that are given in place of hidden rows."""
    return hidden


def sequence(seed=0, prompt=(0,), output=(), **params):
    seq = Sequence("r", list(prompt), SamplingParams(max_tokens=None, **params), seed, 9999)
    grow(seq, *output)
    return seq


def batch_of(sequences, vocab_size):
    return SamplingBatch.build(sequences, vocab_size, torch.device("cpu"))


def random_params(rng, vocab_size, group=None):
    """A random choice of the last four parameters. With a group's name, one that belongs to the group."""
    group = group or rng.choice(["greedy", "top_k", "top_k", "top_p", "top_p", "other"])
    if group == "greedy":
        return {"temperature": 0, "top_k": rng.choice([0, 3]), "top_p": rng.choice([1.0, 0.5])}
    params = {
        "temperature": rng.choice([1.0, 1.0, rng.uniform(0.1, 3), 0.7, 1e-30, 1e-300, 1e30, 1e300]),
        "min_p": rng.choice([0, 0, 0.05, rng.random(), 1.0]),
        "top_p": rng.choice([0.9, 0.999999, 1e-6, 0.5, rng.random() or 0.5]),
    }
    if group == "top_k":  # at least one token must go, or it is off
        params["top_k"] = min(rng.choice([1, 2, 5, 40, rng.randint(1, vocab_size)]), max(vocab_size - 1, 1))
        params["top_p"] = rng.choice([1.0, params["top_p"]])
    if group == "other":
        params |= {"top_p": 1.0, "top_k": rng.choice([0, vocab_size, vocab_size + 7])}
    return params


def random_logits(kind, num_rows, vocab_size):
    generator = torch.Generator().manual_seed(num_rows + vocab_size)
    scale = torch.tensor([0.1, 1.0, 4.0, 30.0]).repeat(num_rows // 4 + 1)[:num_rows, None]
    if kind == "constant":
        return torch.zeros(num_rows, vocab_size) + scale
    if kind == "few values":
        return torch.randint(0, 3, (num_rows, vocab_size), generator=generator) * scale
    if kind == "rounded to bf16":
        return (torch.randn(num_rows, vocab_size, generator=generator) * scale).bfloat16().float()
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


BAD = {
    "all nan": lambda row: row.fill_(NAN),
    "one nan": lambda row: row.index_fill_(0, torch.tensor([len(row) // 2]), NAN),
    "all -inf": lambda row: row.fill_(-INF),
    "all inf": lambda row: row.fill_(INF),
    "one inf": lambda row: row.index_fill_(0, torch.tensor([len(row) - 1]), INF),
    "nan and inf": lambda row: row.index_fill_(0, torch.tensor([0]), NAN).index_fill_(0, torch.tensor([1]), INF),
}
