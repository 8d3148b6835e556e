"""One request seen from outside: its text as it grows, what a stream of it shows, and its RequestOutput at the end.

In: one sampled id at a time. Out: Deltas and a RequestOutput. The sampled id passes the last stations of its journey here:
stop ids -> detokenizer -> stop strings -> output.
"""

import time
from collections import deque

from nanoinfer.detokenizer import Detokenizer
from nanoinfer.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from nanoinfer.sequence import Sequence
from nanoinfer.stopping import Stop, StopStrings, check_token_ids
from nanoinfer.tokenizer import Tokenizer


class Request:
    """Owns its outputs, so that several callers may drive one engine, each reading its own.

    output: None until the request has ended. deltas: what a stream has still to show; filled only if `streaming`.
    """

    def __init__(
        self, seq: Sequence, prompt: str | None, tokenizer: Tokenizer | None, *, arrival_time: float, streaming: bool = False
    ) -> None:
        self.sequence = seq
        self.output: RequestOutput | None = None
        self.deltas: deque[Delta] = deque()
        self._prompt = prompt
        self._streaming = streaming
        self._metrics = RequestMetrics(arrival_time)
        self._text = StopStrings(seq.params.stop or (), include_in_output=seq.params.include_stop_str_in_output)
        self._detokenizer: Detokenizer | None = None
        if seq.params.detokenize and tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=seq.params.skip_special_tokens)

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    def advance(self, token_id: int) -> None:
        """Take one sampled id. Afterwards `output` is set if it was the last."""
        seq = self.sequence
        seq.token_ids.append(token_id)
        if self._metrics.first_token_time is None:
            self._metrics.first_token_time = time.perf_counter()

        stop = check_token_ids(seq)
        ended_by_id = stop is not None and stop.finish_reason == "stop"
        text = ""
        if self._detokenizer and not (ended_by_id and not seq.params.include_stop_str_in_output):
            text = self._detokenizer.push(token_id)
        if self._detokenizer and stop:
            text += self._detokenizer.finish()

        # Neither the text of the first min_tokens tokens nor that of an id that ended the output is searched for stop strings.
        examine = not ended_by_id and seq.num_output_tokens > seq.params.min_tokens
        if matched := self._text.push(text, examine=examine):
            stop = Stop("stop", matched)
        if stop:
            self._finish(stop, [token_id])
        elif self._streaming:
            self.deltas.append(Delta(self._text.release(), [token_id], request_id=self.request_id))

    def end(self, stop: Stop) -> None:
        """End it from outside: aborted, or failed. What was held of its text is kept. One that has ended stays as it is."""
        if self.output:
            return
        if self._detokenizer:
            self._text.push(self._detokenizer.finish(), examine=False)
        self._finish(stop, [])

    def _finish(self, stop: Stop, new_token_ids: list[int]) -> None:
        seq = self.sequence
        self._metrics.finished_time = time.perf_counter()
        self._metrics.num_output_tokens = seq.num_output_tokens
        self._metrics.num_cached_tokens = seq.num_cached_tokens
        self._metrics.num_preemptions = seq.num_preemptions
        completion = CompletionOutput(
            index=0,
            text=self._text.text,
            token_ids=seq.output_token_ids,
            finish_reason=stop.finish_reason,
            stop_reason=stop.stop_reason,
            error=stop.error,
        )
        self.output = RequestOutput(
            seq.request_id, self._prompt, seq.prompt_token_ids, [completion], finished=True, metrics=self._metrics
        )
        if self._streaming:
            text = self._text.release(everything=True)
            self.deltas.append(Delta(text, new_token_ids, self.output, self.request_id))
