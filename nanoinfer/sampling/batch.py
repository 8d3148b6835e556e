"""What each row of a step asked of the sampler, as tensors: the stages read nothing else.

In: the sequences of a plan's rows. Out: a SamplingBatch. A field is None where no row uses its parameter, so that a stage
nobody asked for costs nothing; where some row does, the others carry the value that leaves their logits as they are.
"""

import operator
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanoinfer.devices.transfer import on_device
from nanoinfer.sampling.draw import uniform
from nanoinfer.sampling.state import SamplingState
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence

_NUMBERS = operator.attrgetter("temperature", "min_p", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """Some of the logits: entry i is logits[rows[i], ids[i]], with a number of its own where the stage needs one."""

    rows: Int[Tensor, " entries"]
    ids: Int[Tensor, " entries"]
    values: Float[Tensor, " entries"] | Int[Tensor, " entries"] | None = None  # None: the stage needs none

    def read(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, " entries"]:
        return logits.view(-1).take(self.rows * logits.shape[-1] + self.ids)  # half the time of logits[rows, ids]

    def write(self, logits: Float[Tensor, "batch vocab"], values: Float[Tensor, " entries"]) -> None:
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

    greedy: Bool[Tensor, " batch"] | None  # None: no row is greedy
    all_greedy: bool
    temperature: Float[Tensor, " batch"] | None
    min_p: Float[Tensor, " batch"] | None
    top_k: Int[Tensor, " batch"] | None  # the vocabulary's size where it is off
    top_p: Float[Tensor, " batch"] | None  # float64, to be compared with integer sums
    u: Float[Tensor, " batch"]  # float64: draw.uniform(seed, index of the token in prompt + output); 0 if all are greedy

    allowed: TokenEntries | None = None  # all that rows with allowed_token_ids may draw
    allowed_rows: Int[Tensor, " some_rows"] | None = None  # which rows these are, once each
    bad_words: TokenEntries | None = None  # the ids that would complete one
    min_tokens: TokenEntries | None = None  # EOS and stop ids of rows that are too short to end
    logit_bias: TokenEntries | None = None  # values: what is added
    seen: TokenEntries | None = None  # distinct ids of rows with a penalty; values: how often they are in the output
    repetition_penalty: Float[Tensor, " batch"] | None = None
    frequency_penalty: Float[Tensor, " batch"] | None = None
    presence_penalty: Float[Tensor, " batch"] | None = None
    repeated_ngrams: TokenEntries | None = None  # the ids that would complete one
    processors: tuple[RowProcessors, ...] = ()

    # For the fast path (fast.py): row numbers by what the draw needs. Together they are all rows.
    greedy_rows: tuple[int, ...] = ()
    top_k_rows: tuple[int, ...] = ()
    top_p_rows: tuple[int, ...] = ()  # with top_p and without top_k
    other_rows: tuple[int, ...] = ()
    max_top_k: int = 0  # of top_k_rows

    logprobs: tuple[tuple[int, int], ...] = ()  # (row, how many of the likeliest ids): rows that want them

    params: tuple[SamplingParams, ...] = ()
    columns: dict[str, Any] = field(default_factory=dict)  # those of the fields that depend on params alone

    @classmethod
    def build(
        cls, sequences: list[Sequence], vocab_size: int, device: torch.device, last: "SamplingBatch | None" = None
    ) -> "SamplingBatch":
        """last: an earlier batch of the same vocabulary and device; if it had the same rows, its columns serve again."""
        params = tuple(seq.params for seq in sequences)
        if last is not None and len(last.params) == len(params) and all(map(operator.is_, last.params, params)):
            columns = last.columns
        else:
            columns = _columns(params, vocab_size, device)
        if columns["all_greedy"]:
            u = torch.zeros(len(sequences), dtype=torch.float64)
        else:
            u = uniform([seq.seed for seq in sequences], [seq.num_tokens for seq in sequences])
        history = _history_fields(sequences, device)
        return cls(u=on_device(u, device), params=params, columns=columns, **columns, **history)

    @property
    def masks_logits(self) -> bool:
        """Does any stage before the temperature write logits without reading them?"""
        entries = (self.allowed, self.bad_words, self.min_tokens, self.repeated_ngrams)
        return bool(self.processors) or any(field is not None for field in entries)

    @property
    def changes_logits(self) -> bool:
        """Does any stage before the temperature change them?"""
        return self.masks_logits or self.logit_bias is not None or self.seen is not None

    def only_rows(self, rows: Int[Tensor, " rows"] | slice) -> "SamplingBatch":
        """The same for some rows, as far as the stages from the temperature on and the draw read it."""
        columns = ("temperature", "min_p", "top_k", "top_p", "u")
        picked: dict[str, Any] = {}
        for name in columns:
            column = getattr(self, name)
            picked[name] = None if column is None else column[rows]
        return SamplingBatch(greedy=None, all_greedy=False, max_top_k=self.max_top_k, **picked)


def _columns(params: tuple[SamplingParams, ...], vocab_size: int, device: torch.device) -> dict[str, Any]:
    """The fields that depend on params alone."""
    numbers = np.array([_NUMBERS(p) for p in params]).reshape(len(params), 6)  # of no rows, too, where prompts go on
    temperature, min_p, top_p, repetition, frequency, presence = numbers.T  # [batch], float64
    top_k = np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64)
    greedy = temperature == 0
    for column in (temperature, repetition):  # fp32 would make 0 or infinity of some, which dividing by makes NaN of
        np.clip(column, _TINY, _HUGE, out=column)
    for column, off in ((temperature, 1.0), (min_p, 0.0), (top_k, vocab_size), (top_p, 1.0)):
        column[greedy] = off
    has_top_k, has_top_p = top_k < vocab_size, top_p < 1.0

    def tensor(column: np.ndarray, off: float | int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return None if (column == off).all() else on_device(torch.tensor(column, dtype=dtype), device)

    def rows(condition: np.ndarray) -> tuple[int, ...]:
        return tuple(condition.nonzero()[0].tolist())

    return {
        "greedy": on_device(torch.tensor(greedy), device) if greedy.any() else None,
        "all_greedy": bool(greedy.all()),
        "temperature": tensor(temperature, 1.0),
        "min_p": tensor(min_p, 0.0),
        "top_k": tensor(top_k, vocab_size, torch.int64),
        "top_p": tensor(top_p, 1.0, torch.float64),
        "repetition_penalty": tensor(repetition, 1.0),
        "frequency_penalty": tensor(frequency, 0.0),
        "presence_penalty": tensor(presence, 0.0),
        "greedy_rows": rows(greedy),
        "top_k_rows": rows(has_top_k),
        "top_p_rows": rows(has_top_p & ~has_top_k),
        "other_rows": rows(~(greedy | has_top_k | has_top_p)),
        "max_top_k": int(top_k[has_top_k].max(initial=0)),
        "logprobs": tuple(
            (row, vocab_size if p.logprobs == -1 else p.logprobs) for row, p in enumerate(params) if p.logprobs is not None
        ),
    }


def _history_fields(sequences: list[Sequence], device: torch.device) -> dict[str, Any]:
    """The fields that come from lists of ids: given ones, and those that grow with the output."""
    entries: dict[str, list[tuple[int, Iterable[int], Iterable[float] | None]]] = {}
    processors = []
    for row, seq in enumerate(sequences):
        params = seq.params
        if seq.num_tokens - len(seq.prompt_token_ids) < params.min_tokens and seq.stop_ids:
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
    fields: dict[str, Any] = {name: _pack(rows, device) for name, rows in entries.items()}
    if "allowed" in entries:
        fields["allowed_rows"] = on_device(torch.tensor([row for row, _, _ in entries["allowed"]]), device)
    return fields | {"processors": tuple(processors)}


def _completing_ids(seq: Sequence) -> list[int]:
    """The last ids of bad words whose other ids stand at the end of the output."""
    output = seq.output_token_ids if seq.bad_words else []
    return [word[-1] for word in seq.bad_words if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1])]


def _pack(rows: list[tuple[int, Any, Any]], device: torch.device) -> TokenEntries:
    """Lists of ids per row -> one flat list of entries."""
    ids = [_tensor(ids) for _, ids, _ in rows]
    values = [_tensor(values) for _, _, values in rows if values is not None]
    row_numbers = torch.tensor([row for row, _, _ in rows]).repeat_interleave(torch.tensor([len(part) for part in ids]))
    packed_values = on_device(torch.cat(values), device) if values else None
    return TokenEntries(on_device(row_numbers, device), on_device(torch.cat(ids), device), packed_values)


def _tensor(numbers: Any) -> Tensor:
    """An array's without a copy: it must not grow while the tensor lives, which is until _pack has joined them."""
    if isinstance(numbers, array):
        return torch.frombuffer(numbers, dtype=torch.float32 if numbers.typecode == "f" else torch.int64)
    return torch.tensor(list(numbers), dtype=torch.int64)
