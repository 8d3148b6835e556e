"""The endpoints that read texts instead of answering them: /v1/embeddings, /v1/score and /v1/rerank.

In: OpenAI's, vLLM's and Jina's fields. Out: vectors and scores. Each text is a request like those of the other endpoints, with
their limits, priorities and errors.
"""

import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

from fastapi import FastAPI
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field
from starlette.responses import Response

from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.features.embedding.pooling import PoolingParams, Scoring
from nanoinfer.server.answers import Answers, respond_whole
from nanoinfer.server.async_llm import AsyncLLM
from nanoinfer.server.errors import json_response
from nanoinfer.server.limits import StrictRequest
from nanoinfer.server.protocol import (
    INT64,
    MAX_PROMPTS,
    NOT_EMPTY,
    JsonObject,
    ModelBody,
    Prompt,
    add_accepted_fields,
    as_prompts,
)


def _text_of(document: object) -> object:
    return document["text"] if isinstance(document, dict) and document.keys() == {"text"} else document  # Jina's format


Texts = Annotated[list[Annotated[str, BeforeValidator(_text_of)]], Field(max_length=MAX_PROMPTS, fail_fast=True), NOT_EMPTY]
OneOrMore = Annotated[
    Texts, BeforeValidator(lambda texts: [texts] if isinstance(texts, str) else texts, json_schema_input_type=str | Texts)
]


class TextsRequest(ModelBody):
    """The fields of all these endpoints."""

    model_config = ConfigDict(json_schema_extra=add_accepted_fields)

    truncate_prompt_tokens: int | None = None
    add_special_tokens: Literal[True] | None = None
    priority: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    timeout: float | None = None


class EmbeddingRequest(TextsRequest):
    """The body of /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class ScoreRequest(TextsRequest):
    """The body of /v1/score."""

    queries: Annotated[OneOrMore, Field(validation_alias=AliasChoices("queries", "text_1"), description="Or text_1.")]
    documents: Annotated[OneOrMore, Field(validation_alias=AliasChoices("documents", "text_2"), description="Or text_2.")]
    instruction: str | None = None


class RerankRequest(TextsRequest):
    """The body of /v1/rerank."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0: all, as in vLLM
    return_documents: bool | None = None
    instruction: str | None = None


class PoolingEndpoints:
    """The endpoints. check_body refuses unknown fields and models, and returns the model's name."""

    def __init__(self, async_llm: AsyncLLM, check_body: Callable[[TextsRequest], str]) -> None:
        self._async_llm, self._check_body = async_llm, check_body

    def add_to(self, app: FastAPI) -> None:
        app.post("/v1/embeddings")(self.embeddings)
        app.post("/v1/score")(self.score)
        app.post("/score", include_in_schema=False)(self.score)
        app.post("/v1/rerank")(self.rerank)
        for path in ("/rerank", "/v2/rerank"):
            app.post(path, include_in_schema=False)(self.rerank)

    async def embeddings(self, http: StrictRequest, body: EmbeddingRequest) -> Response:
        model = self._check_body(body)
        params = PoolingParams(dimensions=body.dimensions, truncate_prompt_tokens=body.truncate_prompt_tokens)
        options = {"priority": body.priority, "timeout": body.timeout}
        prepares = [partial(self._async_llm.pooler.prepare, prompt, params, **options) for prompt in as_prompts(body.input)]

        def fields_of(prepared: list[PreparedRequest]) -> JsonObject:
            found = [text.reader.embedding.numpy(force=True) for text in prepared]
            vectors = [vector.tolist() for vector in found]
            if body.encoding_format == "base64":  # OpenAI's client expects fp32, the lowest byte first
                vectors = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in found]
            return {"data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]}

        return await self._read(http, model, prepares, fields_of)

    async def score(self, http: StrictRequest, body: ScoreRequest) -> Response:
        def fields_of(scores: list[float]) -> JsonObject:
            return {"data": [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]}

        return await self._score(http, body, body.queries, fields_of)

    async def rerank(self, http: StrictRequest, body: RerankRequest) -> Response:
        def fields_of(scores: list[float]) -> JsonObject:
            order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
            results: list[JsonObject] = [{"index": i, "relevance_score": scores[i]} for i in order]
            if body.return_documents is not False:
                results = [result | {"document": {"text": body.documents[i]}} for result, i in zip(results, order, strict=True)]
            return {"results": results}

        return await self._score(http, body, [body.query], fields_of)

    async def _score(
        self,
        http: StrictRequest,
        body: ScoreRequest | RerankRequest,
        queries: list[str],
        fields_of: Callable[[list[float]], JsonObject],
    ) -> Response:
        model = self._check_body(body)
        params = PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens)
        options = {"priority": body.priority, "timeout": body.timeout}
        make = partial(Scoring, self._async_llm.pooler, queries, body.documents, params, body.instruction, **options)
        scoring = await self._async_llm.threads.run(make, is_large=http.is_large)
        return await self._read(http, model, scoring.prepares, lambda prepared: fields_of(scoring.scores(prepared)))

    async def _read(
        self,
        http: StrictRequest,
        model: str,
        prepares: Sequence[Callable[[], PreparedRequest]],
        fields_of: Callable[[list[PreparedRequest]], JsonObject],
    ) -> Response:
        """Read the texts, and answer with the fields that are made of them."""
        answers = Answers(1)

        def whole() -> Response:
            prepared = [stream.prepared for stream in answers.streams]
            num = sum(len(one.prompt_token_ids) for one in prepared)
            head = {"id": answers.id, "object": "list", "created": int(time.time()), "model": model}
            return json_response(head | fields_of(prepared) | {"usage": {"prompt_tokens": num, "total_tokens": num}})

        await answers.submit(self._async_llm, prepares, is_large=http.is_large)
        return await respond_whole(http, answers, partial(self._async_llm.threads.run, whole, is_large=http.is_large))
