"""The endpoints, which create_app(async_llm, settings) returns as an ASGI application.

In: HTTP requests. Out: responses. protocol.py defines what a request means, and choices.py the JSON of its answers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import Response

from nanoinfer import __version__
from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.adapters.adapters import adapter_of
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.features.chat.messages import end_of_reasoning, render_chat
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.server import protocol
from nanoinfer.server.answers import EventStream, Reply, respond_whole
from nanoinfer.server.async_llm import AsyncLLM
from nanoinfer.server.choices import (
    ChatFormat,
    ChatReply,
    CompletionReply,
    check_length,
    max_tokenized,
    messages_of,
    prepare_completion,
)
from nanoinfer.server.errors import (
    ERRORS,
    MESSAGES_ERRORS,
    RequestError,
    add_error_handlers,
    json_response,
    refused_format,
    text_body,
)
from nanoinfer.server.limits import RequestLimits, StrictRequest, StrictRoute
from nanoinfer.server.messages import CountTokensRequest, MessagesReply, MessagesRequest
from nanoinfer.server.messages import to_chat as messages_to_chat
from nanoinfer.server.metrics import Metrics
from nanoinfer.server.page import add_page
from nanoinfer.server.pooling import PoolingEndpoints, TextsRequest
from nanoinfer.server.recording import RequestLog
from nanoinfer.server.responses import ResponsesReply, ResponsesRequest, ResponseStore, StoredResponse
from nanoinfer.server.responses import to_chat as responses_to_chat
from nanoinfer.server.settings import ServerSettings
from nanoinfer.server.updates import add_adapters, add_weights

STREAMS = text_body("text/event-stream")  # or JSON


def create_app(async_llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Make the application of an AsyncLLM, which the caller shuts down. Raises: as LLM.generate for a bad adapter."""
    models = Models(settings)
    for adapter in models.adapters.values():
        adapter_of(async_llm.engine.inputs, adapter)  # reads the adapter now, not while the event loop serves requests
    app = FastAPI(
        title="nanoinfer",
        version=__version__,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
    )
    app.router.route_class = StrictRoute
    app.state.threads = async_llm.threads
    add_error_handlers(app)
    app.add_middleware(RequestLimits, settings=settings)
    if settings.cors_origin:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origin, allow_methods=["*"], allow_headers=["*"])
    add_page(app, async_llm, models.names[0])
    GenerationEndpoints(async_llm, settings, models).add_to(app)
    PoolingEndpoints(async_llm, models.check_texts_body).add_to(app)
    _add_tokenizer(app, async_llm, models)
    _add_information(app, async_llm, models, settings.metrics_prefix)
    if settings.record is not None:
        async_llm.on_finished = RequestLog(settings.record).add
    if settings.enable_weight_update:
        add_weights(app, async_llm)
    if settings.enable_lora_update:
        add_adapters(app, async_llm, models.adapters, models.names)
    return app


class Models:
    """The names that requests may give as model: those of the model, and those of adapters, which clients may change."""

    def __init__(self, settings: ServerSettings) -> None:
        """Raises: InvalidValueError for a wrong lora_modules."""
        self.names, self._accepts_unknown_fields = settings.served_model_name, settings.ignore_unknown_fields
        self.adapters: dict[str, LoRARequest] = {}
        for number, module in enumerate(settings.lora_modules, start=1):
            name, _, path = module.partition("=")
            if not (name and path) or name in self.adapters:
                raise InvalidValueError(f"--lora-modules must be NAME=PATH with a new name, got {module!r}")
            self.adapters[name] = LoRARequest(name, number, path)

    def check(self, name: str | None) -> str:
        """Return the model name for the answer. A model that is not served is refused."""
        names = (*self.names, *self.adapters)
        if name is not None and name not in names:
            message = f"the model {name[:100]!r} is not served; this server has {', '.join(names)}"
            raise RequestError(404, message, param="model", code="model_not_found")
        return name or self.names[0]

    def check_body(self, body: protocol.ModelBody) -> str:
        """Refuse unknown fields of a body, and a model that is not served. Returns the model name for the answer."""
        if not self._accepts_unknown_fields:
            body.check_unknown_fields()
        return self.check(body.model)

    def check_texts_body(self, body: TextsRequest) -> str:
        """Check a body like check_body, and refuse adapters."""
        if (model := self.check_body(body)) in self.adapters:
            message = f"{model} is an adapter, which embeddings and scores do not use; name the model"
            raise RequestError(400, message, param="model")
        return model


class GenerationEndpoints:
    """The endpoints that generate. Those of /v1/messages and /v1/responses convert their bodies to chat requests."""

    def __init__(self, async_llm: AsyncLLM, settings: ServerSettings, models: Models) -> None:
        self.async_llm, self.models = async_llm, models
        self.inputs, self.tokenizer = async_llm.engine.inputs, async_llm.engine.tokenizer
        self.default = async_llm.llm.get_default_sampling_params()
        template = "" if self.tokenizer is None else self.tokenizer.get_chat_template(has_tools=True)
        self.chat_format = ChatFormat.choose(template, settings.reasoning_parser, settings.tool_call_parser)
        self.store = ResponseStore(settings.max_stored_responses)
        self.cache_salt_by_key = settings.cache_salt_by_key

    def add_to(self, app: FastAPI) -> None:
        streaming = partial(app.post, responses=STREAMS)
        streaming("/v1/completions")(self.completions)
        streaming("/v1/chat/completions")(self.chat_completions)
        streaming("/v1/responses")(self.responses)
        app.get("/v1/responses/{response_id}")(self.stored_response)
        app.delete("/v1/responses/{response_id}")(self.delete_response)
        app.post("/v1/responses/input_tokens")(self.count_input_tokens)
        app.post("/v1/messages", responses=MESSAGES_ERRORS | STREAMS)(self.messages)
        app.post("/v1/messages/count_tokens", responses=MESSAGES_ERRORS)(self.count_tokens)

    async def completions(self, http: StrictRequest, body: protocol.CompletionRequest) -> Response:
        reply = CompletionReply(body, self.models.check_body(body), self.tokenizer)
        prompts = protocol.as_prompts(body.prompt)
        prepares = [partial(prepare_completion, body, prompt, self.inputs) for prompt in prompts]
        return await self._generate(http, body, prepares, reply)

    async def chat_completions(self, http: StrictRequest, body: protocol.ChatCompletionRequest) -> Response:
        return await self._chat(http, body, ChatReply(body, self.models.check_body(body), self.tokenizer, self.chat_format))

    async def messages(self, http: StrictRequest, body: MessagesRequest) -> Response:
        model = self.models.check_body(body)
        end_id = end_of_reasoning(self.inputs.tokenizer, self.inputs.vocab_size)
        to_chat = partial(messages_to_chat, body, ends_reasoning=end_id is not None)
        chat = await self.async_llm.threads.run(to_chat, is_large=http.is_large)
        return await self._chat(http, chat, MessagesReply(body, chat, self.chat_format, model))

    async def count_tokens(self, http: StrictRequest, body: CountTokensRequest) -> protocol.JsonObject:
        self.models.check_body(body)
        return {"input_tokens": await self._num_tokens(http, partial(messages_to_chat, body))}

    async def count_input_tokens(self, http: StrictRequest, body: ResponsesRequest) -> protocol.JsonObject:
        self.models.check_body(body)
        num_tokens = await self._num_tokens(http, lambda: responses_to_chat(body, self._previous(http, body).messages)[0])
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    async def _num_tokens(self, http: StrictRequest, to_chat: Callable[[], protocol.ChatCompletionRequest]) -> int:
        """Return the number of tokens of the prompt to which a chat request is rendered."""

        def counted() -> int:
            most = max_tokenized(self.inputs)
            tokens = self.chat_format.render(to_chat(), self.inputs, max_tokens=most)["prompt_token_ids"]
            return len(check_length(tokens, most))

        return await self.async_llm.threads.run(counted, is_large=http.is_large)

    async def responses(self, http: StrictRequest, body: ResponsesRequest) -> Response:
        model = self.models.check_body(body)
        is_kept, previous = self.store.keeps(body.store), self._previous(http, body)
        num_bytes = len(await http.body()) + previous.num_bytes
        to_chat = partial(responses_to_chat, body, previous.messages)
        chat, messages = await self.async_llm.threads.run(to_chat, is_large=http.is_large)
        keep = partial(self.store.add, http.key, messages, num_bytes) if is_kept else None
        return await self._chat(http, chat, ResponsesReply(body, chat, self.chat_format, model, self.tokenizer, keep))

    def _previous(self, http: StrictRequest, body: ResponsesRequest) -> StoredResponse:
        """Return the response that a request continues, or an empty one."""
        if body.previous_response_id is None:
            return StoredResponse({}, [], 0)
        return self.store.get(http.key, body.previous_response_id, param="previous_response_id")

    async def stored_response(self, http: StrictRequest, response_id: str, stream: bool = False) -> Response:
        if stream:
            message = "stream=true is not supported for a stored response, which is complete; leave it out"
            raise RequestError(400, message, param="stream", code="unsupported")
        return json_response(self.store.get(http.key, response_id).json)

    async def delete_response(self, http: StrictRequest, response_id: str) -> protocol.JsonObject:
        self.store.delete(http.key, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def _chat(self, http: StrictRequest, chat: protocol.ChatCompletionRequest, reply: Reply) -> Response:
        return await self._generate(http, chat, [partial(self.chat_format.prepare, chat, self.inputs)], reply)

    async def _generate(
        self,
        http: StrictRequest,
        body: protocol.CompletionRequest | protocol.ChatCompletionRequest,
        prepares: Sequence[Callable[[SamplingParams], PreparedRequest]],
        reply: Reply,
    ) -> Response:
        """Answer one prompt for each function in `prepares`. The functions, and the checks of params, run in threads."""
        self.models.check(body.model)  # again, because an adapter may have been dropped
        lora_request = self.models.adapters.get(body.model or "")
        # Found before anything is awaited, because another client may drop the adapter meanwhile.
        adapter = None if lora_request is None else adapter_of(self.inputs, lora_request)
        params = cache(partial(protocol.to_sampling_params, body, self.default))  # in the thread of the first prompt

        def prepare_adapted(prepare: Callable[[SamplingParams], PreparedRequest]) -> PreparedRequest:
            prepared = prepare(params())
            if self.cache_salt_by_key:
                prepared = replace(prepared, cache_salt=f"{http.key}{prepared.cache_salt or ''}")
            return prepared if adapter is None else adapter.added_to(prepared)

        adapted = [partial(prepare_adapted, prepare) for prepare in prepares]
        field = reply.response_format if body.format_field == "response_format" else body.format_field
        reply.answers.format_field = field
        try:
            await reply.answers.submit(self.async_llm, adapted, is_large=http.is_large)
        except InvalidValueError as error:
            if (refused := refused_format(str(error), field)) is None:
                raise
            raise refused from error
        if body.stream:
            return EventStream(reply.answers, reply.events())

        async def whole() -> Response:
            return json_response(reply.whole())

        return await respond_whole(http, reply.answers, whole)


def _add_tokenizer(app: FastAPI, async_llm: AsyncLLM, models: Models) -> None:
    engine, vocab_size = async_llm.engine, async_llm.llm.info.vocab_size

    def tokenizer() -> Any:
        if engine.tokenizer is None:
            raise RequestError(400, "this model has no tokenizer")
        return engine.tokenizer

    @app.post("/tokenize")
    async def tokenize(http: StrictRequest, body: protocol.TokenizeRequest) -> Response:
        models.check_body(body)
        return await async_llm.threads.run(partial(tokenized, body), is_large=http.is_large)

    def tokenized(body: protocol.TokenizeRequest) -> Response:
        most = max_tokenized(engine.inputs)
        if body.messages is None:
            add_special_tokens = body.add_special_tokens is not False
            tokens = list(tokenizer().encode(body.prompt, add_special_tokens=add_special_tokens, max_tokens=most))
        else:
            rendered = render_chat(
                engine.inputs, messages_of(body.messages), tools=body.tools, max_tokens=most, **body.rendering
            )
            tokens = rendered["prompt_token_ids"]
        check_length(tokens, most)
        texts = [tokenizer().backend.id_to_token(token_id) for token_id in tokens] if body.return_token_strs else None
        max_model_len = engine.max_model_len
        return json_response({"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": texts})

    @app.post("/detokenize")
    async def detokenize(http: StrictRequest, body: protocol.DetokenizeRequest) -> Response:
        models.check_body(body)
        return await async_llm.threads.run(partial(detokenized, body), is_large=http.is_large)

    def detokenized(body: protocol.DetokenizeRequest) -> Response:
        if (largest := max(body.tokens, default=0)) >= vocab_size:
            raise RequestError(400, f"this model's token ids are 0 .. {vocab_size - 1}, got {largest}", param="tokens")
        return json_response({"prompt": tokenizer().decode(body.tokens, skip_special_tokens=False)})


def _add_information(app: FastAPI, async_llm: AsyncLLM, models: Models, metrics_prefix: str) -> None:
    created = int(time.time())
    metrics = Metrics(async_llm, models.names[0], metrics_prefix)

    def card(name: str) -> protocol.JsonObject:
        facts = {"id": name, "object": "model", "root": name, "created": created, "owned_by": "nanoinfer"}
        parent = {"parent": models.names[0]} if name in models.adapters else {}
        return facts | {"max_model_len": async_llm.engine.max_model_len} | parent

    @app.get("/v1/models")
    async def list_models() -> protocol.JsonObject:
        return {"object": "list", "data": list(map(card, (*models.names, *models.adapters)))}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> protocol.JsonObject:
        return card(models.check(model))

    @app.get("/ping", response_class=Response)
    @app.get("/health", response_class=Response)
    async def health() -> Response:
        async_llm.check_health()  # an error becomes status 503
        return Response()

    @app.get("/metrics", response_class=Response, responses=text_body("text/plain"))
    async def metrics_text() -> Response:
        return Response(await metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/load")
    async def load() -> protocol.JsonObject:
        return {"server_load": async_llm.num_unfinished_answers}

    @app.get("/version")
    async def version() -> protocol.JsonObject:
        return {"version": __version__}
