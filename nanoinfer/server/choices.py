"""The replies of /v1/chat/completions and /v1/completions, whole and in chunks, and the prompt of a chat.

In: CompletionOutputs and Deltas. Out: dicts with OpenAI's fields, to which vLLM's stop_reason is added, and if they are
requested token_ids, prompt_token_ids and prompt_logprobs. In log-probabilities, a token that is a part of a character keeps its
true bytes: as "bytes" in a chat, and as the text "bytes:\\xf0\\x9f" in a completion.
"""

import codecs
import functools
import time
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic_core import to_json

from nanoinfer.engine.inputs import InputProcessor, PreparedRequest
from nanoinfer.engine.prompts import TokensPrompt
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.chat.harmony import CHANNEL, FINAL, HarmonyParser
from nanoinfer.features.chat.messages import constrain_calls, limit_thinking, render_chat, with_text_content
from nanoinfer.features.chat.parsing import END_THINK, THINK, ChatParser, calls_as_hermes
from nanoinfer.features.chat.tools import after_thinking, requires_call
from nanoinfer.outputs import CompletionOutput, Delta, LogprobsOnePosition
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server.answers import Reply
from nanoinfer.server.async_llm import RequestStream
from nanoinfer.server.errors import RequestError, error_body
from nanoinfer.server.protocol import (
    MAX_TOKENIZED,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    JsonObject,
)
from nanoinfer.tokenization.tokenizer import Tokenizer

END_OF_EVENT = b"]}\n\n"
DONE = b"data: [DONE]\n\n"
LOWEST = -9999.0  # instead of -inf, which JSON does not have. The value is vLLM's


@dataclass(frozen=True)
class ChatFormat:
    """The fields that are parsed from a model's answers. Other text is content. parser: the class for the model's format."""

    reasoning: bool
    tool_calls: bool
    parser: type[ChatParser] = ChatParser

    @classmethod
    def choose(cls, template: str, reasoning_parser: str | None, tool_call_parser: str | None) -> "ChatFormat":
        """Choose the format by vLLM's parser names. None: the format that the chat template writes."""
        names = reasoning_parser, tool_call_parser
        is_named = ["openai" in name for name in names if name not in (None, "none")]  # whether each name is harmony's
        if len({*is_named}) > 1:
            raise InvalidValueError(f"--reasoning-parser {names[0]} and --tool-call-parser {names[1]} parse different formats")
        is_harmony = is_named[0] if is_named else CHANNEL in template and names != ("none", "none")
        writes_reasoning = THINK in template or END_THINK in template
        return cls(
            reasoning=is_harmony or writes_reasoning if reasoning_parser is None else reasoning_parser != "none",
            tool_calls=is_harmony or calls_as_hermes(template) if tool_call_parser is None else tool_call_parser != "none",
            parser=HarmonyParser if is_harmony else ChatParser,
        )

    def make_parser(self, request: ChatCompletionRequest, prompt: str) -> ChatParser:
        """Make the parser for an answer to this rendered prompt."""
        if prompt.endswith(FINAL):  # a grammar follows, where marks are plain text
            return ChatParser(reasoning=False, tool_calls=False)
        return self.parser(
            prompt,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls and bool(_offered_tools(request)),
            parallel_tool_calls=request.parallel_tool_calls is not False,
        )

    def render(self, request: ChatCompletionRequest, inputs: InputProcessor, **more: Any) -> TokensPrompt:
        """Render the conversation, and refuse tools if the model knows none. more: further arguments of render_chat."""
        tools = _offered_tools(request)
        if tools and not self.tool_calls:
            raise RequestError(
                400,
                "tools are not supported: this model's chat template has no known format of calls",
                param="tools",
                code="unsupported",
            )
        return render_chat(inputs, messages_of(request.messages), tools=tools, **request.rendering, **more)

    def prepare(self, request: ChatCompletionRequest, inputs: InputProcessor, params: SamplingParams) -> PreparedRequest:
        """Render and check the conversation, and constrain the answer by a grammar if calls are required or strict."""
        tool_choice = "auto" if request.tool_choice is None else request.tool_choice
        is_structured = params.structured_outputs is not None and not requires_call(tool_choice)
        is_harmony = self.parser is HarmonyParser
        skips_reasoning = is_harmony and is_structured and request.rendering["add_generation_prompt"]
        limit = {} if request.truncate_prompt_tokens is None else {"max_tokens": max_tokenized(inputs)}
        prompt = self.render(request, inputs, answer_begin=FINAL if skips_reasoning else "", **limit)
        prompt["prompt_token_ids"] = _truncated(prompt["prompt_token_ids"], request, inputs, params)
        text = prompt["prompt"] or ""
        if is_harmony:
            params = replace(params, skip_special_tokens=False)
        elif self.reasoning:
            if request.reasoning_effort == "none":
                params = limit_thinking(inputs, params, prompt, share=0)
            if is_structured or requires_call(tool_choice):
                params = limit_thinking(inputs, params, prompt)
            if is_structured and params.structured_outputs is not None:
                params = replace(params, structured_outputs=after_thinking(params.structured_outputs, text))
        params = constrain_calls(
            params,
            text,
            _offered_tools(request),
            tool_choice,
            inputs.tokenizer,
            thinks=self.reasoning,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            is_harmony=is_harmony,
        )
        return inputs.prepare_prompt({**prompt, "cache_salt": request.cache_salt}, params, priority=request.priority)


def prepare_completion(
    request: CompletionRequest, prompt: str | list[int], inputs: InputProcessor, params: SamplingParams
) -> PreparedRequest:
    """Tokenise and check one of the prompts of a completion."""
    ids = prompt if isinstance(prompt, list) else None
    is_plain = request.add_special_tokens is not False and request.truncate_prompt_tokens is None
    if isinstance(prompt, str) and inputs.tokenizer is not None and not is_plain:
        adds_special, most = request.add_special_tokens is not False, max_tokenized(inputs)
        ids = inputs.tokenizer.encode(prompt, add_special_tokens=adds_special, max_tokens=most)
    given = {"prompt": prompt} if ids is None else {"prompt_token_ids": _truncated(ids, request, inputs, params)}
    return inputs.prepare_prompt({**given, "cache_salt": request.cache_salt}, params, priority=request.priority)


def _truncated(token_ids: list[int], request: GenerationRequest, inputs: InputProcessor, params: SamplingParams) -> list[int]:
    """Return the last tokens of a prompt, as many as truncate_prompt_tokens asks for."""
    most = request.truncate_prompt_tokens
    if most is None:
        return token_ids
    check_length(token_ids, max_tokenized(inputs))
    return token_ids[-(most if most > 0 else max(inputs.max_model_len - (params.max_tokens or 1), 1)) :]


def max_tokenized(inputs: InputProcessor) -> int:
    """Return the most tokens of a text that is not the prompt, or not all of it."""
    return max(MAX_TOKENIZED, inputs.max_model_len)


def check_length(tokens: list[int], most: int) -> list[int]:
    """Return a text's tokens. Raises: RequestError for more than `most`, of which only the beginning may be encoded."""
    if len(tokens) > most:
        raise RequestError(400, f"the text has more than {most} tokens; send it in parts")
    return tokens


def messages_of(messages: list[ChatMessage]) -> list[JsonObject]:
    return [message.model_dump(exclude_unset=True) for message in messages]


def _offered_tools(request: ChatCompletionRequest) -> list[JsonObject]:
    """Return the tools that the model may call."""
    return [] if request.tool_choice == "none" else request.tools or []


class ChoicesReply(Reply):
    """The reply of /v1/chat/completions and /v1/completions."""

    id_prefix: str
    object_names: tuple[str, str]  # the "object" of a response, and of a stream's chunks

    def __init__(self, request: ChatCompletionRequest | CompletionRequest, model: str, tokenizer: Tokenizer | None) -> None:
        super().__init__(request.n or 1, is_prompt_only=request.max_tokens == 0, merges=request.stream_interval is None)
        self._model, self._tokenizer, self._stream_options = model, tokenizer, request.stream_options
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._prefix = b""  # the beginning of every chunk

    @abstractmethod
    def choice(self, index: int, stream: RequestStream, answer: CompletionOutput | Delta) -> JsonObject:
        """Return the choice of a whole answer."""

    @abstractmethod
    def choice_chunks(self, index: int, stream: RequestStream, delta: Delta) -> list[JsonObject]:
        """Return the chunks of a choice for its next delta."""

    def response_fields(self, stream: RequestStream) -> JsonObject:
        """Return the fields of a response, or of the first chunk of a stream, that are not in a choice."""
        return {}

    def usage(self) -> JsonObject:
        """Return the usage of answers that have ended."""
        return self.answers.usage()

    def _head(self, object_name: str) -> JsonObject:
        name = f"{self.id_prefix}-{self.answers.id}"
        return {"id": name, "object": object_name, "created": int(time.time()), "model": self._model}

    def whole(self) -> JsonObject:
        answers = self.answers
        choices = [
            self.choice(answers.choice_index(number, answer.index), answers.streams[number], answer)
            for number, output in enumerate(answers.outputs)
            for answer in output.outputs
        ]
        fields = {"choices": choices, "usage": self.usage()} | self.response_fields(answers.streams[0])
        return self._head(self.object_names[0]) | fields

    def chunks(self, index: int, stream: RequestStream, delta: Delta) -> list[bytes]:
        """Return the events. Their common fields are rendered only once."""
        options, fields, events = self._stream_options, {}, []
        if options is not None and options.include_usage:
            fields = {"usage": self.answers.usage() if options.continuous_usage_stats else None}
        for choice in self.choice_chunks(index, stream, delta):
            more = {} if self._prefix else self.response_fields(self.answers.streams[0])
            self._prefix = self._prefix or b"data: " + to_json(self._head(self.object_names[1]))[:-1] + b',"choices":['
            events += [self._prefix, to_json(choice), _end_of_event(fields | more) if fields or more else END_OF_EVENT]
        return events

    def failure(self, error: RequestError) -> bytes:
        return b"data: " + to_json(error_body(error.status_code, error.detail, param=error.param)) + b"\n\n" + DONE

    def end(self) -> bytes:
        shows_usage = self._stream_options is not None and self._stream_options.include_usage
        return (self._prefix + _end_of_event({"usage": self.usage()}) if shows_usage else b"") + DONE


def _end_of_event(fields: JsonObject) -> bytes:
    """Render the end of an event with further fields, after its choices."""
    return b"]," + to_json(fields)[1:] + b"\n\n"


class ChatReply(ChoicesReply):
    """The reply of /v1/chat/completions. A ChatParser parses the text of each choice into a message."""

    id_prefix, object_names = "chatcmpl", ("chat.completion", "chat.completion.chunk")

    def __init__(
        self, request: ChatCompletionRequest, model: str, tokenizer: Tokenizer | None, chat_format: ChatFormat
    ) -> None:
        super().__init__(request, model, tokenizer)
        self._request, self._format = request, chat_format
        self._parsers: dict[int, ChatParser] = {}
        last = with_text_content(messages_of(request.messages[-1:]))[0] if request.echo else {}
        self._echoed = str(last.get("content", "")) if last.get("role") == "assistant" else ""  # the message that is continued

    def response_fields(self, stream: RequestStream) -> JsonObject:
        return _prompt_fields(self._request, stream)

    def usage(self) -> JsonObject:
        [output] = self.answers.outputs
        nums = [num_reasoning_tokens(self._parsers[one.index], one.token_ids, self._tokenizer) for one in output.outputs]
        return {**super().usage(), "completion_tokens_details": {"reasoning_tokens": sum(nums)}}

    def choice(self, index: int, stream: RequestStream, answer: CompletionOutput | Delta) -> JsonObject:
        parser = self._parsers[index] = self._format.make_parser(self._request, stream.prepared.prompt or "")
        message = parser.push(answer.text, is_last=True).message()
        if self._echoed:
            message["content"] = self._echoed + (message["content"] or "")
        return {"index": index, "message": message} | self._common_fields(parser, answer)

    def choice_chunks(self, index: int, stream: RequestStream, delta: Delta) -> list[JsonObject]:
        chunks: list[JsonObject] = []
        if index not in self._parsers:
            self._parsers[index] = self._format.make_parser(self._request, stream.prepared.prompt or "")
            first = {"role": "assistant", "content": self._echoed}
            chunks = [{"index": index, "delta": first, "logprobs": None, "finish_reason": None}]
        parser = self._parsers[index]
        fields = parser.push(delta.text, is_last=delta.finish_reason is not None).fields()
        if fields or _is_shown(delta, self._request):
            chunks += [{"index": index, "delta": fields} | self._common_fields(parser, delta)]
        return chunks

    def _common_fields(self, parser: ChatParser, answer: CompletionOutput | Delta) -> JsonObject:
        # "length" stays, so that a client notices a call that is cut. After a named tool, OpenAI's reason is "stop".
        is_named = isinstance(self._request.tool_choice, dict)
        called_tool = parser.has_tool_calls and answer.finish_reason == "stop" and not is_named
        fields: JsonObject = {"logprobs": None, "finish_reason": "tool_calls" if called_tool else answer.finish_reason}
        if answer.logprobs is not None:
            given = self._request.logprob_token_ids
            fields["logprobs"] = chat_logprobs(self._tokenizer, answer, self._request.top_logprobs or 0, given, self._as_ids)
        return fields | _extensions(answer, self._request.return_token_ids)


class CompletionReply(ChoicesReply):
    """The reply of /v1/completions. With echo, the text of a choice begins with its prompt."""

    id_prefix, object_names = "cmpl", ("text_completion", "text_completion")

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer | None) -> None:
        super().__init__(request, model, tokenizer)
        self._request = request
        self._logprobs: dict[int, LegacyLogprobs] = {}  # by choice, because a stream's offsets continue from chunk to chunk

    def choice_chunks(self, index: int, stream: RequestStream, delta: Delta) -> list[JsonObject]:
        if index not in self._logprobs:
            return [self.choice(index, stream, delta)]
        return [self._choice(index, delta)] if delta.text or _is_shown(delta, self._request) else []

    def choice(self, index: int, stream: RequestStream, answer: CompletionOutput | Delta) -> JsonObject:
        """Make a choice, or the first chunk of a choice, which begins with the prompt if that is requested and not empty."""
        skips_special = self._request.skip_special_tokens is not False
        texts = self._logprobs[index] = LegacyLogprobs(self._tokenizer, skips_special=skips_special, as_ids=self._as_ids)
        prompt, ids = stream.prepared.prompt, stream.prepared.prompt_token_ids
        if not self._request.echo or not ids:
            choice = self._choice(index, answer)
        else:
            if prompt is None:
                prompt = "" if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)
            entries = None if self._request.logprobs is None else texts.push(ids, stream.prepared.reader.positions, prompt)
            choice = self._choice(index, answer)
            choice["text"] = prompt + choice["text"]
            if entries is not None:
                choice["logprobs"] = {name: entries[name] + values for name, values in choice["logprobs"].items()}
        return choice | _prompt_fields(self._request, stream)

    def _choice(self, index: int, answer: CompletionOutput | Delta) -> dict[str, Any]:
        """Make a choice without its prompt, or a chunk of it."""
        text, token_ids, positions = answer.text, answer.token_ids, answer.logprobs or ()
        if self._request.max_tokens == 0:  # the engine has still generated a token
            text, token_ids, positions = "", [], ()
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._request.logprobs is None else self._logprobs[index].push(token_ids, positions),
            "finish_reason": answer.finish_reason,
        } | _extensions(answer, self._request.return_token_ids)


def _is_shown(delta: Delta, request: GenerationRequest) -> bool:
    """Whether a delta without text still needs a chunk."""
    is_asked = request.return_token_ids or request.stream_interval
    return bool(delta.logprobs or delta.sampling_mask or delta.finish_reason or is_asked)


def _prompt_fields(request: GenerationRequest, stream: RequestStream) -> JsonObject:
    """Return the fields by which vLLM describes a prompt, if requested."""
    fields: dict[str, Any] = {"prompt_token_ids": stream.prepared.prompt_token_ids} if request.return_token_ids else {}
    if request.prompt_logprobs is not None and stream.request is not None:
        fields["prompt_logprobs"] = [
            position and {str(i): asdict(entry) | {"logprob": max(entry.logprob, LOWEST)} for i, entry in position.items()}
            for position in stream.prepared.reader.positions  # complete when there is a first token
        ]
    return fields


def _extensions(answer: CompletionOutput | Delta, return_token_ids: bool | None) -> JsonObject:
    """Return the fields that vLLM has and OpenAI does not have."""
    fields: JsonObject = {"stop_reason": answer.stop_reason} if answer.finish_reason else {}
    fields |= {} if answer.sampling_mask is None else {"sampling_mask": answer.sampling_mask}
    return fields | ({"token_ids": answer.token_ids} if return_token_ids else {})


def num_reasoning_tokens(parser: ChatParser, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> int:
    """Return how many tokens of an answer are its reasoning, with the tags. parser: has parsed the answer."""
    if tokenizer is None or not parser.has_reasoning:
        return 0
    end = tokenizer.backend.token_to_id(parser.end_of_reasoning)
    return token_ids.index(end) + 1 if end in token_ids else len(token_ids)


def chat_logprobs(
    tokenizer: Tokenizer | None, answer: CompletionOutput | Delta, num_top: int, given: Collection[int] | None, as_ids: bool
) -> JsonObject:
    """Make the "logprobs" of a chat's choice.

    given: the ids to list instead of the num_top most likely ones. as_ids: write the text of a token as "token_id:5".
    """

    def entry(token_id: int, logprob: float) -> JsonObject:
        data = _bytes(tokenizer, token_id)
        text = f"token_id:{token_id}" if as_ids else data.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(data)}

    content: list[JsonObject] = []
    for token_id, position in zip(answer.token_ids, answer.logprobs or (), strict=True):
        top = sorted(position.items(), key=lambda item: -item[1].logprob)
        top = [item for item in top if item[0] in given] if given else top[:num_top]
        top_entries = [entry(other, logprob.logprob) for other, logprob in top]
        content.append({**entry(token_id, position[token_id].logprob), "top_logprobs": top_entries})
    return {"content": content, "refusal": None}


class LegacyLogprobs:
    """Makes the "logprobs" of a completion's choice, and keeps the text offset from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer | None, *, skips_special: bool, as_ids: bool) -> None:
        """skips_special: the text has no special tokens. as_ids: write the text of a token as "token_id:5"."""
        self._tokenizer = tokenizer
        self._skips_special, self._as_ids = skips_special, as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def push(
        self, token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition | None], prompt: str | None = None
    ) -> dict[str, list[object]]:
        """Make the entries of the next tokens. The first token of a prompt has no log-probability.

        prompt: the text, with special tokens that the tokenizer has not added. None: the tokens are not the prompt's.
        """
        chunk: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            chunk["tokens"].append(self._text(token_id))
            chunk["text_offset"].append(self._offset)
            data = _bytes(self._tokenizer, token_id)
            is_shown = (
                not self._skips_special if prompt is None else prompt.startswith(data.decode(errors="replace"), self._offset)
            )
            if is_shown or not _is_special(self._tokenizer, token_id):
                self._offset += len(self._decoder.decode(data))
            chunk["token_logprobs"].append(None if position is None else max(position[token_id].logprob, LOWEST))
            chunk["top_logprobs"].append(None if position is None else self._top(position))
        return chunk

    def _top(self, position: LogprobsOnePosition) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, entry in position.items():
            top.setdefault(self._text(token_id), max(entry.logprob, LOWEST))  # if two ids have the same text, keep the likelier
        return top

    def _text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        data = _bytes(self._tokenizer, token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@functools.lru_cache(maxsize=2**18)  # decoding takes 5 us, and a token may be in the top of every position
def _bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    return str(token_id).encode() if tokenizer is None else tokenizer.token_bytes(token_id)


@functools.lru_cache(maxsize=2**18)
def _is_special(tokenizer: Tokenizer | None, token_id: int) -> bool:
    return tokenizer is not None and not tokenizer.decode([token_id])
