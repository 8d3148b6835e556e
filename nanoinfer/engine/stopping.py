"""Decide when a sequence ends: EOS, stop ids and lengths are checked on ids, stop strings on text.

In: one sampled id at a time. Out: an Answer, whose text grows until it has a Stop.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.outputs import FinishReason
from nanoinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from nanoinfer.tokenization.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason why a sequence ended, in the terms of CompletionOutput."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


class Answer:
    """A sequence as text. stop: why it ended. None: it runs."""

    def __init__(self, seq: Sequence, detokenizer: "Detokenizer") -> None:
        self.seq, self.detokenizer = seq, detokenizer
        self.stop: Stop | None = None
        self.text = StopStrings(seq.params.stop or ())
        self._special_stops = detokenizer.skipped_among(seq.params.stop or ())

    def advance(self, token_id: int) -> None:
        """Process the newest id of the sequence: rules for ids, whole characters, stop strings."""
        seq = self.seq
        examine = len(seq.token_ids) - len(seq.prompt_token_ids) > seq.params.min_tokens  # earlier no stop string completes
        stop = self.check_id(token_id, examine)
        ends_by_id = stop is not None and stop.finish_reason == "stop"
        text = self.ending_text(token_id) if ends_by_id else self.detokenizer.push(token_id)
        if stop is not None:
            text += self.detokenizer.finish()
        matched = self.text.push(text, examine=examine)
        self.stop = Stop("stop", matched) if matched else stop

    def finish(self, stop: Stop) -> None:
        """End the answer without a further id, with the text that was held."""
        self.text.push(self.detokenizer.finish(), examine=False)
        self.stop = stop

    def check_id(self, token_id: int, examine: bool) -> Stop | None:
        """Check whether an id ends the answer: EOS first, then stop ids, stop strings that are special tokens, the length.

        The sampler forbids EOS and stop ids until min_tokens is reached.
        """
        seq, params = self.seq, self.seq.params
        if token_id in seq.eos_token_ids and not params.ignore_eos:
            return Stop("stop")
        if token_id in (params.stop_token_ids or ()):
            return Stop("stop", token_id)
        if examine and token_id in self._special_stops:  # a text without special tokens does not contain them
            return Stop("stop", self._special_stops[token_id])
        return Stop("length") if len(seq.token_ids) >= seq.max_num_tokens else None

    def ending_text(self, token_id: int) -> str:
        """Return the text of an id that ends the answer. It is dropped."""
        return ""


class StopStrings:
    """The output text as it grows, cut where a stop string completes.

    Text that may become part of a stop string is held, so released text is never taken back.

    >>> text = StopStrings(["END"])
    >>> text.push("The E"), text.release()
    (None, 'The ')
    >>> text.push("ND of it"), text.release()
    ('END', '')
    >>> text.text
    'The '
    """

    def __init__(self, stops: ListLike[str]) -> None:
        self.text = ""
        self._stops = stops
        self._firsts = {stop[0] for stop in stops}
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
            self.text = self.text[: first_end - len(matched)]
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


class KeptStopStrings(StopStrings):
    """The text for include_stop_str_in_output, which ends after the stop string."""

    def push(self, piece: str, *, examine: bool = True) -> str | None:
        matched = super().push(piece, examine=examine)
        self.text += matched or ""
        return matched
