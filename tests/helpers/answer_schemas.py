"""The JSON of the server's responses with status 200, by the endpoints, in ANSWERS.

NotRequired: a field that only some requests ask for, or that the answer may lack.
"""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from nanoinfer.outputs import Logprob
from nanoinfer.server.protocol import JsonObject

# ---- /v1/chat/completions and /v1/completions


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatUsage(Usage):
    completion_tokens_details: ReasoningTokens


class PromptFields(TypedDict):
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, Logprob] | None]]


class ChoiceFields(TypedDict):
    index: int
    finish_reason: Literal["stop", "length", "repetition", "tool_calls"]
    stop_reason: int | str | None
    sampling_mask: NotRequired[list[list[int]]]
    token_ids: NotRequired[list[int]]


class CalledFunction(TypedDict):
    name: str
    arguments: str


class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(ChoiceFields):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(PromptFields):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoiceFields, PromptFields):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


# ---- /v1/messages


class MessageText(TypedDict):
    type: Literal["text"]
    text: str


class MessageThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    stop_details: None
    usage: MessageUsage


class InputTokens(TypedDict):
    input_tokens: int


# ---- /v1/responses


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[JsonObject]
    logprobs: list[JsonObject]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputItem(TypedDict):
    id: str
    status: Literal["completed", "incomplete"]


class OutputMessage(OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(OutputItem):
    type: Literal["reasoning"]
    summary: list[JsonObject]
    encrypted_content: None
    content: list[ReasoningText]


class OutputCall(OutputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputDetails(CachedTokens):
    cache_write_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class OpenAIResponse(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    store: bool
    temperature: float
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_p: float
    text: JsonObject
    usage: ResponseUsage
    max_output_tokens: NotRequired[int]
    previous_response_id: NotRequired[str]
    reasoning: NotRequired[JsonObject]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseInputTokens(InputTokens):
    object: Literal["response.input_tokens"]


# ---- /v1/embeddings, /v1/score and /v1/rerank


class TextsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class TextsAnswer(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: TextsUsage


class EmbeddingItem(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TextsAnswer):
    data: list[EmbeddingItem]


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class Scores(TextsAnswer):
    data: list[Score]


class Document(TypedDict):
    text: str


class Ranked(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[Document]


class Ranking(TextsAnswer):
    results: list[Ranked]


# ---- the others


class Model(TypedDict):
    id: str
    object: Literal["model"]
    root: str
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class ServerLoad(TypedDict):
    server_load: int


class Version(TypedDict):
    version: str


class WeightsStatus(TypedDict):
    weights_version: int
    is_paused: bool


class WorldSize(TypedDict):
    world_size: int


# The path and the method of an endpoint -> its answer.
ANSWERS = {
    "POST /v1/completions": Completion,
    "POST /v1/chat/completions": ChatCompletion,
    "POST /v1/responses": OpenAIResponse,
    "GET /v1/responses/{response_id}": OpenAIResponse,
    "DELETE /v1/responses/{response_id}": DeletedResponse,
    "POST /v1/responses/input_tokens": ResponseInputTokens,
    "POST /v1/messages": AnthropicMessage,
    "POST /v1/messages/count_tokens": InputTokens,
    "POST /v1/embeddings": Embeddings,
    "POST /v1/score": Scores,
    "POST /v1/rerank": Ranking,
    "GET /v1/models": ModelList,
    "GET /v1/models/{model}": Model,
    "POST /tokenize": Tokenized,
    "POST /detokenize": Detokenized,
    "GET /load": ServerLoad,
    "GET /version": Version,
    "POST /pause": WeightsStatus,
    "POST /resume": WeightsStatus,
    "POST /update_weights": WeightsStatus,
    "GET /get_world_size": WorldSize,
}
