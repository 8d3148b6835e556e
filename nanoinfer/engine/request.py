"""One request: its answers as they grow, the Deltas of its stream, and its RequestOutput at the end.

In: one sampled id at a time. Out: Deltas and a RequestOutput. The last steps for a token: stop ids ->
detokenizer -> stop strings -> output.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from itertools import repeat

from nanoinfer.engine.stopping import Stop, StopStrings, check_token_ids
from nanoinfer.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    LogprobsOnePosition,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
    sum_of_logprobs,
)
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.tokenization.detokenizer import Detokenizer
from nanoinfer.tokenization.tokenizer import Tokenizer


class Request:
    """The answers to one prompt. Several callers may drive the same engine, and each reads its own requests.

    output: None until every answer has finished. deltas: news that a stream has not yielded, collected only if `streaming`.
    """

    def __init__(
        self,
        sequences: list[Sequence],
        prompt: str | None,
        tokenizer: Tokenizer | None,
        *,
        streaming: bool = False,
        weights_version: int = 0,
    ) -> None:
        self.sequences = sequences
        self.request_id = sequences[0].request_id
        self.output: RequestOutput | None = None
        self.deltas: deque[Delta] = deque()
        self._prompt = prompt
        self._streaming = streaming
        self._weights_version = weights_version
        self.metrics = RequestMetrics(sequences[0].arrival_time)
        self.answers = [_Answer(seq, tokenizer, streaming=streaming) for seq in sequences]

    @property
    def num_output_tokens(self) -> int:
        """The number of tokens of all answers. The token that ends a request whose prompt is read does not count."""
        return sum(seq.num_output_tokens for seq in self.sequences if seq.is_answered)

    def advance(
        self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None = None, mask: list[int] | None = None
    ) -> Stop | None:
        """Process a sampled id that one of the sequences has just received. Returns a Stop if the sequence ends with it."""
        answer = self.answers[seq.index]
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.perf_counter()
        elif answer.ending_ids is not None and token_id not in answer.ending_ids and len(seq.token_ids) < seq.max_num_tokens:
            return None  # nothing reads the token before the end
        named = None if logprobs is None else with_token_texts(logprobs, answer.detokenizer)
        if mask is not None:
            answer.masks.append(mask)
        answer.advance(token_id, named)
        self._show([token_id], answer, None if named is None else [named], None if mask is None else [mask])
        return answer.stop

    def finish(self, stop: Stop, seq: Sequence | None = None) -> None:
        """Finish one aborted or failed answer, or all. Held text is released, and answers that have finished stay unchanged."""
        for answer in self.answers if seq is None else [self.answers[seq.index]]:
            if answer.stop is None:
                answer.finish(stop)
                self._show([], answer, None)

    def _show(
        self,
        new_token_ids: list[int],
        answer: "_Answer",
        logprobs: list[LogprobsOnePosition] | None,
        masks: list[list[int]] | None = None,
    ) -> None:
        """Make the output if every answer has finished, and the next Delta of the stream."""
        if answer.stop and all(answer.stop for answer in self.answers):
            self.metrics.finished_time = time.perf_counter()
            self.metrics.num_output_tokens = self.num_output_tokens
            self.output = RequestOutput(
                self.request_id,
                self._prompt,
                self.sequences[0].prompt_token_ids,
                [answer.output() for answer in self.answers],
                finished=True,
                metrics=self.metrics,
                weights_version=self._weights_version,
            )
            if (reader := self.sequences[0].reader) is not None:
                reader.complete(self.output)
        answer.shown = answer.text.release(everything=answer.stop is not None)
        if self._streaming:
            reasons = asdict(answer.stop) if answer.stop else {}
            new = answer.shown, new_token_ids, self.output, self.request_id, logprobs, answer.seq.index
            self.deltas.append(Delta(*new, **reasons, sampling_mask=masks))


class _Answer:
    """A sequence of the request as text. stop: why it ended. None: it runs."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None, *, streaming: bool) -> None:
        self.seq = seq
        self.stop: Stop | None = None
        self.shown = ""  # the text that the newest token released
        self.masks: list[list[int]] = []
        self.text = StopStrings(seq.params.stop or (), include_in_output=seq.params.include_stop_str_in_output)
        self.detokenizer: Detokenizer | None = None
        if seq.params.detokenize and tokenizer is not None:
            self.detokenizer = Detokenizer(tokenizer, skip_special_tokens=seq.params.skip_special_tokens)
        # Stop strings that are special tokens do not occur in a text without special tokens, so their ids are compared instead.
        self._special_stops: dict[int, str] = {}
        if tokenizer is not None and seq.params.stop and seq.params.skip_special_tokens:
            self._special_stops = tokenizer.special_tokens_among(seq.params.stop)
        self._logprobs: list[LogprobsOnePosition] | None = None if seq.params.logprobs is None else []
        params, state = seq.params, (self.detokenizer, self._logprobs)
        reads_tokens = streaming or params.stop or params.return_sampling_mask or seq.constraints
        # The ids that may end an answer whose other tokens nothing reads before the end. None: every token is read.
        self.ending_ids: frozenset[int] | None = None
        if not reads_tokens and all(reader is None for reader in state):
            self.ending_ids = seq.eos_token_ids.union(params.stop_token_ids or ())

    def advance(self, token_id: int, logprobs: LogprobsOnePosition | None) -> None:
        seq = self.seq
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)

        examine = seq.num_output_tokens > seq.params.min_tokens  # no stop string completes in the first min_tokens tokens
        stop = check_token_ids(seq)
        if examine and token_id in self._special_stops and (stop is None or stop.finish_reason != "stop"):
            stop = Stop("stop", self._special_stops[token_id])
        ended_by_id = stop is not None and stop.finish_reason == "stop"
        for constraint in () if ended_by_id else seq.constraints:
            reason = constraint.advance(token_id)
            if constraint.is_complete and not seq.stop_ids:  # a model without EOS has no id left to draw
                reason = "stop"
            if reason and (reason == "stop" or not stop):
                stop = Stop(reason)
        text = ""
        if self.detokenizer and (seq.params.include_stop_str_in_output or not ended_by_id):
            text = self.detokenizer.push(token_id)
        if self.detokenizer and stop:
            text += self.detokenizer.finish()
        if matched := self.text.push(text, examine=examine):
            stop = Stop("stop", matched)
        self.stop = stop

    def finish(self, stop: Stop) -> None:
        if self.detokenizer:
            self.text.push(self.detokenizer.finish(), examine=False)
        self.stop = stop

    def output(self) -> CompletionOutput:
        assert self.stop is not None
        token_ids, logprobs = self.seq.output_token_ids, self._logprobs
        cumulative = sum_of_logprobs(token_ids, logprobs)
        masks = self.masks if self.seq.params.return_sampling_mask else None
        fields = asdict(self.stop) | {"sampling_mask": masks}
        return CompletionOutput(self.seq.index, self.text.text, token_ids, cumulative, logprobs, **fields)


def with_token_texts(logprobs: TokenLogprobs, detokenizer: Detokenizer | None) -> LogprobsOnePosition:
    """Convert the executor's numbers to what users get, with token texts if there is a detokenizer."""
    texts: Iterable[str | None] = repeat(None) if detokenizer is None else detokenizer.added_texts(logprobs.ids)
    return {
        token_id: Logprob(value, rank, text)
        for token_id, value, rank, text in zip(logprobs.ids, logprobs.values, logprobs.ranks, texts, strict=False)
    }
