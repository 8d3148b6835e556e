"""Measure what a draft costs while decoding, because it depends on the machine, the model, the load and the lengths.

In: the number of rows and the seconds of each decode step. Out: how many drafts are expected to pay.
"""

import time
from typing import TYPE_CHECKING

from nanoinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from nanoinfer.speculative.speculator import Proposer

MEMORY = 0.95  # the weight of the old averages when a step is added
OUTLIER = 4  # a longer step counts as this many times the average, because something was compiled or others had the CPU
FADING = 0.995  # decay per step that says nothing about the cost of a row, so that drafts are tried again


class StepCost:
    """A linear model of a decode step's seconds, a + b * num_rows, fitted to the latest steps by least squares."""

    def __init__(self) -> None:
        self.seconds_per_row = 0.0  # the slope b
        self.seconds_per_draft_token = 0.0  # the time to propose it
        self._rows, self._rows_squared, self._seconds, self._rows_times_seconds, self._tokens = (0.0,) * 5  # averages
        self._is_empty = True

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Add a decode step that computed num_rows rows and gave num_tokens tokens in `seconds`."""
        if not self._is_empty:
            seconds = min(seconds, OUTLIER * self._seconds)
        old = 0.0 if self._is_empty else MEMORY
        self._is_empty = False
        self._rows += (1 - old) * (num_rows - self._rows)
        self._rows_squared += (1 - old) * (num_rows**2 - self._rows_squared)
        self._seconds += (1 - old) * (seconds - self._seconds)
        self._rows_times_seconds += (1 - old) * (num_rows * seconds - self._rows_times_seconds)
        self._tokens += (1 - old) * (num_tokens - self._tokens)
        variance = self._rows_squared - self._rows**2
        if variance > 0.1:
            self.seconds_per_row = max((self._rows_times_seconds - self._rows * self._seconds) / variance, 0.0)
        else:  # all steps had the same number of rows
            self.seconds_per_row *= FADING
            self.seconds_per_draft_token *= FADING

    def time_proposal(self, proposer: "Proposer", sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return proposer.propose(sequences, limits), and measure the time that it takes."""
        start = time.perf_counter()
        drafts = proposer.propose(sequences, limits)
        seconds = (time.perf_counter() - start) / max(sum(map(len, drafts)), 1)
        old = MEMORY if self.seconds_per_draft_token else 0.0
        self.seconds_per_draft_token += (1 - old) * (seconds - self.seconds_per_draft_token)
        return drafts

    def num_that_pay(self, acceptance: float, limit: int) -> int:
        """Return the number of drafts, up to `limit`, whose last one is still worth its time.

        Draft i counts only if all before it are right, so it gives acceptance^i tokens on average. It pays if that is more than
        the average number of tokens that the engine generates in the time of one draft.
        """
        seconds = self.seconds_per_row + self.seconds_per_draft_token
        tokens_in_that_time = self._tokens / self._seconds * seconds if self._seconds else 0.0
        num, expected = 0, acceptance
        while num < limit and expected > tokens_in_that_time:
            num, expected = num + 1, expected * acceptance
        return num
