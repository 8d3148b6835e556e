"""One request: its answers as they grow, the Deltas of its stream, and its RequestOutput at the end.

In: one sampled id at a time. Out: Deltas and a RequestOutput. The last steps for a token: stop ids ->
detokenizer -> stop strings -> output.
"""

import time
from collections import deque
from dataclasses import asdict
from typing import Any

from nanoinfer.engine.stopping import Answer, KeptStopStrings, Stop
from nanoinfer.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput, TokenReport, sum_of_logprobs
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.tokenization.detokenizer import Detokenizer, NoText
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

    def advance(self, seq: Sequence, token_id: int, report: TokenReport | None = None) -> Stop | None:
        """Process a sampled id that one of the sequences has just received. Returns a Stop if the sequence ends with it."""
        answer = self.answers[seq.index]
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.perf_counter()
        elif answer.ending_ids is not None and token_id not in answer.ending_ids and len(seq.token_ids) < seq.max_num_tokens:
            return None  # nothing reads the token before the end
        reported: dict[str, list[Any]] = {}
        if report is not None:  # its texts depend on the tokens before this one
            reported = {name: [entry] for name, entry in report.fields(answer.detokenizer).items()}
            for name, entries in reported.items():
                answer.reported[name] += entries
        answer.advance(token_id)
        self._show([token_id], answer, reported)
        return answer.stop

    def finish(self, stop: Stop, seq: Sequence | None = None) -> None:
        """Finish one aborted or failed answer, or all. Held text is released, and answers that have finished stay unchanged."""
        for answer in self.answers if seq is None else [self.answers[seq.index]]:
            if answer.stop is None:
                answer.finish(stop)
                self._show([], answer, {})

    def _show(self, new_token_ids: list[int], answer: "_Answer", reported: dict[str, list[Any]]) -> None:
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
            fields = reported | (asdict(answer.stop) if answer.stop else {})
            new = answer.shown, new_token_ids, self.output, self.request_id
            self.deltas.append(Delta(*new, index=answer.seq.index, **fields))


class _Answer(Answer):
    """An answer with what else a request may ask for: constraints, reports, no text, the text of what ends it."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None, *, streaming: bool) -> None:
        params, decodes_by = seq.params, tokenizer if seq.params.detokenize else None
        special = params.skip_special_tokens
        super().__init__(seq, Detokenizer(decodes_by, skip_special_tokens=special) if decodes_by else NoText())
        self.shown = ""  # the text that the newest token released
        self.reported: dict[str, list[Any]] = {name: [] for name in params.reports}  # with an entry for each token
        self.keeps_ending_text = params.include_stop_str_in_output
        if self.keeps_ending_text:
            self.text = KeptStopStrings(params.stop or ())
        # The ids that may end an answer whose other tokens nothing reads before the end. None: every token is read.
        self.ending_ids: frozenset[int] | None = None
        if not (streaming or decodes_by or self.reported or seq.constraints):
            self.ending_ids = seq.eos_token_ids.union(params.stop_token_ids or ())

    def check_id(self, token_id: int, examine: bool) -> Stop | None:
        stop = super().check_id(token_id, examine)
        for constraint in () if stop and stop.finish_reason == "stop" else self.seq.constraints:
            reason = constraint.advance(token_id)
            if constraint.is_complete and not self.seq.stop_ids:  # a model without EOS has no id left to draw
                reason = "stop"
            if reason and (reason == "stop" or not stop):
                stop, self.keeps_ending_text = Stop(reason), True
        return stop

    def output(self) -> CompletionOutput:
        assert self.stop is not None
        token_ids, fields = self.seq.output_token_ids, asdict(self.stop) | self.reported
        cumulative = sum_of_logprobs(token_ids, fields.get("logprobs"))
        return CompletionOutput(self.seq.index, self.text.text, token_ids, cumulative, **fields)
