"""The JSON of the server's responses with status 200, by the endpoints, in ANSWERS.

NotRequired: a field that only some requests ask for, or that the answer may lack.
"""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from nanoinfer.outputs import Logprob
from nanoinfer.server.protocol import JsonObject


def shape(**fields):
    """The type of an object with these fields and no others."""
    return TypedDict("Shape", fields)


# ---- /v1/chat/completions and /v1/completions

MADE = {"id": str, "created": int, "model": str}
USAGE = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int, "prompt_tokens_details": shape(cached_tokens=int)}
REASONING = shape(reasoning_tokens=int)
OF_PROMPT = {"prompt_token_ids": NotRequired[list[int]], "prompt_logprobs": NotRequired[list[dict[str, Logprob] | None]]}
OF_CHOICE = {
    "index": int,
    "finish_reason": Literal["stop", "length", "repetition", "tool_calls"],
    "stop_reason": int | str | None,
    "sampling_mask": NotRequired[list[list[int]]],
    "token_ids": NotRequired[list[int]],
}
TOP = {"token": str, "logprob": float, "bytes": list[int]}
TOKEN_LOGPROB = shape(**TOP, top_logprobs=list[shape(**TOP)])
CHAT_LOGPROBS = shape(content=list[TOKEN_LOGPROB], refusal=None)
CALL = shape(id=str, type=Literal["function"], function=shape(name=str, arguments=str))
REASONED = {"reasoning": NotRequired[str], "reasoning_content": NotRequired[str], "tool_calls": NotRequired[list[CALL]]}
MESSAGE = shape(role=Literal["assistant"], content=str | None, refusal=None, **REASONED)
CHAT_CHOICE = shape(**OF_CHOICE, message=MESSAGE, logprobs=CHAT_LOGPROBS | None)
CHAT_USAGE = shape(**USAGE, completion_tokens_details=REASONING)
CHAT = shape(**MADE, **OF_PROMPT, object=Literal["chat.completion"], choices=list[CHAT_CHOICE], usage=CHAT_USAGE)
LOGPROBS = shape(
    tokens=list[str], token_logprobs=list[float | None], top_logprobs=list[dict[str, float] | None], text_offset=list[int]
)
CHOICE = shape(**OF_CHOICE, **OF_PROMPT, text=str, logprobs=LOGPROBS | None)
COMPLETION = shape(**MADE, object=Literal["text_completion"], choices=list[CHOICE], usage=shape(**USAGE))

# ---- /v1/messages

TEXT = shape(type=Literal["text"], text=str)
THINKING = shape(type=Literal["thinking"], thinking=str, signature=str)
TOOL_USE = shape(type=Literal["tool_use"], id=str, name=str, input=JsonObject)
CACHES = {"cache_creation_input_tokens": int, "cache_read_input_tokens": int}
ANTHROPIC_MESSAGE = shape(
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=list[TEXT | THINKING | TOOL_USE],
    stop_reason=Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"],
    stop_sequence=str | None,
    stop_details=None,
    usage=shape(**CACHES, input_tokens=int, output_tokens=int),
)

# ---- /v1/responses

ITEM = {"id": str, "status": Literal["completed", "incomplete"]}
OUTPUT_TEXT = shape(type=Literal["output_text"], text=str, annotations=list[JsonObject], logprobs=list[JsonObject])
OUTPUT_MESSAGE = shape(**ITEM, type=Literal["message"], role=Literal["assistant"], content=list[OUTPUT_TEXT])
THOUGHTS = {"summary": list[JsonObject], "content": list[shape(type=Literal["reasoning_text"], text=str)]}
OUTPUT_REASONING = shape(**ITEM, **THOUGHTS, type=Literal["reasoning"], encrypted_content=None)
OUTPUT_CALL = shape(**ITEM, type=Literal["function_call"], call_id=str, name=str, arguments=str)
RESPONSE = shape(
    id=str,
    object=Literal["response"],
    created_at=int,
    status=Literal["completed", "incomplete"],
    error=None,
    incomplete_details=shape(reason=Literal["max_output_tokens"]) | None,
    instructions=str | None,
    metadata=dict[str, str],
    model=str,
    output=list[OUTPUT_MESSAGE | OUTPUT_REASONING | OUTPUT_CALL],
    parallel_tool_calls=bool,
    store=bool,
    temperature=float,
    tool_choice=str | JsonObject,
    tools=list[JsonObject],
    top_p=float,
    text=JsonObject,
    usage=shape(
        input_tokens=int,
        input_tokens_details=shape(cached_tokens=int, cache_write_tokens=int),
        output_tokens=int,
        output_tokens_details=REASONING,
        total_tokens=int,
    ),
    max_output_tokens=NotRequired[int],
    previous_response_id=NotRequired[str],
    reasoning=NotRequired[JsonObject],
)

# ---- the others

OF_TEXTS = {**MADE, "object": Literal["list"], "usage": shape(prompt_tokens=int, total_tokens=int)}
EMBEDDING = shape(object=Literal["embedding"], index=int, embedding=list[float] | str)
SCORE = shape(object=Literal["score"], index=int, score=float)
RANKED = shape(index=int, relevance_score=float, document=NotRequired[shape(text=str)])
MODEL = shape(id=str, object=Literal["model"], root=str, created=int, owned_by=str, max_model_len=int, parent=NotRequired[str])
WEIGHTS = shape(weights_version=int, is_paused=bool)

# The path and the method of an endpoint -> its answer.
ANSWERS = {
    "POST /v1/completions": COMPLETION,
    "POST /v1/chat/completions": CHAT,
    "POST /v1/responses": RESPONSE,
    "GET /v1/responses/{response_id}": RESPONSE,
    "DELETE /v1/responses/{response_id}": shape(id=str, object=Literal["response"], deleted=bool),
    "POST /v1/responses/input_tokens": shape(input_tokens=int, object=Literal["response.input_tokens"]),
    "POST /v1/messages": ANTHROPIC_MESSAGE,
    "POST /v1/messages/count_tokens": shape(input_tokens=int),
    "POST /v1/embeddings": shape(**OF_TEXTS, data=list[EMBEDDING]),
    "POST /v1/score": shape(**OF_TEXTS, data=list[SCORE]),
    "POST /v1/rerank": shape(**OF_TEXTS, results=list[RANKED]),
    "GET /v1/models": shape(object=Literal["list"], data=list[MODEL]),
    "GET /v1/models/{model}": MODEL,
    "POST /tokenize": shape(count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None),
    "POST /detokenize": shape(prompt=str),
    "GET /load": shape(server_load=int),
    "GET /version": shape(version=str),
    "POST /pause": WEIGHTS,
    "POST /resume": WEIGHTS,
    "POST /update_weights": WEIGHTS,
    "GET /get_world_size": shape(world_size=int),
}
