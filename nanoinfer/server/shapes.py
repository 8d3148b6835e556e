"""The JSON of a choice: of /v1/chat/completions and of /v1/completions, whole and in chunks.

In: CompletionOutputs and Deltas. Out: dicts in OpenAI's shape. vLLM's stop_reason and, with return_token_ids, token_ids are
added.
"""

from collections.abc import Iterator
from typing import Any

from nanoinfer.engine.request_stream import RequestStream
from nanoinfer.outputs import CompletionOutput, Delta, LogprobsOnePosition, RequestOutput
from nanoinfer.server.chat_format import ChatFormat
from nanoinfer.server.logprobs import LegacyLogprobs, chat_logprobs
from nanoinfer.server.protocol import ChatCompletionRequest, CompletionRequest
from nanoinfer.tokenization.chat_parsing import ChatParser
from nanoinfer.tokenization.tokenizer import Tokenizer


class ChatShape:
    """Choices with a message, which a ChatParser makes of the text."""

    object_name, chunk_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, request: ChatCompletionRequest, chat_format: ChatFormat, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._format = chat_format
        self._tokenizer = tokenizer
        self._parsers: dict[int, ChatParser] = {}

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        parser = self._format.make_parser(self._request, output.prompt or "")
        message = parser.push(answer.text, is_last=True).message()
        return {"index": index, "message": message} | self._ending(parser, answer)

    def chunks(self, index: int, stream: RequestStream, delta: Delta) -> Iterator[dict[str, Any]]:
        if index not in self._parsers:
            self._parsers[index] = self._format.make_parser(self._request, stream.prepared.prompt or "")
            yield {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        parser = self._parsers[index]
        fields = parser.push(delta.text, is_last=delta.finish_reason is not None).fields()
        if fields or delta.logprobs or delta.finish_reason or self._request.return_token_ids:
            yield {"index": index, "delta": fields} | self._ending(parser, delta)

    def _ending(self, parser: ChatParser, answer: CompletionOutput | Delta) -> dict[str, Any]:
        # "length" stays, so that a client sees a cut call. After a named tool, OpenAI's reason is "stop".
        is_named = isinstance(self._request.tool_choice, dict)
        called_tool = parser.has_tool_calls and answer.finish_reason == "stop" and not is_named
        fields: dict[str, Any] = {"logprobs": None, "finish_reason": "tool_calls" if called_tool else answer.finish_reason}
        if answer.logprobs is not None:
            num_top = self._request.top_logprobs or 0
            fields["logprobs"] = chat_logprobs(self._tokenizer, answer.token_ids, answer.logprobs, num_top)
        return fields | _extensions(answer, self._request.return_token_ids)


class CompletionShape:
    """Choices with a text. With echo, it begins with the prompt."""

    object_name, chunk_name, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._logprobs: dict[int, LegacyLogprobs] = {}  # by choice: a stream's offsets go on from chunk to chunk

    def choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        return self._choice(index, output.prompt, output.prompt_token_ids, output.prompt_logprobs, answer)

    def chunks(self, index: int, stream: RequestStream, delta: Delta) -> Iterator[dict[str, Any]]:
        if index not in self._logprobs:
            assert stream.request is not None, "it has a delta"
            prompt = stream.prepared
            yield self._choice(index, prompt.prompt, prompt.prompt_token_ids, stream.request.prompt_logprobs, delta)
        elif delta.text or delta.logprobs or delta.finish_reason or self._request.return_token_ids:
            yield self._choice(index, None, [], None, delta)

    def _choice(
        self,
        index: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        prompt_logprobs: list[LogprobsOnePosition | None] | None,
        answer: CompletionOutput | Delta,
    ) -> dict[str, Any]:
        """A choice, which begins with the prompt if that is requested and not empty."""
        text, token_ids = answer.text, answer.token_ids
        positions: list[LogprobsOnePosition | None] = [*(answer.logprobs or ())]
        if self._request.max_tokens == 0:  # the engine has generated one token
            text, token_ids, positions = "", [], []
        if self._request.echo and prompt_token_ids:
            if prompt is None:
                prompt = "" if self._tokenizer is None else self._tokenizer.decode(prompt_token_ids)
            text, token_ids = prompt + text, prompt_token_ids + token_ids
            positions = [*(prompt_logprobs or ()), *positions]
        if index not in self._logprobs:
            self._logprobs[index] = LegacyLogprobs(self._tokenizer)
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._request.logprobs is None else self._logprobs[index].push(token_ids, positions),
            "finish_reason": answer.finish_reason,
        } | _extensions(answer, self._request.return_token_ids)


def _extensions(answer: CompletionOutput | Delta, return_token_ids: bool | None) -> dict[str, Any]:
    """vLLM's fields beside OpenAI's."""
    fields: dict[str, Any] = {"stop_reason": answer.stop_reason} if answer.finish_reason else {}
    return fields | ({"token_ids": answer.token_ids} if return_token_ids else {})
