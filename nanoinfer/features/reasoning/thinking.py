"""The reasoning at the beginning of an answer, which ends after thinking_token_budget tokens.

In: the bytes of each token of the answer. Out: whether the next token must end the reasoning, for the stage end_thinking. The
reasoning is the text between two tags, as chat/parsing.py shows it.
"""

import sys
from dataclasses import dataclass


@dataclass(slots=True)
class ReasoningState:
    """The reasoning of one answer, as it grows.

    >>> reasoning = ReasoningState(b"<think>", b"</think>", end_id=7, budget=2)
    >>> for data in (b"<think>", b"One,", b" two."):
    ...     reasoning.advance(data)
    >>> reasoning.must_end(2), reasoning.must_end(3)
    (False, True)

    Attributes:
        begin_tag, end_tag: the bytes before and after the reasoning.
        end_id: the token that is end_tag.
        budget: the most tokens of the reasoning.
        begin: the number of tokens of the answer before the reasoning. None: the answer has not begun it.
        is_over: whether the reasoning has ended, or the answer has none.
    """

    begin_tag: bytes
    end_tag: bytes
    end_id: int
    budget: int
    begin: int | None = None
    is_over: bool = False
    _num_tokens: int = 0  # of the answer
    _newest: bytes = b""  # the newest bytes, which may contain a part of a tag

    def advance(self, data: bytes) -> None:
        """Append a token with these bytes."""
        if self.is_over:
            return
        self._num_tokens += 1
        self._newest += data
        if self.begin is not None:
            self.is_over = self.end_tag in self._newest
            self._newest = self._newest[1 - len(self.end_tag) :]
        elif (answer := self._newest.lstrip()).startswith(self.begin_tag):
            self.begin, self._newest = self._num_tokens, b""
        else:
            self.is_over = not self.begin_tag.startswith(answer)

    def must_end(self, index: int) -> bool:
        """Whether the token at this index of the answer must be end_id. All tokens before it have been appended."""
        return not self.is_over and self.begin is not None and index >= self.begin + self.budget

    def num_free(self, index: int) -> int:
        """Return how many tokens after this index of the answer can be sampled before the tokens up to them are known."""
        begin = self._num_tokens + 1 if self.begin is None else self.begin  # the next token may begin the reasoning
        return sys.maxsize if self.is_over else max(begin + self.budget - 1 - index, 0)
