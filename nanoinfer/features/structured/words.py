"""Constraints on the newest tokens of an answer: bad_words, and repetition_detection, which ends the answer.

In: the parameters of a request. Out: a BadWords for the stage mask_bad_words, and a Repetition.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.engine.inputs import PreparedRequest, RequestFeature, check_ids
from nanoinfer.errors import InvalidValueError
from nanoinfer.outputs import FinishReason
from nanoinfer.sampling_params import RepetitionDetectionParams
from nanoinfer.scheduling import sequence
from nanoinfer.scheduling.sequence import Constraint
from nanoinfer.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class BadWords(Constraint):
    """Forbids the last id of each word whose other ids are at the end of the output. words: their token ids."""

    words: tuple[tuple[int, ...], ...]

    def entries(self, seq: sequence.Sequence, index: int) -> Mapping[str, Iterable[int]]:
        output = seq.output_token_ids
        ids = [word[-1] for word in self.words if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1])]
        return {"bad_words": ids} if ids else {}


class Repetition(Constraint):
    """Ends an answer whose last tokens are a pattern of an allowed size, min_count times in a row.

    >>> repetition = Repetition(RepetitionDetectionParams(max_pattern_size=2, min_count=2), min_tokens=0)
    >>> [repetition.advance(token_id) for token_id in (1, 5, 6, 5, 6)][-2:]
    [None, 'repetition']
    """

    def __init__(self, detection: RepetitionDetectionParams, min_tokens: int) -> None:
        self._detection, self._num_left = detection, min_tokens
        self._newest: tuple[int, ...] = ()

    def advance(self, token_id: int) -> FinishReason | None:
        detection = self._detection
        newest = self._newest = (*self._newest, token_id)[-max(detection.max_pattern_size * detection.min_count, 1) :]
        self._num_left -= 1
        for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
            num = size * detection.min_count
            if num > len(newest) or self._num_left > 0:
                break
            if newest[-1] == newest[-1 - size] and newest[-num:-size] == newest[size - num :]:
                return "repetition"
        return None

    def num_free(self, index: int) -> int:
        return sys.maxsize


class WordsFeature(RequestFeature):
    """Gives requests with bad_words or repetition_detection their constraints."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def prepare(self, prepared: PreparedRequest, options: Mapping[str, Any]) -> PreparedRequest:
        params = prepared.params
        if words := self._token_ids(params.bad_words or ()):
            prepared = prepared.with_constraint(BadWords(words))
        if isinstance(params.repetition_detection, RepetitionDetectionParams):
            prepared = prepared.with_constraint(Repetition(params.repetition_detection, params.min_tokens))
        return prepared

    def _token_ids(self, words: Iterable[str | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each word. A word with an id that the model lacks can never be generated, and is left out."""
        found: list[tuple[int, ...]] = []
        for word in words:
            if not isinstance(word, str):
                check_ids("bad_words", word, self._vocab_size)
                found.append(tuple(word))
            elif self._tokenizer is None:
                raise InvalidValueError(f"bad_words has {word!r}, but there is no tokenizer; give lists of token ids")
            else:
                found += self._tokenizer.spellings(word)
        return tuple(ids for ids in found if max(ids) < self._vocab_size)
