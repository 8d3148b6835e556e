"""Decide when a sequence ends: EOS, stop ids and lengths are checked on ids, stop strings on text.

In: the ids and the text so far. Out: a Stop, or None, for request.py.
"""

from collections.abc import Sequence as Strings
from dataclasses import dataclass
from functools import lru_cache

from nanoinfer.outputs import FinishReason
from nanoinfer.sampling_params import RepetitionDetectionParams
from nanoinfer.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason why a sequence ended, in the terms of CompletionOutput."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


def check_token_ids(seq: Sequence) -> Stop | None:
    """Check whether the newest id ends the sequence: EOS first, then stop ids, then the length, then a repetition.

    The sampler forbids EOS and stop ids until min_tokens is reached.
    """
    newest = seq.token_ids[-1]
    if newest in seq.eos_token_ids and not seq.params.ignore_eos:
        return Stop("stop")
    if newest in (seq.params.stop_token_ids or ()):
        return Stop("stop", newest)
    if len(seq.token_ids) >= seq.max_num_tokens:
        return Stop("length")
    detection = seq.params.repetition_detection
    if isinstance(detection, RepetitionDetectionParams) and seq.num_output_tokens >= seq.params.min_tokens:
        longest = detection.max_pattern_size * detection.min_count
        start = max(len(seq.prompt_token_ids), len(seq.token_ids) - longest)
        if ends_in_repetition(seq.token_ids[start:], detection):
            return Stop("repetition")
    return None


def ends_in_repetition(token_ids: list[int], detection: RepetitionDetectionParams) -> bool:
    """Whether the last tokens are a pattern of an allowed size, min_count times in a row.

    >>> ends_in_repetition([1, 5, 6, 5, 6], RepetitionDetectionParams(max_pattern_size=2, min_count=2))
    True
    """
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        num = size * detection.min_count
        if num > len(token_ids):
            return False
        if token_ids[-1] == token_ids[-1 - size] and token_ids[-num:-size] == token_ids[size - num :]:
            return True
    return False


@lru_cache(maxsize=4)
class _Beginnings:
    """The beginnings of stop strings, numbered from 0, which is "". A text is read once (Aho and Corasick, 1975)."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._longer: list[dict[str, int]] = [{}]  # next character -> the beginning that is longer by it
        self._complete = set[int]()  # those with a stop string at the end
        for stop in stops:
            at = 0
            for character in stop:
                at = self._longer[at].setdefault(character, len(self._longer))
                if at == len(self._longer):
                    self._longer.append({})
            self._complete.add(at)
        self._shorter = [0] * len(self._longer)  # the longest shorter beginning with which each ends
        self.num_held = [0] * len(self._longer)  # characters at the end of each that may become a stop string
        for at in (by_size := [0]):
            for character, longer in self._longer[at].items():
                by_size.append(longer)
                self._shorter[longer], is_complete = self.read(self._shorter[at], character) if at else (0, False)
                self._complete |= {longer} if is_complete else set()
                self.num_held[longer] = self.num_held[at] + 1 if self._longer[longer] else self.num_held[self._shorter[longer]]

    def read(self, at: int, text: str) -> tuple[int, bool]:
        """Go on from a beginning. Returns the beginning with which the text then ends, and whether a stop string completes."""
        is_complete = False
        for character in text:
            while at and character not in self._longer[at]:
                at = self._shorter[at]
            at = self._longer[at].get(character, 0)
            is_complete = is_complete or at in self._complete
        return at, is_complete


class StopStrings:
    """The output text as it grows, cut where a stop string completes.

    Text that may become part of a stop string is held, so released text is never taken back.

    >>> text = StopStrings(["END"], include_in_output=False)
    >>> text.push("The E"), text.release()
    (None, 'The ')
    >>> text.push("ND of it"), text.release()
    ('END', '')
    >>> text.text
    'The '
    """

    def __init__(self, stops: Strings[str], *, include_in_output: bool) -> None:
        self.text = ""
        self._stops = stops
        self._include_in_output = include_in_output
        self._beginnings = _Beginnings(tuple(stops))  # num_held: how much of the end of each one waits
        self._num_shown = self._num_read = self._at = 0

    def push(self, piece: str, *, examine: bool = True) -> str | None:
        """Append a piece of text. Returns the stop string that it completes, after cutting the text there.

        The match that completes first wins. Of several that complete together, the first in the list wins. With examine=False
        (min_tokens), the piece is appended without a search, so a match must complete in a later piece.
        """
        num_before = len(self.text)
        self.text += piece
        if not examine or not piece or not self._stops:
            return None
        first_end, matched = len(self.text) + 1, None
        for stop in self._completed():
            start = self.text.find(stop, max(num_before - len(stop) + 1, 0))
            if start >= 0 and start + len(stop) < first_end:
                first_end, matched = start + len(stop), stop
        if matched is not None:
            self.text = self.text[: first_end if self._include_in_output else first_end - len(matched)]
        return matched

    def release(self, *, everything: bool = False) -> str:
        """Return the text that is certain and was not released before. At the end of the sequence, return all the rest."""
        num_certain = len(self.text) if everything or not self._stops else len(self.text) - self._num_held()
        shown = self.text[self._num_shown : num_certain]
        self._num_shown = max(self._num_shown, num_certain)
        return shown

    @property
    def held(self) -> str:
        """The text that has not been released."""
        return self.text[self._num_shown :]

    def _num_held(self) -> int:
        """The length of the longest suffix of the text that is a proper prefix of a stop string."""
        self._completed()
        return self._beginnings.num_held[self._at]

    def _completed(self) -> Strings[str]:
        """Read the text that was not read yet. Returns the stop strings, or none if none of them completes in it."""
        new, self._num_read = self.text[self._num_read :], len(self.text)
        self._at, is_complete = self._beginnings.read(self._at, new)
        return self._stops if is_complete else ()
