"""Drafts without a model: the tokens that followed the last earlier occurrence of the sequence's newest tokens.

In: sequences. Out: draft token ids. This pays where an answer repeats its prompt, as in edited code, quotations and summaries.

    tokens   the cat sat on the mat . the cat ...
                     ^^^^^^^^^^^^^^           the newest two tokens are "the cat": the draft is "sat on the mat"

Source: prompt lookup decoding, Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding
"""

from nanoinfer.features.drafts.config import SpeculativeConfig
from nanoinfer.scheduling.sequence import Sequence


class NGramProposer:
    """Proposes the tokens that followed the longest earlier n-gram, with n from prompt_lookup_min to prompt_lookup_max."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._sizes = range(config.prompt_lookup_min, config.prompt_lookup_max + 1)
        self._indices: dict[Sequence, NGramIndex] = {}

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        drafts = []
        for seq, limit in zip(sequences, limits, strict=True):
            index = self._indices.get(seq)
            if index is None:
                index = self._indices[seq] = NGramIndex(self._sizes)
            drafts.append(index.continuation(seq.token_ids, limit))
        return drafts

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq, None)


class NGramIndex:
    """The last position where each n-gram of one sequence was followed by a token. Every token is indexed once.

    >>> NGramIndex(range(2, 4)).continuation([1, 2, 3, 4, 5, 1, 2], 3)
    [3, 4, 5]
    >>> NGramIndex(range(2, 4)).continuation([1, 2, 1, 2], 5)  # a draft that outgrows the text repeats itself
    [1, 2, 1, 2, 1]
    """

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._followers: dict[tuple[int, ...], int] = {}  # n-gram -> the index of the token after it
        self._num_indexed = 0

    def continuation(self, token_ids: list[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that followed the longest indexed n-gram that token_ids ends with.

        token_ids must begin with the ids of the previous call.
        """
        for index in range(self._num_indexed, len(token_ids)):
            for size in self._sizes:
                if size <= index:
                    self._followers[tuple(token_ids[index - size : index])] = index
        self._num_indexed = len(token_ids)
        for size in reversed(self._sizes):
            start = self._followers.get(tuple(token_ids[-size:]))
            if start is not None:
                followers = token_ids[start : start + limit]
                return (followers * -(-limit // len(followers)))[:limit]
        return []
