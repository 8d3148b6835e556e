"""Five functions that are right and slow, to make fast. A grade is the share of this machine's memory bandwidth that one uses.

In: a version of a function below. Out: a Grade. The version and the engine's own run interleaved, on the same numbers. A share
is the bytes that must be read at least once, by what the memory delivers in the shortest time of a call.
"""

import ast
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.fast.cpu.accelerate import compile_model
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.sampling.few_logits import sample
from nanoinfer.features.drafts.speculator import Proposer
from nanoinfer.features.quantization.rounding import quantize
from nanoinfer.llm import LLM
from nanoinfer.loading import loader
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.draw import draw_from_weights, integer_weights
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan
from nanoinfer_course.learn.workbook import Function, Version

NUM_TURNS = 9
TOLERANCE = 2e-2  # the engine's int8 layers also round their inputs


# ---- the functions, as the learner gets them


def batch(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply the hidden rows of 16 sequences by the LM head. The weight need only be read once for all of them.

    Args:
        x: [16, hidden] in fp32.
        weight: [vocab, hidden] in fp32.

    Returns:
        The logits [16, vocab].
    """
    return torch.stack([weight @ row for row in x])


def page_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
    """Attend with the newest token of each sequence over its pages. Each page need only be read once, and not be copied.

    Products of a page are small: threads may cost more than they save (torch.set_num_threads).

    Args:
        q: [num_seqs, num_heads, head_dim] in fp32.
        k_pages, v_pages: [num_blocks, num_heads, block_size, head_dim].
        block_tables: [num_seqs, max_blocks], the pages of each sequence in order.
        seq_lens: [num_seqs], the tokens of each sequence, the newest included.

    Returns:
        [num_seqs, num_heads, head_dim]. Scores are q . k / sqrt(head_dim).
    """
    out = torch.empty_like(q)
    for i, seq_len in enumerate(seq_lens.tolist()):
        keys, values = (
            torch.cat([pages[block] for block in block_tables[i].tolist()], dim=1)[:, :seq_len] for pages in (k_pages, v_pages)
        )  # [num_heads, seq_len, head_dim]
        scores = (keys * q[i].unsqueeze(1)).sum(-1) * q.shape[-1] ** -0.5
        out[i] = (scores.softmax(-1).unsqueeze(-1) * values).sum(1)
    return out


def fused_draw(logits: Tensor, temperature: Tensor, top_k: int, top_p: Tensor, u: Tensor) -> Tensor:
    """Draw an id per row after temperature, top_k and top_p. Few logits decide, and the others need only be compared.

    Args:
        logits: [batch, vocab] in fp32.
        temperature: [batch], above 0.
        top_k: how many of the largest logits stay. All that equal the last of them stay, too.
        top_p: [batch] in float64.
        u: [batch] in float64, the random numbers.

    Returns:
        The ids [batch], those of the slow version.
    """
    logits = stages.divided(logits, temperature)
    smallest = logits.sort(dim=-1, descending=True).values[:, top_k - 1]
    logits = logits.masked_fill(logits < smallest.unsqueeze(-1), float("-inf"))
    return draw_from_weights(integer_weights(stages.drop_beyond(logits, top_p)), u)


def int8_weights(x: Tensor, integers: Tensor, scales: Tensor) -> Tensor:
    """Multiply a hidden row by a weight in 8 bits. Only the integers need be read from memory.

    torch.compile makes a single loop of several operations, so that no converted number is stored.

    Args:
        x: [1, in] in fp32.
        integers: [out, in] in uint8, where 128 means 0.
        scales: [out, groups] in fp32, for in / groups numbers each.

    Returns:
        [1, out]: x times the transposed weight, which is (integers - 128) * scales.
    """
    weight = (integers.float() - 128).unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)
    return torch.mm(x, weight.flatten(1).T)


def drafts(token_ids: list[int], limit: int) -> list[int]:
    """Guess at most `limit` tokens that follow. A step that checks them reads the weights once for all that are right.

    ngram_draft, the task, has an index that makes good ones.

    Args:
        token_ids: the prompt and the answer so far.
        limit: how many tokens the step may check.

    Returns:
        The guesses, perhaps none. Wrong ones cost time, and change no token.
    """
    return []


# ---- what they are measured with


@dataclass(frozen=True)
class SpeedWork:
    """How to call a version, the engine's own on the same numbers, and the bytes that must be read."""

    call: Callable[[Version], Any]
    engine: Callable[[], Any]
    num_bytes: int


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _linear(rows: int, quantization: str | None = None) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Return the hidden rows, a weight of GPT-2's LM head, and the engine's product of both."""
    x, linear = _random(rows, 768), nn.Linear(768, 50304, bias=False)
    with torch.no_grad():
        linear.weight.copy_(_random(50304, 768))
    weight = linear.weight.detach().clone()
    return x, weight, partial(compile_model(nn.Sequential(linear), quantization).model, x)


def _batch() -> SpeedWork:
    x, weight, engine = _linear(16)
    return SpeedWork(lambda version: version(x, weight), engine, weight.nbytes)


def _page_attention() -> SpeedWork:
    num_seqs, length, block_size = 16, 1000, 64
    num_blocks = -(-length // block_size)
    cache = KVCache(
        num_layers=1, num_blocks=num_seqs * num_blocks, block_size=block_size, num_kv_heads=12, head_dim=64, layout="HND"
    )
    for pages in cache.layer(0):
        pages.copy_(_random(*pages.shape))
    items = []
    for i in range(num_seqs):
        seq = Sequence(str(i), [0] * (length - i), SamplingParams(), seed=0, max_num_tokens=length)
        seq.block_table, seq.num_computed_tokens = list(range(i, num_seqs * num_blocks, num_seqs)), length - i - 1
        items.append(ScheduledSequence(seq, 1))
    metadata = ForwardBatch.build(StepPlan(tuple(items)), block_size, torch.device("cpu")).attention
    q, k, v = (_random(num_seqs, 12, 64) for _ in range(3))
    attend = KernelBackend(torch.float32, num_heads=12, num_kv_heads=12, head_dim=64).begin_step(cache, metadata)
    attend(0, q, k, v)  # writes the newest keys and values, which the version only reads
    num_bytes = sum(metadata.seq_lens_cpu) * 2 * 12 * 64 * 4
    arguments = (q, *cache.layer(0), metadata.block_tables, metadata.seq_lens)
    return SpeedWork(lambda version: version(*arguments), lambda: attend(0, q, k, v), num_bytes)


def fused_draw_work(num_rows: int = 16) -> SpeedWork:
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9)
    seqs = [Sequence(str(i), [0], params, seed=i, max_num_tokens=9) for i in range(num_rows)]
    logits, made = _random(num_rows, 50257) * 3, SamplingBatch.build(seqs, 50257, torch.device("cpu"))
    arguments = (made.temperature, 40, made.top_p, made.u)
    return SpeedWork(lambda version: version(logits, *arguments), lambda: sample(logits, made), logits.nbytes)


def _int8_weights() -> SpeedWork:
    x, weight, engine = _linear(1, "int8")
    rounded = quantize(weight, 8)
    return SpeedWork(lambda version: version(x, rounded.integers, rounded.scales), engine, rounded.integers.nbytes)


class _Drafts(Proposer):
    """Asks the version which is measured."""

    version: Version

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        return [_Drafts.version(list(seq.token_ids), limit) for seq, limit in zip(sequences, limits, strict=True)]


def _drafts() -> SpeedWork:
    num_tokens = 200
    prompt = "Once upon a time, there was a kind duck named Max. " * 4
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    theirs, own = (LLM(seed=0, kv_cache_memory=2**25, speculative_config={"method": method}) for method in (_Drafts, "ngram"))

    def answer(llm: LLM) -> list[int]:
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids

    def call(version: Version) -> list[int]:
        _Drafts.version = staticmethod(version)
        return answer(theirs)

    model = loader.on_meta(Checkpoint.open(None))[0]
    num_weights = sum(weight.numel() for weight in model.parameters())
    return SpeedWork(call, partial(answer, own), num_tokens * num_weights * getattr(torch, own.info.dtype).itemsize)


@dataclass(frozen=True)
class SpeedTask:
    """A function to make faster. wanted: the share of the engine's speed that passes."""

    name: str
    title: str
    wanted: float
    prepare: Callable[[], SpeedWork]

    @property
    def function(self) -> Function:
        return Function(__name__, self.name)

    def is_changed(self, text: str) -> bool:
        """Return whether the text of the learner's file is another program than the text that was written there."""
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(self.text))

    @property
    def text(self) -> str:
        about = f'"""{self.name}: {self.title}, at {self.wanted:.0%} of the speed of the engine\'s own."""'
        return f"{about}\n\n{self.function.imports}\n\n\n{self.function.source}"


SPEED = [
    SpeedTask("batch", "read the weights once for 16 sequences", 0.3, _batch),
    SpeedTask("page_attention", "attend over pages without copying them", 0.25, _page_attention),
    SpeedTask("fused_draw", "draw without sorting 50,257 logits", 0.3, fused_draw_work),
    SpeedTask("int8_weights", "multiply by a weight in 8 bits", 0.3, _int8_weights),
    SpeedTask("drafts", "several tokens for one reading of the weights", 0.9, _drafts),
]


@dataclass(frozen=True)
class Grade:
    """The shares of the bandwidth of a version and of the engine's own. is_right: whether the version's result is right."""

    share: float
    engine_share: float
    is_right: bool


def grade(task: SpeedTask, version: Version, bandwidth: float) -> Grade:
    """Measure a version beside the engine's own, interleaved. bandwidth: the memory's bytes per second."""
    work, plain = task.prepare(), globals()[task.name]
    with torch.inference_mode():
        expected, got = work.call(plain), work.call(version)
        is_right = torch.allclose(expected, got, TOLERANCE, TOLERANCE) if isinstance(got, Tensor) else expected == got
        seconds: tuple[list[float], list[float]] = [], []
        turns: tuple[Callable[[], Any], ...] = partial(work.call, version), work.engine
        for _ in range(NUM_TURNS):
            for times, call in zip(seconds, turns, strict=True):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
    share, engine_share = (work.num_bytes / min(times) / bandwidth for times in seconds)
    return Grade(share, engine_share, is_right)
