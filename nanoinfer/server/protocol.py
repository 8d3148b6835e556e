"""The bodies of requests, with OpenAI's names, and vLLM's names for what OpenAI does not have.

In: JSON. Out: checked values, and SamplingParams. An unknown field is refused, because it might be meant to change the answer.
Fields of other servers are in fields.py.
"""

from dataclasses import fields
from typing import Annotated, Any, Literal, Self, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)

from nanoinfer.arguments import declarations
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.features.chat.tools import requires_call
from nanoinfer.features.structured.params import StructuredOutputsParams
from nanoinfer.sampling_params import SamplingParams, over_default
from nanoinfer.server.errors import RequestError, invalid_body
from nanoinfer.server.fields import NEUTRAL_VALUES, WITHOUT_EFFECT, check_fields

MAX_ANSWERS, MAX_PROMPTS, MAX_LOGPROBS, MAX_STOPS = 128, 2048, 20, 16
MAX_LISTED = 1024  # ids or words in a list that is examined at every token
MAX_LOGPROB_IDS = 128  # of logprob_token_ids, as in vLLM
MAX_ALLOWED = 2**18  # the size of the largest vocabulary, all of which allowed_token_ids may contain
MAX_MESSAGES, MAX_PARTS, MAX_TOOLS = 2**13, 2**10, 2**10
MAX_IDS = 2**20  # ids of a prompt
MAX_TOKENIZED = 2**16  # tokens of a text in /tokenize, or the model's length if it is more
MAX_SALT = 1024  # characters of cache_salt
INT64, UINT64 = 2**63, 2**64

JsonObject = dict[str, object]  # part of a body that is passed on unchanged

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_IDS, fail_fast=True)]
StopString = Annotated[str, Field(max_length=128)]
PatternLimit = Literal["max_pattern_size", "min_pattern_size", "min_count"]


def few_items(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_LISTED:  # pydantic would check all values first
        raise ValueError(f"{len(value)} items; at most {MAX_LISTED} items are read")
    return value


def with_ints(value: Any) -> Any:
    """Return a value, or what lists and one object hold, with ints for integers, which JSON may write as 1.0.

    A field that is a float may be an int, too. Objects in lists and in an object are passed on unchanged.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [with_ints(one) for one in value]
    if isinstance(value, dict):
        return {name: item if isinstance(item, dict) else with_ints(item) for name, item in value.items()}
    return value


Stops = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(
        lambda stop: [stop] if isinstance(stop, str) else stop,
        json_schema_input_type=StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)],
    ),
]


def _kind_of_prompt(prompt: object) -> str | None:
    """Return the tag of a prompt's kind, so that an error is about this kind only."""
    if isinstance(prompt, list):
        first = prompt[0] if prompt else 0
        return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<ids>"
    return "<text>" if isinstance(prompt, str) else None


NOT_EMPTY = Field(json_schema_extra={"minItems": 1})  # The engine refuses an empty list, and gives a hint.
PromptIds = Annotated[TokenIds, NOT_EMPTY]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[PromptIds, Tag("<ids>")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), NOT_EMPTY, Tag("<texts>")]
    | Annotated[list[PromptIds], Field(max_length=MAX_PROMPTS, fail_fast=True), NOT_EMPTY, Tag("<lists>")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of token ids, or a list of these",
    ),
]


def as_prompts(prompt: Any) -> list[str | list[int]]:
    """The list of prompts, also if there is only one."""
    return [prompt] if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else prompt


def text_or(item: Any, such_as: str = "objects such as {'type': ...}") -> Any:
    """Return the type of a text or a list of items, whose errors are about the kind that was given."""
    items = Annotated[list[item], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")]

    def form(content: object) -> str | None:
        return "<text>" if isinstance(content, str) else "<parts>" if isinstance(content, list) else None

    message = f"Input should be a string or a list of {such_as}"
    forms = Discriminator(form, custom_error_type="content_type", custom_error_message=message)
    return Annotated[Annotated[str, Tag("<text>")] | items, forms]


def joined(content: str | list[Any]) -> str:
    """Return a content as one text. A list's parts are joined by newlines."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Body(BaseModel):
    """A body. Fields that it does not have are kept, until check_unknown_fields examines them with the server's settings."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"additionalProperties": False})

    @model_validator(mode="before")
    @classmethod
    def read_integers(cls, body: Any) -> Any:
        return with_ints(body) if isinstance(body, dict) else body

    def check_unknown_fields(self) -> None:
        """Refuse unknown fields, and other servers' fields with an unsupported value, in this body and the bodies in it.

        Raises: RequestError, 400.
        """
        check_fields(self.model_extra or {}, type(self).model_fields)
        for name in type(self).model_fields:
            value = getattr(self, name)
            for inner in value if isinstance(value, list) else [value]:
                if not isinstance(inner, Body):
                    break
                inner.check_unknown_fields()


class ModelBody(Body):
    """A body that names one of the served models. None: the first."""

    model: str | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # as in vLLM: with include_usage, each chunk has the usage so far
    include_obfuscation: bool | None = None  # accepted without effect, because only OpenAI pads its events


class OtherTool(Body):
    """A tool that is not a function. check_unknown_fields refuses it, and --ignore-unknown-fields leaves it out."""

    type: str

    def check_unknown_fields(self) -> None:
        message = f"a tool of type {self.type[:50]!r} is not supported; offer functions, or serve with --ignore-unknown-fields"
        raise RequestError(400, message, param="tools", code="unsupported")


def add_accepted_fields(schema: dict[str, Any]) -> None:
    """Add what fields.py accepts to the schema of a body."""
    accepted = {
        name: {"enum": [None, *(value for value in values if value is not None)]}
        for name, (values, _) in NEUTRAL_VALUES.items()
    }
    schema["properties"] = {name: {} for name in sorted(WITHOUT_EFFECT)} | accepted | schema["properties"]
    schema["additionalProperties"] = False


# Parameters that are not fields, are not fields of every body, or have other limits on the server.
_EXCEPTIONS = {"detokenize", "max_tokens", "n", "logprobs", "prompt_logprobs", "return_sampling_mask", "seed"}
# The numbers and flags of SamplingParams, which checks their ranges.
_fields: dict[str, Any] = {
    name: (Annotated[one.text_type | None, Field(description=" ".join(one.sentences))], None)
    for name, one in declarations(SamplingParams).items()
    if one.kind in (bool, int, float) and name not in _EXCEPTIONS
}
_DeclaredBody = create_model("_DeclaredBody", __base__=ModelBody, **_fields)


class SamplingRequest(_DeclaredBody):  # type: ignore[misc]  # a class that was made
    """The fields of every endpoint that generates, where None means the checkpoint's default."""

    model_config = ConfigDict(json_schema_extra=add_accepted_fields)

    seed: Annotated[int, Field(ge=-INT64, lt=UINT64)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_LISTED)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LISTED), BeforeValidator(few_items)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_ALLOWED), NOT_EMPTY] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_LISTED, fail_fast=True)] | None = None
    repetition_detection: (
        Annotated[dict[PatternLimit, Annotated[int, Field(ge=0, le=MAX_LISTED)]], BeforeValidator(with_ints)] | None
    ) = None
    structured_outputs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    vllm_xargs: dict[str, str | int | float | bool | list[object]] | None = None  # extra_args
    stream: bool | None = None


class GenerationRequest(SamplingRequest):
    """The fields of /v1/completions and /v1/chat/completions."""

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stop: Stops | None = None
    response_format: JsonObject | None = None
    logprob_token_ids: Annotated[TokenIds, Field(max_length=MAX_LOGPROB_IDS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_sampling_mask: bool | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Literal[1] | None = None  # as in vLLM: a chunk for each token. None: those that are due share a chunk
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None  # the last tokens. -1: as many as fit

    @model_validator(mode="after")
    def check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs needs stream=false")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be -1, or >= 1, got 0; leave it out to keep the whole prompt")
        if self.return_sampling_mask and not 1 <= (self.top_k or 0) <= MAX_LISTED:
            raise ValueError(f"return_sampling_mask needs top_k from 1 to {MAX_LISTED}, which limits the length of a mask")
        return self

    @property
    def format_field(self) -> str:
        """The name of the field that asks for a format of the answer, if any does."""
        return "structured_outputs" if self.response_format is None else "response_format"


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        if self.logprob_token_ids and self.logprobs is None:
            raise ValueError("logprob_token_ids needs logprobs=0")
        return self


class ChatMessage(BaseModel):
    """One message, of which the chat template may read further fields."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: text_or(dict[str, Any], "parts such as {'type': 'text', 'text': '...'}") | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[JsonObject], Field(max_length=MAX_TOOLS, fail_fast=True)]


class _Rendered(BaseModel):
    """How messages become a prompt."""

    chat_template_kwargs: Annotated[JsonObject, BeforeValidator(few_items)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    tools: Tools | None = None

    @model_validator(mode="after")
    def check_messages(self) -> Self:
        if self.add_special_tokens and self.messages is not None:
            raise ValueError("add_special_tokens must be false with messages, since the chat template writes these tokens")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt=false")
        return self

    @property
    def rendering(self) -> dict[str, Any]:
        """The arguments of render_chat besides the messages and the tools."""
        continues = bool(self.continue_final_message)
        return {
            "add_generation_prompt": self.add_generation_prompt is not False and not continues,
            "continue_final_message": continues,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class ChatCompletionRequest(_Rendered, GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise ValueError(f"{name} needs logprobs=true")
        return self

    @property
    def rendering(self) -> dict[str, Any]:
        """The arguments of render_chat. reasoning_effort sets the variables that templates read, unless they are given."""
        effort = self.reasoning_effort
        variables = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return super().rendering | {"chat_template_kwargs": variables | (self.chat_template_kwargs or {})}

    @property
    def format_field(self) -> str:
        has_format = self.response_format is not None or self.structured_outputs is not None
        return super().format_field if has_format and not requires_call(self.tool_choice) else "tools"


class TokenizeRequest(_Rendered, ModelBody):
    """The body of /tokenize, as in vLLM: a prompt, or messages."""

    model_config = ConfigDict(
        json_schema_extra={"additionalProperties": False, "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )

    prompt: str | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages")
        return self


class DetokenizeRequest(ModelBody):
    """The body of /detokenize, as in vLLM."""

    tokens: Annotated[TokenIds, Field(max_length=MAX_ALLOWED)]


def to_sampling_params(request: CompletionRequest | ChatCompletionRequest, default: SamplingParams) -> SamplingParams:
    """Return the checkpoint's default with the fields of a request."""
    names = {field.name for field in fields(SamplingParams)} & GenerationRequest.model_fields.keys()
    given: dict[str, Any] = {name: getattr(request, name) for name in names}
    if request.seed is not None:
        given["seed"] = request.seed if request.seed == -1 else request.seed % UINT64
    if request.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in request.logit_bias.items()}
    if isinstance(request, ChatCompletionRequest):
        max_tokens = request.max_completion_tokens or request.max_tokens  # None: up to the model's length
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    else:
        if request.max_tokens == 0 and not request.echo:
            raise RequestError(400, "max_tokens must be >= 1, or 0 with echo", param="max_tokens")
        if request.best_of not in (None, request.n or 1):
            raise RequestError(400, "best_of is not supported; leave it out", param="best_of", code="unsupported")
        max_tokens = 16 if request.max_tokens is None else max(request.max_tokens, 1)  # 16 is OpenAI's default
        logprobs = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            given["prompt_logprobs"] = logprobs
    given["structured_outputs"] = _structured_outputs(request)
    given["extra_args"] = request.vllm_xargs
    given = {name: value for name, value in given.items() if value is not None}
    return over_default(default, **given, max_tokens=max_tokens, logprobs=logprobs)


def _structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """Return the constraint on the answer by OpenAI's response_format or vLLM's structured_outputs."""
    response_format, given = request.response_format or {"type": "text"}, request.structured_outputs
    kind = response_format.get("type")
    if kind == "text":
        try:
            return None if given is None else StructuredOutputsParams(**given)
        except NanoinferError as error:
            raise RequestError(400, str(error), param="structured_outputs") from error
    if given is not None:
        raise RequestError(400, "give response_format or structured_outputs, not both", param="response_format")
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        message = f"response_format.type must be text, json_object or json_schema, got {str(kind)[:50]!r}"
        raise RequestError(400, message, param="response_format")
    named = response_format.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise RequestError(400, "response_format.json_schema must be an object with a schema", param="response_format")
    return StructuredOutputsParams(json=named["schema"])


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise InvalidValueError(f"each key of logit_bias must be a token id, got {key[:20]!r}")
    return int(key)


# ---- what /v1/messages and /v1/responses have in common


def chat_request(body: Body, fields: dict[str, Any]) -> ChatCompletionRequest:
    """Return the chat request with these fields, and the fields of a body that mean the same. Raises: RequestError, 400."""
    shared = {name: getattr(body, name) for name in SamplingRequest.model_fields.keys() & type(body).model_fields.keys()}
    try:
        return ChatCompletionRequest(**shared | fields)
    except ValidationError as error:
        raise RequestError(400, invalid_body(error).detail) from error  # its param is no field of the client's body


class Lenient(BaseModel):
    """An object in a list of a body, whose other fields, such as id, status and cache_control, change no answer."""

    model_config = ConfigDict(strict=True)


def list_of_tools(tool: Any) -> Any:
    """Return the type of a list of tools, in which other tools than functions are OtherTools."""

    def form(value: Any) -> str:
        is_function = isinstance(value, dict) and value.get("type") in ("custom", "function", None)
        return "<function>" if is_function else "<other>"

    one = Annotated[Annotated[tool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")], Discriminator(form)]
    return Annotated[list[one], Field(max_length=MAX_TOOLS, fail_fast=True)]


def one_of(kind: str, **models: Any) -> Any:
    """Return the type of an object with one of these models, by its "type". Its errors are about that model. kind: a noun."""

    def tag(value: Any) -> str | None:
        return f"<{value.get('type', 'message')}>" if isinstance(value, dict) else None  # only messages may lack a type

    tagged = Union[tuple(Annotated[model, Tag(f"<{name}>")] for name, model in models.items())]  # noqa: UP007 (of a tuple)
    return Annotated[tagged, Discriminator(tag), check_type(kind, *models)]


def check_type(kind: str, *names: str) -> BeforeValidator:
    """Refuse an object whose type is not one of these by its name. kind: what the object is, such as "a block"."""

    def check(value: object) -> object:
        name = value.get("type", "message") if isinstance(value, dict) else names[0]  # pydantic refuses other values
        if name not in names:
            raise ValueError(f"{kind} of type {str(name)[:50]!r} is not supported; give {', '.join(names)}")
        return value

    return BeforeValidator(check)
