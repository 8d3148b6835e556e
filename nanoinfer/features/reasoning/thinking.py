"""The reasoning at the beginning of an answer, which ends after thinking_token_budget tokens.

In: the tokens of the answer. Out: whether the next token must end the reasoning, for the stage end_thinking. The reasoning is
the text between two tags, as chat/parsing.py shows it.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanoinfer.chat.parsing import END_THINK, THINK, closes_thinking, opens_thinking
from nanoinfer.engine.inputs import InputProcessor, PreparedRequest, RequestFeature
from nanoinfer.engine.prompts import TokensPrompt
from nanoinfer.errors import InvalidValueError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Constraint, Sequence
from nanoinfer.tokenization.tokenizer import Tokenizer


@dataclass(slots=True)
class ReasoningState(Constraint):
    """The reasoning of one answer, as it grows.

    >>> texts = {1: b"<think>", 2: b"One,", 3: b" two."}
    >>> reasoning = ReasoningState(texts.__getitem__, b"<think>", b"</think>", end_id=7, budget=2)
    >>> for token_id in texts:
    ...     reasoning.advance(token_id)
    >>> reasoning.must_end(2), reasoning.must_end(3)
    (False, True)

    Attributes:
        token_bytes: returns the bytes of a token.
        begin_tag, end_tag: the bytes before and after the reasoning.
        end_id: the token that is end_tag.
        budget: the most tokens of the reasoning.
        begin: the number of tokens of the answer before the reasoning. None: the answer has not begun it.
        is_over: whether the reasoning has ended, or the answer has none.
    """

    token_bytes: Callable[[int], bytes]
    begin_tag: bytes
    end_tag: bytes
    end_id: int
    budget: int
    begin: int | None = None
    is_over: bool = False
    _num_tokens: int = 0  # of the answer
    _newest: bytes = b""  # the newest bytes, which may contain a part of a tag

    def advance(self, token_id: int) -> None:
        if self.is_over:
            return
        self._num_tokens += 1
        self._newest += self.token_bytes(token_id)
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

    def entries(self, seq: Sequence, index: int) -> Mapping[str, Iterable[int]]:
        return {"end_thinking": [self.end_id]} if self.must_end(index) else {}

    def num_free(self, index: int) -> int:
        begin = self._num_tokens + 1 if self.begin is None else self.begin  # the next token may begin the reasoning
        return sys.maxsize if self.is_over else max(begin + self.budget - 1 - index, 0)


class ReasoningFeature(RequestFeature):
    """Gives the requests with thinking_token_budget their reasoning."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def prepare(self, prepared: PreparedRequest, options: Mapping[str, Any]) -> PreparedRequest:
        budget, form = prepared.params.thinking_token_budget, prepared.params.structured_outputs
        end_id = end_of_reasoning(self._tokenizer, self._vocab_size)
        if self._tokenizer is None or end_id is None or budget is None:
            raise InvalidValueError(
                f"thinking_token_budget={budget} needs a tokenizer with the token {END_THINK}, which this model lacks; "
                "leave it out, and limit max_tokens, or set reasoning_effort to 'low' for gpt-oss, which thinks in a channel"
            )
        end = self._tokenizer.decode(
            prepared.prompt_token_ids[-16:], skip_special_tokens=False
        )  # white space may follow the tag
        reasoning = ReasoningState(
            self._tokenizer.token_bytes,
            THINK.encode(),
            END_THINK.encode(),
            end_id,
            budget,
            begin=0 if opens_thinking(end) else None,
            is_over=closes_thinking(end) or (form is not None and form.kind != "grammar"),  # only a grammar may have reasoning
        )
        return prepared.with_constraint(reasoning)


def end_of_reasoning(tokenizer: Tokenizer | None, vocab_size: int) -> int | None:
    """Return the token that ends reasoning, which thinking_token_budget needs. None: the model has none."""
    token_id = None if tokenizer is None else tokenizer.backend.token_to_id(END_THINK)
    return token_id if token_id is not None and token_id < vocab_size else None


def limit_thinking(inputs: InputProcessor, params: SamplingParams, prompt: TokensPrompt, share: float = 0.25) -> SamplingParams:
    """Return params with a share of the answer's tokens as thinking_token_budget, if they have none and it can be held.

    So reasoning leaves room for the call or the format that an answer must have.
    """
    if params.thinking_token_budget is not None or end_of_reasoning(inputs.tokenizer, inputs.vocab_size) is None:
        return params
    num_tokens = params.max_tokens or inputs.max_model_len - len(prompt["prompt_token_ids"])
    return replace(params, thinking_token_budget=int(max(num_tokens, 0) * share))
