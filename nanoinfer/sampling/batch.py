"""What each row of a step asked of the sampler, as tensors: the stages read nothing else.

In: the sequences of a plan's rows. Out: a SamplingBatch. A field is None where no row uses its parameter, so that a stage
nobody asked for costs nothing; where some row does, the others carry the value that leaves their logits as they are.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanoinfer.sampling.state import SamplingState
from nanoinfer.sequence import Sequence

_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Entries:
    """Some of the logits: entry i is logits[rows[i], ids[i]], with a number of its own where the stage needs one."""

    rows: Int[Tensor, "entries"]
    ids: Int[Tensor, "entries"]
    values: Float[Tensor, "entries"] | Int[Tensor, "entries"] | None = None  # None: the stage needs none

    def read(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "entries"]:
        return logits.view(-1).take(self.rows * logits.shape[-1] + self.ids)  # half the time of logits[rows, ids]

    def write(self, logits: Float[Tensor, "batch vocab"], values: Float[Tensor, "entries"]) -> None:
        logits.view(-1).index_copy_(0, self.rows * logits.shape[-1] + self.ids, values)


@dataclass(frozen=True, slots=True)
class RowProcessors:
    """One row's logits_processors, and what they are called with."""

    row: int
    processors: tuple[Callable[..., Any], ...]
    prompt_token_ids: list[int]
    output_token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Per-row parameters, [batch] each. Greedy rows carry temperature 1 and the off values, and take the argmax at the end."""

    greedy: Bool[Tensor, "batch"] | None  # None: no row is greedy
    all_greedy: bool
    temperature: Float[Tensor, "batch"] | None
    min_p: Float[Tensor, "batch"] | None
    top_k: Int[Tensor, "batch"] | None  # the vocabulary's size where it is off
    top_p: Float[Tensor, "batch"] | None  # float64, to be compared with integer sums
    seeds: Int[Tensor, "batch"]  # 64 bits, read as unsigned
    positions: Int[Tensor, "batch"]  # index of the token to draw, in prompt + output

    allowed: Entries | None = None  # all that rows with allowed_token_ids may draw
    bad_words: Entries | None = None  # the ids that would complete one
    min_tokens: Entries | None = None  # EOS and stop ids of rows that are too short to end
    logit_bias: Entries | None = None  # values: what is added
    seen: Entries | None = None  # distinct ids of rows with a penalty; values: how often they are in the output
    repetition_penalty: Float[Tensor, "batch"] | None = None
    frequency_penalty: Float[Tensor, "batch"] | None = None
    presence_penalty: Float[Tensor, "batch"] | None = None
    repeated_ngrams: Entries | None = None  # the ids that would complete one
    processors: tuple[RowProcessors, ...] = ()

    # For the fast path (fast.py): row numbers by what the draw needs. Together they are all rows.
    greedy_rows: tuple[int, ...] = ()
    top_k_rows: tuple[int, ...] = ()
    top_p_rows: tuple[int, ...] = ()  # with top_p and without top_k
    other_rows: tuple[int, ...] = ()
    max_top_k: int = 0  # of top_k_rows

    logprobs: tuple[tuple[int, int], ...] = ()  # (row, how many of the likeliest ids): rows that want them

    @classmethod
    def build(cls, sequences: list[Sequence], vocab_size: int, device: torch.device) -> "SamplingBatch":
        params = [seq.params for seq in sequences]
        greedy = [p.is_greedy for p in params]
        top_k = [vocab_size if p.is_greedy else min(p.top_k or vocab_size, vocab_size) for p in params]

        def column(values: list, off: float | int, dtype: torch.dtype) -> Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device) if any(value != off for value in values) else None

        def drawn_column(values: list, off: float | int, dtype: torch.dtype) -> Tensor | None:
            return column([off if g else value for value, g in zip(values, greedy, strict=True)], off, dtype)

        def clamped(value: float) -> float:
            """Where fp32 would make it 0 or infinite, which dividing and multiplying by make NaN of."""
            return min(max(value, _TINY), _HUGE)

        temperatures = [clamped(p.temperature) for p in params]
        group = [_group(p.is_greedy, k < vocab_size, p.top_p < 1.0) for p, k in zip(params, top_k, strict=True)]
        return cls(
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            temperature=drawn_column(temperatures, 1.0, torch.float32),
            min_p=drawn_column([p.min_p for p in params], 0.0, torch.float32),
            top_k=column(top_k, vocab_size, torch.int64),
            top_p=drawn_column([p.top_p for p in params], 1.0, torch.float64),
            seeds=torch.tensor([_as_signed(seq.seed) for seq in sequences], dtype=torch.int64, device=device),
            positions=torch.tensor([len(seq.token_ids) for seq in sequences], dtype=torch.int64, device=device),
            **_history_fields(sequences, device),
            repetition_penalty=column([clamped(p.repetition_penalty) for p in params], 1.0, torch.float32),
            frequency_penalty=column([p.frequency_penalty for p in params], 0.0, torch.float32),
            presence_penalty=column([p.presence_penalty for p in params], 0.0, torch.float32),
            greedy_rows=_rows_of(group, "greedy"),
            top_k_rows=_rows_of(group, "top_k"),
            top_p_rows=_rows_of(group, "top_p"),
            other_rows=_rows_of(group, "other"),
            max_top_k=max((k for k, name in zip(top_k, group, strict=True) if name == "top_k"), default=0),
            logprobs=tuple(
                (row, vocab_size if p.logprobs == -1 else p.logprobs) for row, p in enumerate(params) if p.logprobs is not None
            ),
        )

    @property
    def masks_logits(self) -> bool:
        """Does any stage before the temperature write logits without reading them?"""
        entries = (self.allowed, self.bad_words, self.min_tokens, self.repeated_ngrams)
        return bool(self.processors) or any(field is not None for field in entries)

    def only_rows(self, rows: Int[Tensor, "rows"] | slice) -> "SamplingBatch":
        """The same for some rows, as far as the stages from the temperature on and the draw read it."""
        columns = ("temperature", "min_p", "top_k", "top_p", "seeds", "positions")
        picked: dict[str, Any] = {}
        for name in columns:
            column = getattr(self, name)
            picked[name] = None if column is None else column[rows]
        return SamplingBatch(greedy=None, all_greedy=False, max_top_k=self.max_top_k, **picked)


def _history_fields(sequences: list[Sequence], device: torch.device) -> dict[str, Any]:
    """The fields that come from lists of ids: given ones, and those that grow with the output."""
    entries: dict[str, list[tuple[int, Iterable[int], Iterable[float] | None]]] = {}
    processors = []
    for row, seq in enumerate(sequences):
        params = seq.params
        if seq.num_output_tokens < params.min_tokens and seq.stop_ids:
            entries.setdefault("min_tokens", []).append((row, seq.stop_ids, None))
        if completing := _completing_ids(seq):
            entries.setdefault("bad_words", []).append((row, completing, None))
        if params.logits_processors:
            processors.append(RowProcessors(row, tuple(params.logits_processors), seq.prompt_token_ids, seq.output_token_ids))
        if not params.needs_state:
            continue
        state = SamplingState.of(seq)
        if state.allowed_ids is not None:
            entries.setdefault("allowed", []).append((row, state.allowed_ids, None))
        if state.bias_ids is not None:
            entries.setdefault("logit_bias", []).append((row, state.bias_ids, state.bias_values))
        if state.seen is not None:
            entries.setdefault("seen", []).append((row, state.seen.ids, state.seen.output_counts))
        if state.ngrams is not None and (banned := state.ngrams.banned(seq.token_ids)):
            entries.setdefault("repeated_ngrams", []).append((row, banned, None))
    return {name: _pack(rows, device) for name, rows in entries.items()} | {"processors": tuple(processors)}


def _completing_ids(seq: Sequence) -> list[int]:
    """The last ids of bad words whose other ids stand at the end of the output."""
    output = seq.output_token_ids if seq.bad_words else []
    return [word[-1] for word in seq.bad_words if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1])]


def _pack(rows: list[tuple[int, Any, Any]], device: torch.device) -> Entries:
    """Lists of ids per row -> one flat list of entries."""
    ids = [_tensor(ids) for _, ids, _ in rows]
    values = [_tensor(values) for _, _, values in rows if values is not None]
    row_numbers = torch.tensor([row for row, _, _ in rows]).repeat_interleave(torch.tensor([len(part) for part in ids]))
    return Entries(row_numbers.to(device), torch.cat(ids).to(device), torch.cat(values).to(device) if values else None)


def _tensor(numbers: Any) -> Tensor:
    """An array's without a copy: it must not grow while the tensor lives, which is until _pack has joined them."""
    if isinstance(numbers, array):
        return torch.frombuffer(numbers, dtype=torch.float32 if numbers.typecode == "f" else torch.int64)
    return torch.tensor(list(numbers), dtype=torch.int64)


def _group(is_greedy: bool, has_top_k: bool, has_top_p: bool) -> str:
    return "greedy" if is_greedy else "top_k" if has_top_k else "top_p" if has_top_p else "other"


def _rows_of(group: list[str], name: str) -> tuple[int, ...]:
    return tuple(row for row, its in enumerate(group) if its == name)


def _as_signed(seed: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    return seed - 2**64 if seed >= 2**63 else seed
