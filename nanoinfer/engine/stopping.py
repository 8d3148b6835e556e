"""Decide when a sequence ends: EOS, stop ids and lengths are checked on ids, stop strings on text.

In: the ids and the text so far. Out: a Stop, or None, for request.py.
"""

from collections.abc import Sequence as Strings
from dataclasses import dataclass

from nanoinfer.outputs import FinishReason
from nanoinfer.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason why a sequence ended, in the terms of CompletionOutput."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


def check_token_ids(seq: Sequence) -> Stop | None:
    """Check whether the newest id ends the sequence: EOS first, then stop ids, then the length.

    The sampler forbids EOS and stop ids until min_tokens is reached.
    """
    newest = seq.token_ids[-1]
    if newest in seq.eos_token_ids and not seq.params.ignore_eos:
        return Stop("stop")
    if newest in (seq.params.stop_token_ids or ()):
        return Stop("stop", newest)
    if len(seq.token_ids) >= seq.max_num_tokens:
        return Stop("length")
    return None


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
        self._firsts = {stop[0] for stop in stops}
        self._include_in_output = include_in_output
        self._num_shown = 0

    def push(self, piece: str, *, examine: bool = True) -> str | None:
        """Append a piece of text. Returns the stop string that it completes, after cutting the text there.

        The match that completes first wins. Of several that complete together, the first in the list wins. With examine=False
        (min_tokens), the piece is appended without a search, so a match must complete in a later piece.
        """
        num_before = len(self.text)
        self.text += piece
        if not examine or not piece:
            return None
        first_end, matched = len(self.text) + 1, None
        for stop in self._stops:
            start = self.text.find(stop, max(num_before - len(stop) + 1, self._num_shown))
            if start >= 0 and start + len(stop) < first_end:
                first_end, matched = start + len(stop), stop
        if matched is not None:
            self.text = self.text[: first_end if self._include_in_output else first_end - len(matched)]
        return matched

    def release(self, *, everything: bool = False) -> str:
        """Return the text that is certain and was not released before. At the end of the sequence, return all the rest."""
        num_certain = len(self.text) if everything else len(self.text) - self._num_held()
        shown = self.text[self._num_shown : num_certain]
        self._num_shown = max(self._num_shown, num_certain)
        return shown

    @property
    def held(self) -> str:
        """The text that has not been released."""
        return self.text[self._num_shown :]

    def _num_held(self) -> int:
        """The length of the longest suffix of the text that is a proper prefix of a stop string."""
        for start in range(self._num_shown if self._stops else len(self.text), len(self.text)):  # what was shown is certain
            rest = self.text[start:]
            if rest[0] in self._firsts and any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                return len(rest)
        return 0
