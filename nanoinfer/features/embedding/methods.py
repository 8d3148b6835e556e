"""LLM.embed and LLM.score."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from nanoinfer.arguments import check_argument_names
from nanoinfer.engine.prompts import PromptType
from nanoinfer.features import LoadedLLM

if TYPE_CHECKING:
    from nanoinfer.features.embedding.pooling import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput


class EmbeddingMethods:
    """The part of LLM that reads texts instead of answering them."""

    @check_argument_names("embed()")
    def embed(
        self: LoadedLLM,
        prompts: PromptType | Sequence[PromptType],
        use_tqdm: bool = True,
        *,
        pooling_params: "PoolingParams | None" = None,
        truncate_prompt_tokens: int | None = None,
    ) -> "list[EmbeddingRequestOutput]":
        """Compute the embedding of each text, and return them in the order of the texts.

        The checkpoint may lack an LM head, as one whose architecture is Qwen3Model.

        Args:
            prompts: Texts as for generate(), of at most max_model_len tokens each. As in sentence-transformers, checkpoints may
                have a default prompt, which comes before each text, and a max_seq_length, at which texts are cut, unless
                truncate_prompt_tokens is given. Other instructions before a query are a part of the text. Ids have no prompt.
            use_tqdm: Whether to show a progress bar.
            pooling_params: None is PoolingParams().
            truncate_prompt_tokens: The field of pooling_params, as an argument of its own, as in vLLM.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: As generate does, and for texts that are too long.
            UnsupportedError: The checkpoint says that something else is to be computed.
        """
        from nanoinfer.features.embedding.pooling import EmbeddingOutput, EmbeddingRequestOutput, Pooler, PoolingParams
        from nanoinfer.features.logprobs import reading

        params = PoolingParams.of(pooling_params, truncate_prompt_tokens)
        prepared = reading.prepare_all(prompts, partial(Pooler(self).prepare, params=params))
        requests = self._complete(prepared, use_tqdm)
        reading.check(request.output for request in requests)
        return [
            EmbeddingRequestOutput(request.request_id, EmbeddingOutput(one.reader.embedding.tolist()), one.prompt_token_ids)
            for request, one in zip(requests, prepared, strict=True)
        ]

    @check_argument_names("score()")
    def score(
        self: LoadedLLM,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        pooling_params: "PoolingParams | None" = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> "list[ScoringRequestOutput]":
        """Compute how well each document fits its query. There is one query for all documents, or a query for each.

        A checkpoint whose modules.json has Pooling is an embedding model, which reads each text alone. Any other checkpoint
        is a reranker, which reads each pair. use_tqdm, pooling_params and truncate_prompt_tokens are as in embed.

        Args:
            instruction: The criterion by which a reranker judges. None: INSTRUCTION of features/embedding/pooling.py.

        Raises: As embed does.
        """
        from nanoinfer.features.embedding.pooling import Pooler, PoolingParams, Scoring, ScoringOutput, ScoringRequestOutput
        from nanoinfer.features.logprobs import reading

        params = PoolingParams.of(pooling_params, truncate_prompt_tokens)
        scoring = Scoring(Pooler(self), queries, documents, params, instruction)
        prepared = reading.prepare_all(scoring.prepares, lambda prepare: prepare())
        requests = self._complete(prepared, use_tqdm)
        reading.check(request.output for request in requests)
        outputs = []
        for value, texts in zip(scoring.scores(prepared), scoring.texts, strict=True):
            ids = [token_id for text in texts for token_id in prepared[text].prompt_token_ids]
            outputs.append(ScoringRequestOutput(requests[texts[-1]].request_id, ScoringOutput(value), ids))
        return outputs
