"""The log-probabilities of a prompt's own tokens, for params.prompt_logprobs and for LLM.compute_logprobs.

In: the hidden rows of a prompt, as steps compute them. Out: RequestOutput.prompt_logprobs, or plain numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanoinfer.engine.inputs import PreparedRequest, RequestFeature
from nanoinfer.engine.request import with_token_texts
from nanoinfer.errors import InvalidValueError
from nanoinfer.execution.executor import PromptReader
from nanoinfer.outputs import LogprobsOnePosition, RequestOutput, TokenLogprobs
from nanoinfer.scheduling.step_plan import PromptRows
from nanoinfer.tokenization.detokenizer import Detokenizer
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.sampling.routes import HeadRows

PROMPT_LOGITS = 2**22  # the most logits of a prompt that are computed at a time: 16 MB


class PromptLogprobs(RequestFeature):
    """Gives a request with params.prompt_logprobs the reader that computes them."""

    def __init__(self, vocab_size: int, tokenizer: Tokenizer | None) -> None:
        self._vocab_size, self._tokenizer = vocab_size, tokenizer

    def prepare(self, prepared: PreparedRequest, options: Any) -> PreparedRequest:
        params, num_top = prepared.params, prepared.params.prompt_logprobs
        if num_top is None:
            return prepared
        if num_top > self._vocab_size:
            raise InvalidValueError(
                f"prompt_logprobs must be at most the vocabulary's {self._vocab_size}, got {num_top}; use -1 for all"
            )
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
            detokenizer.push(prepared.prompt_token_ids[0])
        return replace(prepared, reader=PromptLogprobsReader(self._vocab_size if num_top == -1 else num_top, detokenizer))


class PromptLogprobsReader(PromptReader):
    """Reads what one request asks for. positions: an entry for each token that was read, None for the prompt's first."""

    def __init__(self, num_top: int, detokenizer: Detokenizer | None) -> None:
        """detokenizer: has received the prompt's first token. None: the entries have no texts."""
        self.positions: list[LogprobsOnePosition | None] = [None]
        self._num_top, self._detokenizer = num_top, detokenizer

    def read(self, executor: "LocalExecutor", hidden: "Tensor", chunk: PromptRows, ends: "HeadRows", row: int | None) -> None:
        for entry in read_logprobs(executor, hidden, chunk, len(self.positions) - 1, self._num_top):
            self.positions.append(with_token_texts(entry, self._detokenizer))
            if self._detokenizer is not None:
                self._detokenizer.push(entry.ids[0])

    def complete(self, output: RequestOutput) -> None:
        output.prompt_logprobs = self.positions


def read_logprobs(
    executor: "LocalExecutor", hidden: "Tensor", chunk: PromptRows, num_read: int, num_top: int, temperature: float = 1.0
) -> Iterator[TokenLogprobs]:
    """Compute the log-probabilities of the prompt tokens that follow a chunk's rows, a limited number of rows at a time.

    Args:
        hidden: the step's hidden rows, [num_tokens, hidden].
        num_read: the number of the prompt's rows that were read before, also before a preemption. They are skipped.
        num_top: the number of most probable ids in each entry, besides the token.
    """
    from nanoinfer.sampling.logprobs import token_logprobs
    from nanoinfer.sampling.stages import divided

    token_ids, first = chunk.sequence.prompt_token_ids, chunk.start - chunk.position  # first: the row of position 0
    end = min(chunk.stop, first + len(token_ids) - 1)  # no token follows the prompt's last row
    num_together = max(PROMPT_LOGITS // executor.info.vocab_size, 1)
    for start in range(first + num_read, end, num_together):
        logits = executor.runner.head_rows(hidden, slice(start, min(start + num_together, end))).logits
        if temperature != 1.0:
            logits = divided(logits, logits.new_full((len(logits),), temperature))
        following = token_ids[start - first + 1 :][: len(logits)]
        yield from token_logprobs(logits, following, [num_top] * len(logits))
