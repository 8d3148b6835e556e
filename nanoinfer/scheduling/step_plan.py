"""What a step computes, as plain data that the scheduler or beam search makes and an Executor carries out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nanoinfer.scheduling.sequence import Sequence


@dataclass(slots=True)  # not frozen, so that making an instance takes a third of the time
class ScheduledSequence:
    """A sequence of the step, and the number of its next tokens, not yet in the cache, that the step computes."""

    sequence: Sequence
    num_new_tokens: int
    # a guess at the tokens that follow. Each is computed as another single-token row after the sequence's newest token. Only a
    # decode step has drafts
    draft_token_ids: tuple[int, ...] = ()

    @property
    def num_packed_tokens(self) -> int:
        return self.num_new_tokens + len(self.draft_token_ids)

    def num_accepted(self, sampled_token_ids: list[int]) -> int:
        """Return the number of drafts before the first that differs from the token sampled at its position.

        Args:
            sampled_token_ids: the tokens that were sampled after the newest token and after each draft.

        >>> seq = Sequence("r0", [5], SamplingParams(), seed=0, max_num_tokens=9)
        >>> ScheduledSequence(seq, 1, (6, 7, 8)).num_accepted([6, 7, 1, 9])
        2
        """
        num = 0
        while num < len(self.draft_token_ids) and self.draft_token_ids[num] == sampled_token_ids[num]:
            num += 1
        return num


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The packed tokens start .. stop - 1, which are the tokens of the sequence's prompt from `position` on."""

    sequence: Sequence
    start: int
    stop: int
    position: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step."""

    # single-token sequences, then prompt chunks, each group oldest first. Packed tokens have the same order
    scheduled: tuple[ScheduledSequence, ...]
    # the (sequence, packed index) pairs whose hidden rows reach the LM head and the sampler. A chunk that does not end its
    # prompt has no row. Forks have the index of the sequence they come from. A sequence with drafts has a row for its newest
    # token and a row for each draft
    rows: tuple[tuple[Sequence, int], ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()  # the (from, to) blocks that are copied before the forward pass
    # the Sampler (sampling/sampler.py) that chooses the tokens. None: the executor's own
    sampler: Callable[..., Any] | None = None

    @property
    def has_further_rows(self) -> bool:
        """Whether a sequence has more than one row, by drafts."""
        return bool([item for item in self.scheduled if item.draft_token_ids])

    @property
    def num_decode_tokens(self) -> int:
        return sum([1 + len(item.draft_token_ids) for item in self.scheduled if item.num_new_tokens == 1])

    @property
    def num_prefill_tokens(self) -> int:
        return sum([item.num_new_tokens for item in self.scheduled if item.num_new_tokens > 1])


def rows_of(scheduled: Iterable[ScheduledSequence]) -> tuple[tuple[Sequence, int], ...]:
    """Return the sequences whose last known token this step computes, and their forks, with that token's packed index.

    The drafts of a sequence follow it, with their own indices.
    """
    rows = []
    end = 0
    for item in scheduled:
        end += item.num_new_tokens
        if item.num_new_tokens == item.sequence.num_new_tokens:
            rows += [(seq, end - 1) for seq in (item.sequence, *item.sequence.forks)]
        for _ in item.draft_token_ids:
            rows.append((item.sequence, end))
            end += 1
    return tuple(rows)


def accepted_rows(plan: StepPlan, token_ids: list[int]) -> Iterator[tuple[Sequence, range]]:
    """Yield each sequence with its rows whose tokens count: that of its newest token, and those of accepted drafts.

    token_ids: the token that was sampled for each row.
    """
    items, end = {item.sequence: item for item in plan.scheduled if item.draft_token_ids}, 0
    for first, (seq, _) in enumerate(plan.rows):
        if first >= end:  # else the row belongs to a draft of the sequence before
            item = items.get(seq, ScheduledSequence(seq, 1))
            end = first + 1 + len(item.draft_token_ids)
            yield seq, range(first, first + 1 + item.num_accepted(token_ids[first:end]))


def prompt_rows_of(scheduled: Iterable[ScheduledSequence]) -> tuple[PromptRows, ...]:
    """Return the prompt tokens whose rows are read. The sampler alone reads the last row of a prompt that is answered."""
    rows = []
    start = 0
    for item in scheduled:
        seq = item.sequence
        if seq.reader and seq.needs_all_rows:
            end = len(seq.prompt_token_ids) - seq.is_answered
            num = min(item.num_new_tokens, end - seq.num_computed_tokens)
            if num > 0:
                rows.append(PromptRows(seq, start, start + num, seq.num_computed_tokens))
        start += item.num_new_tokens + len(item.draft_token_ids)
    return tuple(rows)
