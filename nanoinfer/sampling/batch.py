"""The sampling parameters of each row of a step, as tensors: the only input of the stages besides the logits.

In: the sequences of a plan's rows. Out: a SamplingBatch. A tensor that no row uses is None, so that an unused stage costs
nothing. If any row uses it, the other rows hold the value that leaves their logits unchanged.
"""

import operator
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nanoinfer.sampling.draw import uniform
from nanoinfer.sampling.state import SamplingState
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Constraint, Sequence, SequenceStatus
from nanoinfer.system.transfer import on_device

_NUMBERS = operator.attrgetter("temperature", "min_p", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_NUM_AHEAD = 8  # the steps whose uniform numbers are computed together, if the same rows go on
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class TokenEntries:
    """Single logits of a batch: entry i is logits[rows[i], ids[i]], with a value if the stage needs one."""

    rows: Int[Tensor, " entries"]
    ids: Int[Tensor, " entries"]
    values: Float[Tensor, " entries"] | Int[Tensor, " entries"] | None = None  # None: the stage needs no values

    def read(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, " entries"]:
        return logits.view(-1).take(self.rows * logits.shape[-1] + self.ids)  # takes half the time of logits[rows, ids]

    def write(self, logits: Float[Tensor, "batch vocab"], values: Float[Tensor, " entries"]) -> None:
        logits.view(-1).index_copy_(0, self.rows * logits.shape[-1] + self.ids, values)


class PendingTokens(NamedTuple):
    """The newest tokens of some rows, which the step before samples: their rows, and the ids, -1 for no token."""

    rows: list[int]
    token_ids: Int[Tensor, " some_rows"]


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Row rows[i] of the logits may not draw the ids in forbidden[i]."""

    rows: Int[Tensor, " some_rows"]
    forbidden: Bool[Tensor, "some_rows vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterColumns:
    """A number per row and parameter. Greedy rows hold temperature 1 and the off values of min_p, top_k and top_p."""

    greedy: Bool[Tensor, " batch"] | None = None  # None: no row is greedy
    temperature: Float[Tensor, " batch"] | None = None
    min_p: Float[Tensor, " batch"] | None = None
    top_k: Int[Tensor, " batch"] | None = None  # off: the vocabulary's size
    max_top_k: int = 0  # the largest top_k that is on, known on the host
    top_p: Float[Tensor, " batch"] | None = None  # float64, to be compared with integer sums
    repetition_penalty: Float[Tensor, " batch"] | None = None
    frequency_penalty: Float[Tensor, " batch"] | None = None
    presence_penalty: Float[Tensor, " batch"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """Row numbers, on the host, by what the rows need. Each row is in one group."""

    greedy_rows: tuple[int, ...] = ()
    top_k_rows: tuple[int, ...] = ()  # with or without top_p
    top_p_rows: tuple[int, ...] = ()  # without top_k
    other_rows: tuple[int, ...] = ()  # neither greedy, nor with top_k, nor with top_p

    @property
    def all_greedy(self) -> bool:
        return not (self.top_k_rows or self.top_p_rows or self.other_rows)


_MASKS = operator.attrgetter("allowed", "grammar", "end_thinking", "bad_words", "min_tokens", "repeated_ngrams")


class _Draws(NamedTuple):
    """The seed and the position of each row, and u of the next steps if the same rows go on. None: it was not computed."""

    seeds: tuple[int, ...]
    positions: tuple[int, ...]
    ahead: Float[Tensor, "steps batch"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch(ParameterColumns):
    """The parameters and state of a step's rows, for the sampler."""

    sequences: tuple[Sequence, ...] = ()  # the sequence of each row
    params: tuple[SamplingParams, ...] = ()  # the parameters of each row
    row_groups: RowGroups = RowGroups()
    of_params: Mapping[str, Any] = field(default_factory=dict)  # columns and row_groups, for the next batch to reuse
    # the logits that the stages before the temperature read or write
    allowed: TokenEntries | None = None  # every id that rows with allowed_token_ids may draw
    allowed_rows: Int[Tensor, " some_rows"] | None = None  # the rows of allowed, once each
    grammar: TokenMask | None = None  # what rows with structured_outputs may draw
    end_thinking: TokenEntries | None = None  # the end of reasoning that is over
    bad_words: TokenEntries | None = None  # the ids that would complete a bad word
    min_tokens: TokenEntries | None = None  # EOS and stop ids of rows that are too short to end
    logit_bias: TokenEntries | None = None  # values: the bias
    token_counts: TokenEntries | None = None  # distinct ids of rows with a penalty; values: their counts in the output
    repeated_ngrams: TokenEntries | None = None  # the ids that would repeat an n-gram
    with_processors: dict[int, Sequence] = field(default_factory=dict)  # row -> the sequence, for rows with logits_processors
    u: Float[Tensor, " batch"]  # float64: draw.uniform(seed, index of the token in prompt + output), or 0 if all are greedy
    is_stateful: bool = False  # whether a row may have entries or processors, in any step
    draws: _Draws | None = None  # the seeds and positions from which u was computed. None: all rows are greedy

    @classmethod
    def build(
        cls,
        sequences: list[Sequence],
        vocab_size: int,
        device: torch.device,
        last: "SamplingBatch | None" = None,
        positions: tuple[int, ...] | None = None,
        pending: PendingTokens | None = None,
    ) -> "SamplingBatch":
        """Gather the parameters of the sequences.

        Args:
            sequences: the sequence of each row, in order. A sequence with drafts is repeated for each draft.
            last: an earlier batch of the same vocabulary and device. Its of_params is reused if the rows are the same. If these
                are also greedy and have no state, the batch itself is returned. None: nothing is reused.
            positions: the index in prompt + output of each row's new token. None: those of sampled_positions.
            pending: the newest tokens that only the device knows, which penalties count. None: the host knows all.
        """
        params = tuple([seq.params for seq in sequences])
        if last is not None and len(last.params) == len(params) and all(map(operator.is_, last.params, params)):
            of_params, is_stateful = last.of_params, last.is_stateful
            if last.row_groups.all_greedy and not is_stateful:
                return last
        else:
            of_params = columns_and_groups(params, vocab_size, device)
            is_stateful = any(is_stateful_row(seq) for seq in sequences)
        positions = tuple(sampled_positions(sequences)) if positions is None else positions
        if of_params["row_groups"].all_greedy:
            u, draws = on_device(torch.zeros(len(sequences), dtype=torch.float64), device), None
        else:
            u, draws = _uniform(tuple([seq.seed for seq in sequences]), positions, None if last is None else last.draws, device)
        return cls(
            sequences=tuple(sequences),
            params=params,
            of_params=of_params,
            **of_params,
            **(_entries(sequences, positions, vocab_size, device, pending) if is_stateful else {}),
            with_processors={row: seq for row, seq in enumerate(sequences) if is_stateful and seq.params.logits_processors},
            u=u,
            is_stateful=is_stateful,
            draws=draws,
        )

    @property
    def reads_tokens(self) -> bool:
        """Whether what limits the next tokens, or a function of a user, reads the tokens of this step."""
        return self.is_stateful and any(seq.num_free_tokens == 0 for seq in self.sequences)

    @property
    def masks_logits(self) -> bool:
        """Whether a stage before the temperature may overwrite logits without reading them."""
        return bool(self.with_processors) or any(mask is not None for mask in _MASKS(self))

    @property
    def changes_logits(self) -> bool:
        """Whether a stage before the temperature may change logits."""
        return self.is_stateful and (self.masks_logits or self.logit_bias is not None or self.token_counts is not None)

    def only_rows(self, rows: Int[Tensor, " rows"] | slice) -> "SamplingBatch":
        """Return some of the rows, with the columns that the stages from the temperature on and the draw read."""
        used = {name: getattr(self, name) for name in ("temperature", "min_p", "top_k", "top_p")}
        picked = {name: column[rows] for name, column in used.items() if column is not None}
        return SamplingBatch(max_top_k=self.max_top_k, u=self.u[rows], **picked)


def _uniform(
    seeds: tuple[int, ...], positions: tuple[int, ...], last: _Draws | None, device: torch.device
) -> tuple[Float[Tensor, " batch"], _Draws]:
    """Compute the uniform numbers of a step, and those of the next steps with them if the step before had the same rows.

    In numpy the numbers of _NUM_AHEAD steps take little more time than those of one.
    """
    if last is None or seeds != last.seeds or positions != tuple([position + 1 for position in last.positions]):
        return on_device(uniform(seeds, positions), device), _Draws(seeds, positions, None)
    ahead = last.ahead
    if ahead is None or not len(ahead):
        later = [position + i for i in range(_NUM_AHEAD) for position in positions]
        ahead = on_device(uniform(seeds * _NUM_AHEAD, later).view(_NUM_AHEAD, -1), device)
    return ahead[0], _Draws(seeds, positions, ahead[1:])


def is_stateful_row(seq: Sequence, num_output: int = 0) -> bool:
    """Whether a row may have entries or processors after so many tokens of the answer."""
    params = seq.params
    return bool(seq.constraints or params.logits_processors) or params.needs_sampling_state or params.min_tokens > num_output


def reads_pending(seq: Sequence) -> bool:
    """Whether the constraints of a sequence's next token read a token that only the device knows."""
    index = seq.num_tokens - 1 - len(seq.prompt_token_ids)  # of the newest token
    return seq.num_tokens > len(seq.token_ids) and any(each.num_free(index) == 0 for each in seq.constraints)


def sampled_positions(sequences: Iterable[Sequence]) -> list[int]:
    """Return the index in prompt + output of each row's new token. Rows after a sequence's first are those of its drafts."""
    positions: list[int] = []
    previous = None
    for seq in sequences:
        positions += (positions[-1] + 1 if seq is previous else seq.num_tokens,)
        previous = seq
    return positions


def columns_and_groups(params: tuple[SamplingParams, ...], vocab_size: int, device: torch.device) -> dict[str, Any]:
    """Return the fields of SamplingBatch that depend on the parameters alone."""
    numbers = np.array([_NUMBERS(p) for p in params]).reshape(len(params), 6)  # (0, 6) if no row draws: only prompt chunks
    temperature, min_p, top_p, repetition, frequency, presence = numbers.T  # [batch], float64
    top_k = np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64)
    greedy = temperature == 0
    for column in (temperature, repetition):  # fp32 would round some to 0 or infinity, and dividing by these gives NaN
        np.clip(column, _TINY, _HUGE, out=column)
    for column, off in ((temperature, 1.0), (min_p, 0.0), (top_k, vocab_size), (top_p, 1.0)):
        column[greedy] = off
    has_top_k, has_top_p = top_k < vocab_size, top_p < 1.0

    def tensor(column: np.ndarray, off: float | int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return None if (column == off).all() else on_device(torch.tensor(column, dtype=dtype), device)

    def rows(condition: np.ndarray) -> tuple[int, ...]:
        return tuple(condition.nonzero()[0].tolist())

    groups = RowGroups(
        greedy_rows=rows(greedy),
        top_k_rows=rows(has_top_k),
        top_p_rows=rows(has_top_p & ~has_top_k),
        other_rows=rows(~(greedy | has_top_k | has_top_p)),
    )
    return {
        "row_groups": groups,
        "greedy": tensor(greedy, False, torch.bool),
        "temperature": tensor(temperature, 1.0),
        "min_p": tensor(min_p, 0.0),
        "top_k": tensor(top_k, vocab_size, torch.int64),
        "max_top_k": int(top_k[has_top_k].max(initial=0)),
        "top_p": tensor(top_p, 1.0, torch.float64),
        "repetition_penalty": tensor(repetition, 1.0),
        "frequency_penalty": tensor(frequency, 0.0),
        "presence_penalty": tensor(presence, 0.0),
    }


def _entries(
    sequences: list[Sequence], positions: tuple[int, ...], vocab_size: int, device: torch.device, pending: PendingTokens | None
) -> dict[str, Any]:
    """Gather the lists of ids: those of the parameters and of constraints, and those that grow with the output.

    Returns the fields of SamplingBatch that hold them.
    """
    entries: defaultdict[str, list[tuple[int, Iterable[int], Iterable[float] | None]]] = defaultdict(list)
    masks: dict[int, Constraint] = {}
    for row, (seq, position) in enumerate(zip(sequences, positions, strict=True)):
        if seq.status is SequenceStatus.FINISHED:  # nobody reads its token
            continue
        params, index, must_end = seq.params, position - len(seq.prompt_token_ids), False
        for constraint in seq.constraints:
            must_end |= constraint.is_complete
            for name, ids in constraint.entries(seq, index).items():
                entries[name].append((row, ids, None))
            if constraint.has_mask:
                masks[row] = constraint
        if index < params.min_tokens and seq.stop_ids and not must_end:
            entries["min_tokens"].append((row, seq.stop_ids, None))
        if not params.needs_sampling_state:
            continue
        state = SamplingState.of(seq)
        if state.allowed_ids is not None:
            entries["allowed"].append((row, state.allowed_ids, None))
        if state.bias_ids is not None:
            entries["logit_bias"].append((row, state.bias_ids, state.bias_values))
        if state.token_counts is not None:
            entries["token_counts"].append((row, state.token_counts.ids, state.token_counts.output_counts))
    fields: dict[str, Any] = {name: _pack(rows, device) for name, rows in entries.items()}
    if pending and "token_counts" in entries:
        counted = {row for row, _, _ in entries["token_counts"]}
        fields["token_counts"] = _with_pending(fields["token_counts"], len(sequences), pending, counted)
    if masks:
        forbidden = np.empty((len(masks), vocab_size), dtype=np.uint8)
        for i, (row, constraint) in enumerate(masks.items()):  # 30 us each, while a GPU still runs the forward pass
            constraint.write_forbidden(forbidden[i], sequences[row].stop_ids)
        packed = on_device(torch.from_numpy(forbidden).view(torch.bool), device)
        fields["grammar"] = TokenMask(on_device(torch.tensor(list(masks)), device), packed)
    if "allowed" in entries:
        fields["allowed_rows"] = on_device(torch.tensor([row for row, _, _ in entries["allowed"]]), device)
    return fields


def _with_pending(counts: TokenEntries, num_rows: int, pending: PendingTokens, counted: set[int]) -> TokenEntries:
    """Count the newest tokens, which only the device knows. counted: the rows of which tokens are counted.

    An id that is new gets an entry. One that has an entry gets a second of the same number, so that both write the same logit.
    """
    assert counts.values is not None
    picked = [i for i, row in enumerate(pending.rows) if row in counted]
    if not picked:
        return counts
    rows, of_rows = on_device(torch.tensor([[pending.rows[i] for i in picked], picked]), counts.rows.device)
    ids = pending.token_ids[of_rows].clamp(min=0)  # -1 is no token, and its row is dropped later
    newest = torch.full((num_rows,), -1, device=ids.device).index_copy_(0, rows, ids)
    values = counts.values + (counts.ids == newest[counts.rows])
    earlier = torch.where(counts.ids == newest[counts.rows], counts.values, 0)
    numbers = torch.zeros(num_rows, dtype=torch.int64, device=ids.device).index_add_(0, counts.rows, earlier)
    return TokenEntries(
        torch.cat((counts.rows, rows)), torch.cat((counts.ids, ids)), torch.cat((values, numbers[rows] + 1))
    )  # fmt: skip


def _pack(rows: list[tuple[int, Any, Any]], device: torch.device) -> TokenEntries:
    """Join the lists of ids of the rows into a flat list of entries."""
    ids = [_tensor(ids) for _, ids, _ in rows]
    values = [_tensor(values) for _, _, values in rows if values is not None]
    row_numbers = torch.tensor([row for row, _, _ in rows]).repeat_interleave(torch.tensor([len(part) for part in ids]))
    packed_values = on_device(torch.cat(values), device) if values else None
    return TokenEntries(on_device(row_numbers, device), on_device(torch.cat(ids), device), packed_values)


def _tensor(numbers: Any) -> Tensor:
    """Convert to a tensor. An array is not copied, and must not grow until _pack has joined the tensor."""
    if isinstance(numbers, array):
        return torch.frombuffer(numbers, dtype=torch.float32 if numbers.typecode == "f" else torch.int64)
    return torch.tensor(list(numbers), dtype=torch.int64)
