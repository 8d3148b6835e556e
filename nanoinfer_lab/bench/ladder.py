"""Eleven versions of an engine, each with a further idea: from recomputing the whole text for each token to drafts.

In: a checkpoint. Out: a Rung for each version. The first four call `run_plainly`, which is notebook 00b for any
model file. The others are the engine, each with the arguments of the version before it and a further idea.
"""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanoinfer.attention.dense import causal_attention
from nanoinfer.config import BITS
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.sampling.sampler import STAGES
from nanoinfer.system.progress import progress_bar
from nanoinfer_lab.bench.offline import load, run_workload
from nanoinfer_lab.bench.roofline import Machine, least_s_of_run
from nanoinfer_lab.bench.timing import RequestTiming, figures
from nanoinfer_lab.bench.workloads import Workload

NUM_SEQS = 8  # the number of sequences at a time
NUM_ALONE = 2  # the number of requests for the versions that run them one at a time, which would take minutes for all


class _SystemPrompt(Workload):
    """Prompts whose first three quarters are the same in every request and every run."""

    def prompts(self, vocab_size: int, run: int) -> list[list[int]]:
        [shared, *_] = super().prompts(vocab_size, 0)
        return [shared[: len(ids) * 3 // 4] + ids[len(ids) * 3 // 4 :] for ids in super().prompts(vocab_size, run)]


WORKLOAD = _SystemPrompt(
    name="ladder",
    input_lens=(128,) * 16,
    output_lens=(12, 36) * 8,
    sampling={"temperature": 0.7, "top_k": 40, "top_p": 0.9},
)

PLAIN: dict[str, dict[str, Any]] = {  # arguments of run_plainly
    "the whole text for each token": {"keeps_cache": False},
    "a KV cache": {},
    "a batch": {"num_seqs": NUM_SEQS},
    "continuous batching": {"num_seqs": NUM_SEQS, "is_continuous": True},
}
ENGINE: dict[str, dict[str, Any]] = {  # arguments of LLM, which also hold for the versions below
    "the engine: pages": {
        "max_num_seqs": NUM_SEQS,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
    },
    "chunks of prompts": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
    "a prefix cache": {"enable_prefix_caching": True},
    # A user's stage turns the sampler's fast routes off.
    "compiled layers": {"enforce_eager": False, "stages": (*STAGES, lambda logits, batch: logits)},
    "fast sampling": {"stages": None},
    "int8 weights": {"quantization": "int8", "dtype": "bfloat16"},  # the rest is computed in bfloat16
    "drafts": {"speculative_config": {"method": "ngram"}},
}


@dataclass(frozen=True, slots=True)
class Rung:
    """A version's figures, the medians of its runs."""

    version: str
    tokens_per_s: float  # output tokens per second
    # The bytes that the steps must read and write, each weight once per step, by those that the memory can deliver in the time
    # of the run
    bandwidth_share: float
    longest_pause_ms: float  # the longest time between two tokens of a request


@dataclass(slots=True)
class _Text:
    ids: list[int]
    output_len: int
    timing: RequestTiming
    cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> keys and values
    num_cached: int = 0


def climb(checkpoint: str | None, workload: Workload, bandwidth: float, *, repeats: int, dtype: str = "auto") -> Iterator[Rung]:
    """Measure one version after the other on the CPU, each once to warm up and then `repeats` times.

    Args:
        checkpoint: a model, as for LLM. None: the bundled model.
        workload: the requests, such as WORKLOAD.
        bandwidth: the memory's bytes per second (roofline.measure_bandwidth).
        repeats: the number of measured runs, at least 1.
        dtype: the dtype of the versions before int8 weights.
    """
    opened = Checkpoint.open(checkpoint)
    model = loader.load_model(opened, dtype)
    alone = replace(workload, input_lens=workload.input_lens[:NUM_ALONE], output_lens=workload.output_lens[:NUM_ALONE])
    with progress_bar("", len(PLAIN) + len(ENGINE)) as bar:
        with torch.inference_mode():
            for version, arguments in PLAIN.items():
                bar.set_description(version)
                part = workload if "num_seqs" in arguments else alone
                runs = [run_plainly(model, part, run, **arguments)[0] for run in range(repeats + 1)]
                bar.update()
                yield rung(version, runs[1:], bandwidth, model, next(model.parameters()).dtype)
        given: dict[str, Any] = {"dtype": dtype}
        del model
        for version, arguments in ENGINE.items():
            bar.set_description(version)
            given |= arguments
            found = engine_rung(version, checkpoint, workload, bandwidth, repeats=repeats, **given)
            bar.update()
            yield found


def engine_rung(
    version: str, checkpoint: str | None, workload: Workload, bandwidth: float, *, repeats: int, **engine: Any
) -> Rung:
    """Measure the engine with these arguments of LLM, as climb does."""
    with closing(load(checkpoint, [workload], device="cpu", **engine)) as llm:
        runs = [run_workload(llm, workload, run) for run in range(repeats + 1)]
        sizes, weight_bits = loader.on_meta(Checkpoint.open(checkpoint))[0], BITS.get(engine.get("quantization", ""))
        return rung(version, runs[1:], bandwidth, sizes, getattr(torch, llm.info.dtype), weight_bits)


def rung(
    version: str,
    runs: list[list[RequestTiming]],
    bandwidth: float,
    model: Any,
    dtype: torch.dtype,
    weight_bits: int | None = None,
) -> Rung:
    """Compute the figures of a version. The last four arguments are those of roofline.count, and the memory's bandwidth."""
    only_reads = Machine(bandwidth, {dtype: math.inf})  # arithmetic counts as free
    found = [figures(timings) for timings in runs]
    least_s = [least_s_of_run(timings, only_reads, model, dtype, weight_bits) for timings in runs]
    pauses = [after - before for timings in runs for timing in timings for before, after in pairwise(timing.token_times)]
    return Rung(
        version,
        statistics.median(figures.output_tokens_per_s for figures in found),
        statistics.median(least / figures.duration_s for least, figures in zip(least_s, found, strict=True)),
        1e3 * max(pauses),
    )


def run_plainly(
    model: Any, workload: Workload, run: int, *, keeps_cache: bool = True, num_seqs: int = 1, is_continuous: bool = False
) -> tuple[list[RequestTiming], list[list[int]]]:
    """Generate with a model, without the engine.

    Args:
        model: a model on a CPU.
        workload: the requests, which all arrive at the start.
        run: the number of the run, which selects the prompts.
        keeps_cache: whether keys and values are kept. If False, every step computes the whole text.
        num_seqs: the number of sequences in a step.
        is_continuous: whether a waiting request starts as soon as a running request ends, not when all have ended.

    Returns:
        The times of each request's tokens, and its answer.
    """
    start, prompts = time.perf_counter(), workload.prompts(model.config.vocab_size, run)
    lengths = zip(prompts, workload.output_lens, strict=True)
    texts = [_Text(list(ids), length, RequestTiming(start, num_prompt_tokens=len(ids))) for ids, length in lengths]
    waiting, running = list(texts), texts[:0]
    while waiting or running:
        if is_continuous or not running:
            num_free = num_seqs - len(running)
            running, waiting = running + waiting[:num_free], waiting[num_free:]
        new_ids = _drawn(_logits(model, running), **workload.sampling)
        now = time.perf_counter()
        for text, token_id in zip(running, new_ids, strict=True):
            text.num_cached = len(text.ids) if keeps_cache else 0
            text.ids.append(token_id)
            text.timing.token_times.append(now)
            text.timing.num_output_tokens += 1
        running = [text for text in running if text.timing.num_output_tokens < text.output_len]
    return [text.timing for text in texts], [text.ids[len(ids) :] for text, ids in zip(texts, prompts, strict=True)]


def _logits(model: Any, texts: list[_Text]) -> Tensor:
    """Compute the tokens of each text that are not in its cache. Returns: [num_texts, vocab], after each text's last token."""
    positions = [torch.arange(text.num_cached, len(text.ids)) for text in texts]
    sizes = [len(ids) for ids in positions]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for text, queries, *new in zip(texts, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
            old = text.cache[layer] if text.num_cached else (k[:0], v[:0])
            keys, values = (torch.cat(pair) for pair in zip(old, new, strict=True))
            text.cache[layer] = keys, values
            outputs.append(causal_attention(queries, keys, values))
        return torch.cat(outputs)

    new_ids = [token_id for text in texts for token_id in text.ids[text.num_cached :]]
    hidden = model(torch.tensor(new_ids), torch.cat(positions), attend)
    logits: Tensor = model.compute_logits(hidden[torch.tensor(sizes).cumsum(0) - 1]).float()
    return logits


def _drawn(logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    """Draw an id for each row. All logits are sorted, and torch draws."""
    if temperature == 0:
        return logits.argmax(dim=-1).tolist()
    values, ids = (logits / temperature).sort(dim=-1, descending=True)
    weights = values[:, : top_k or None].softmax(dim=-1)
    weights[weights.cumsum(dim=-1) - weights >= top_p] = 0
    return ids.gather(-1, weights.multinomial(1))[:, 0].tolist()
