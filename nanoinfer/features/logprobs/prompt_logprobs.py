"""The log-probabilities of a prompt's own tokens, for params.prompt_logprobs and for LLM.compute_logprobs."""

from typing import TYPE_CHECKING

from nanoinfer.errors import InvalidValueError
from nanoinfer.execution.executor import PromptReader
from nanoinfer.outputs import LogprobsOnePosition, RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.step_plan import PromptRows
from nanoinfer.tokenization.detokenizer import Detokenizer, NoText
from nanoinfer.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.sampling.sampler import HeadRows

PROMPT_LOGITS = 2**22  # the most logits of a prompt that are computed at a time: 16 MB


def reader_of(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> "PromptLogprobsReader":
    """Make the reader for params.prompt_logprobs. Raises: InvalidValueError if it exceeds the vocabulary."""
    num = params.prompt_logprobs
    assert num is not None, "the request asks for them"
    if num > vocab_size:
        raise InvalidValueError(f"prompt_logprobs must be at most the vocabulary's {vocab_size}, got {num}; use -1 for all")
    return PromptLogprobsReader(vocab_size if num == -1 else num, tokenizer=tokenizer if params.detokenize else None)


class PromptLogprobsReader(PromptReader):
    """Reads one prompt. positions: an entry for each token whose log-probability was read, None for the prompt's first."""

    def __init__(self, num_top: int, temperature: float = 1.0, tokenizer: Tokenizer | None = None) -> None:
        """tokenizer: makes the texts of the entries. None: they have no texts."""
        self.positions: list[LogprobsOnePosition | None] = [None]
        self._num_top, self._temperature = num_top, temperature
        self._detokenizer = NoText() if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=False)

    def read(self, executor: "LocalExecutor", hidden: "Tensor", chunk: PromptRows, ends: "HeadRows", row: int | None) -> None:
        """Read the rows before the prompt's last that were not read before a preemption, a limited number at a time."""
        from nanoinfer.features.logprobs.token_logprobs import token_logprobs
        from nanoinfer.sampling.stages import divided

        token_ids, first = chunk.sequence.prompt_token_ids, chunk.start - chunk.position  # first: the row of position 0
        end, num_together = min(chunk.stop, first + len(token_ids) - 1), max(PROMPT_LOGITS // executor.info.vocab_size, 1)
        while (start := first + len(self.positions) - 1) < end:
            logits = executor.runner.head_rows(hidden, slice(start, min(start + num_together, end))).logits
            if self._temperature != 1.0:
                logits = divided(logits, logits.new_full((len(logits),), self._temperature))
            following = token_ids[len(self.positions) : len(self.positions) + len(logits)]
            for entry in token_logprobs(logits, following, [self._num_top] * len(logits)):
                self._detokenizer.push(token_ids[len(self.positions) - 1])
                self.positions.append(entry.with_texts(self._detokenizer))

    def complete(self, output: RequestOutput) -> None:
        output.prompt_logprobs = self.positions
