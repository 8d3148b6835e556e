"""Per-sequence state of the stages: token counts and n-grams. Each new token is added once, and nothing is recounted.

In: a sequence's ids, as they grow. Out: the distinct ids with their counts, the ids that would repeat an n-gram, and the lists
of ids among the parameters as arrays. It is plain Python. A preempted sequence keeps its state, since it keeps its tokens.
"""

from array import array

from nanoinfer.scheduling.sequence import Sequence


class SamplingState:
    """The state of one sequence. A field that its parameters do not use is None and costs nothing."""

    def __init__(self, seq: Sequence) -> None:
        params = seq.params
        self.token_counts = TokenCounts() if params.has_penalty else None
        self.ngrams = NGrams(params.no_repeat_ngram_size) if params.no_repeat_ngram_size else None
        self.allowed_ids = None if params.allowed_token_ids is None else array("q", sorted(set(params.allowed_token_ids)))
        self.bias_ids = array("q", params.logit_bias) if params.logit_bias else None
        self.bias_values = array("f", params.logit_bias.values()) if params.logit_bias else None
        self._num_known = 0

    @classmethod
    def of(cls, seq: Sequence) -> "SamplingState":
        """Return the sequence's state, updated to its newest token."""
        if not isinstance(sampling_state := seq.sampling_state, cls):
            seq.sampling_state = sampling_state = cls(seq)
        if sampling_state.token_counts is not None or sampling_state.ngrams is not None:
            sampling_state._catch_up(seq)
        return sampling_state

    def _catch_up(self, seq: Sequence) -> None:
        for i in range(self._num_known, len(seq.token_ids)):
            if self.token_counts is not None:
                self.token_counts.add(seq.token_ids[i], is_output=i >= len(seq.prompt_token_ids))
            if self.ngrams is not None:
                self.ngrams.add(seq.token_ids, i)
        self._num_known = len(seq.token_ids)


class TokenCounts:
    """The distinct ids of prompt + output, in order of appearance, and how often each is in the output.

    >>> counts = TokenCounts()
    >>> for token_id, is_output in [(7, False), (5, False), (7, True), (7, True)]:
    ...     counts.add(token_id, is_output=is_output)
    >>> list(counts.ids), list(counts.output_counts)
    ([7, 5], [2, 0])
    """

    def __init__(self) -> None:
        self.ids = array("q")
        self.output_counts = array("q")
        self._index: dict[int, int] = {}  # id -> its index in ids

    def add(self, token_id: int, *, is_output: bool) -> None:
        index = self._index.setdefault(token_id, len(self.ids))
        if index == len(self.ids):
            self.ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[index] += is_output


class NGrams:
    """The ids that have followed each run of size - 1 ids.

    >>> ngrams, token_ids = NGrams(2), [5, 6, 5]
    >>> for i in range(3):
    ...     ngrams.add(token_ids, i)
    >>> ngrams.banned(token_ids)
    {6}
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._followers: dict[tuple[int, ...], set[int]] = {}

    def add(self, token_ids: list[int], index: int) -> None:
        """Add the token at this index. All tokens before it have been added."""
        start = index - self._size + 1
        if start >= 0:
            self._followers.setdefault(tuple(token_ids[start:index]), set()).add(token_ids[index])

    def banned(self, token_ids: list[int]) -> set[int]:
        """Return the ids that would complete the last size - 1 ids to an n-gram that occurred before."""
        start = len(token_ids) - self._size + 1
        return self._followers.get(tuple(token_ids[start:]), set()) if start >= 0 else set()
