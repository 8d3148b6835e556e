"""Constraints that compare an answer's newest tokens: bad_words, no_repeat_ngram_size and repetition_detection."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from nanoinfer.engine.inputs import check_ids
from nanoinfer.errors import InvalidPromptError, InvalidValueError
from nanoinfer.features.structured.params import RepetitionDetectionParams
from nanoinfer.outputs import FinishReason
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Constraint, Sequence
from nanoinfer.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class BadWords(Constraint):
    """Forbids the last id of each word whose other ids are at the end of the output. words: their token ids."""

    words: tuple[tuple[int, ...], ...]

    def entries(self, seq: Sequence, index: int) -> Mapping[str, Iterable[int]]:
        output = seq.output_token_ids
        ids = [word[-1] for word in self.words if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1])]
        return {"bad_words": ids} if ids else {}


class NGrams(Constraint):
    """Forbids the ids that would repeat a run of `size` ids of prompt + output. It reads each token once."""

    def __init__(self, size: int) -> None:
        self._size, self._num_read = size, 0
        self._followers: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)  # the ids after each run of size - 1 ids

    def copy(self) -> "NGrams":
        return NGrams(self._size)

    def repeated(self, token_ids: list[int]) -> set[int]:
        """Return the ids that have followed the last size - 1 of the ids before."""
        newest = len(token_ids) - self._size + 1
        for start in range(self._num_read, newest):
            *run, follower = token_ids[start : start + self._size]
            self._followers[tuple(run)].add(follower)
        self._num_read = max(newest, 0)
        return self._followers.get(tuple(token_ids[newest:]), set()) if newest >= 0 else set()

    def entries(self, seq: Sequence, index: int) -> Mapping[str, Iterable[int]]:
        ids = self.repeated(seq.token_ids)
        return {"repeated_ngrams": ids} if ids else {}


class Repetition(Constraint):
    """Ends an answer whose last tokens are a pattern of an allowed size, min_count times in a row."""

    def __init__(self, detection: RepetitionDetectionParams, min_tokens: int) -> None:
        self._detection, self._num_left = detection, min_tokens
        self._newest: list[int] = []

    def advance(self, token_id: int) -> FinishReason | None:
        longest = self._detection.max_pattern_size * self._detection.min_count
        self._newest = [*self._newest, token_id][-longest:]
        self._num_left -= 1
        return "repetition" if self._num_left <= 0 and self._detection.ends(self._newest) else None

    def num_free(self, index: int) -> int:
        return sys.maxsize


def word_constraints(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> Iterator[Constraint]:
    """Yield the constraints of a request. A bad word with an id that the model lacks cannot be generated, and is left out."""
    words: list[tuple[int, ...]] = []
    for word in params.bad_words or ():
        if not isinstance(word, str):
            check_ids("bad_words", word, vocab_size)
            words.append(tuple(word))
        elif tokenizer is None:
            raise InvalidValueError(f"bad_words has {word!r}, but there is no tokenizer; give lists of token ids")
        else:
            words += spellings_of(word, tokenizer)
    if possible := tuple(ids for ids in words if max(ids) < vocab_size):
        yield BadWords(possible)
    if params.no_repeat_ngram_size:
        yield NGrams(params.no_repeat_ngram_size)
    if isinstance(params.repetition_detection, RepetitionDetectionParams):
        yield Repetition(params.repetition_detection, params.min_tokens)


def spellings_of(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the ids of a word at the beginning of a text, after a space and after a line break.

    The number of ids differs. Byte-level tokenizers have a single token for many words with a space before them, and several
    without it. Tokenizers that write a space before every text encode a word differently after a line break.
    """
    word = word.lstrip()
    try:
        at_start, after_space, line_break, after_line_break = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word, "\n", "\n" + word)
        )
    except InvalidPromptError as error:
        raise InvalidValueError(f"bad_words: {error}") from error
    if not at_start:
        raise InvalidValueError(f"bad_words has {word!r}, for which the tokenizer has no tokens; leave it out")
    spellings = [at_start, after_space]
    num = len(line_break)
    if len(after_line_break) > num and after_line_break[:num] == line_break:
        spellings.append(after_line_break[num:])
    return list(dict.fromkeys(spellings))
