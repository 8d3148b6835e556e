"""The reasoning at the beginning of an answer, which ends after thinking_token_budget tokens.

In: the tokens of the answer. Out: whether the next token must end the reasoning, for the stage end_thinking. The reasoning is
the text between two tags, as features/chat/parsing.py shows it.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.chat.messages import end_of_reasoning
from nanoinfer.features.chat.parsing import END_THINK, THINK, closes_thinking, opens_thinking
from nanoinfer.scheduling.sequence import Constraint, Sequence
from nanoinfer.tokenization.tokenizer import Tokenizer

_BEGIN, _END = THINK.encode(), END_THINK.encode()


@dataclass(slots=True)
class ReasoningState(Constraint):
    """The reasoning of one answer, as it grows."""

    token_bytes: Callable[[int], bytes]
    end_id: int  # the token that is the tag after the reasoning
    budget: int  # the most tokens of the reasoning
    begin: int | None = None  # the number of tokens of the answer before the reasoning. None: the answer has not begun it
    is_over: bool = False  # whether the reasoning has ended, or the answer has none
    _num_tokens: int = 0  # of the answer
    _newest: bytes = b""  # the newest bytes, which may contain a part of a tag

    def advance(self, token_id: int) -> None:
        if self.is_over:
            return
        self._num_tokens += 1
        self._newest += self.token_bytes(token_id)
        if self.begin is not None:
            self.is_over = _END in self._newest
            self._newest = self._newest[1 - len(_END) :]
        elif (answer := self._newest.lstrip()).startswith(_BEGIN):
            self.begin, self._newest = self._num_tokens, b""
        else:
            self.is_over = not _BEGIN.startswith(answer)

    def must_end(self, index: int) -> bool:
        """Whether the token at this index of the answer must be end_id. All tokens before it have been appended."""
        return not self.is_over and self.begin is not None and index >= self.begin + self.budget

    def entries(self, seq: Sequence, index: int) -> Mapping[str, Iterable[int]]:
        return {"end_thinking": [self.end_id]} if self.must_end(index) else {}

    def num_free(self, index: int) -> int:
        begin = self._num_tokens + 1 if self.begin is None else self.begin  # the next token may begin the reasoning
        return sys.maxsize if self.is_over else max(begin + self.budget - 1 - index, 0)


def reasoning_of(prepared: PreparedRequest, tokenizer: Tokenizer | None, vocab_size: int) -> ReasoningState:
    """Return the constraint of a request's thinking_token_budget. Raises: InvalidValueError if no token can end it."""
    budget, form = prepared.params.thinking_token_budget, prepared.params.structured_outputs
    end_id = end_of_reasoning(tokenizer, vocab_size)
    if tokenizer is None or end_id is None or budget is None:
        raise InvalidValueError(
            f"thinking_token_budget={budget} needs a tokenizer with the token {END_THINK}, which this model lacks; "
            "leave it out, and limit max_tokens, or set reasoning_effort to 'low' for gpt-oss, which thinks in a channel"
        )
    end = tokenizer.decode(prepared.prompt_token_ids[-16:], skip_special_tokens=False)  # whitespace may follow the tag
    begin = 0 if opens_thinking(end) else None
    is_over = closes_thinking(end) or (form is not None and form.kind != "grammar")  # only a grammar may have reasoning
    return ReasoningState(tokenizer.token_bytes, end_id, budget, begin, is_over)
