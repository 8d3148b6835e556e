"""LLM's embeddings and scores: one prefill per text, which caches nothing.

In: texts, and an LLM, whose methods are in methods.py. Out: vectors and numbers, under vLLM's names. An LLM that only generates
does not import this file.

The files of sentence-transformers in a checkpoint say how hidden rows become a vector. Without them it is the last token's row,
normalised, as in vLLM. A reranker is asked whether a document answers a query, in the template of Qwen3-Reranker
(https://huggingface.co/Qwen/Qwen3-Reranker-0.6B). Its score is the probability that the next token is "yes" and not "no".
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge
from tokenizers.normalizers import Lowercase
from torch import Tensor
from typing_extensions import Doc

from nanoinfer.arguments import Allowed, declared, read_fields
from nanoinfer.engine.inputs import PreparedRequest
from nanoinfer.errors import (
    CheckpointError,
    InvalidTypeError,
    InvalidValueError,
    UnsupportedError,
    check_flag,
    check_integer,
    out_of_range,
    shown,
)
from nanoinfer.execution.executor import PromptReader
from nanoinfer.features import LoadedLLM
from nanoinfer.features.logprobs import reading
from nanoinfer.loading.checkpoint import MAX_JSON_BYTES, Checkpoint, check_file, read_json
from nanoinfer.scheduling.step_plan import PromptRows

if TYPE_CHECKING:
    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.sampling.sampler import HeadRows

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"  # the default of rerankers
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@declared
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """What to compute of a text.

    Args: as declared below.
    """

    # fmt: off
    dimensions: Annotated[int | None, Ge(1), Doc(
        "How many first elements of the embedding are kept, and normalised again, for models that were trained for it "
        "(Matryoshka). None is all.")] = None
    truncate_prompt_tokens: Annotated[int | None, Ge(-1), Allowed("-1, or >= 1"), Doc(
        "How many first tokens of a text are kept, apart from those that the tokenizer or the template adds at its end. -1 is "
        "the model's length. None refuses texts that are longer than that.")] = None
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self)
        if self.truncate_prompt_tokens == 0:
            raise out_of_range("truncate_prompt_tokens", 0, "-1, or >= 1")

    @classmethod
    def of(cls, given: object, truncate_prompt_tokens: int | None) -> "PoolingParams":
        """Return what embed() and score() were given. Raises: InvalidTypeError, InvalidValueError."""
        if given is None:
            return cls(truncate_prompt_tokens=truncate_prompt_tokens)
        if not isinstance(given, PoolingParams):
            raise InvalidTypeError(f"pooling_params must be PoolingParams, or None, got {shown(given)}")
        if truncate_prompt_tokens is not None:
            raise InvalidValueError("give truncate_prompt_tokens, or pooling_params, which have it too, not both")
        return given


@dataclass(frozen=True)
class EmbeddingOutput:
    """embedding: a list of hidden_size numbers, or of `dimensions` numbers."""

    embedding: list[float]


@dataclass(frozen=True)
class ScoringOutput:
    """score: a reranker's probability, 0 .. 1, or the cosine of both texts by an embedding model, -1 .. 1."""

    score: float


@dataclass(frozen=True)
class PoolingRequestOutput:
    """The result for a text, or for a pair of texts, whose ids follow each other in prompt_token_ids."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput):
    """A text and its embedding."""

    outputs: EmbeddingOutput


class ScoringRequestOutput(PoolingRequestOutput):
    """A query with a document, and their score."""

    outputs: ScoringOutput


# ---- what a checkpoint asks to compute


@dataclass(frozen=True)
class Pooling:
    """How hidden rows become a vector, and which ids are the answers of a reranker."""

    mode: str = "lasttoken"  # or "mean"
    normalize: bool = True
    is_embedding: bool = False  # whether it is an embedding model, not a reranker
    answer_ids: tuple[object, object] | None = None  # the ids of "no" and "yes"
    max_tokens: int | None = None  # the length at which texts are cut. None: the checkpoint has no limit
    prompt: str = ""  # precedes each text
    lower: bool = False  # whether capital letters are lowered

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Pooling":
        """Read the files of sentence-transformers as the library itself does.

        Raises: UnsupportedError, CheckpointError for corrupted files.
        """
        path = checkpoint.path / "modules.json"
        if not path.exists():
            return cls()
        modules = _modules(path)
        for name in modules.keys() - {"Transformer", "Pooling", "Normalize", "LogitScore"}:
            raise UnsupportedError(
                f"{path} has the module {shown(name)}; Transformer, Pooling, Normalize and LogitScore may be"
            )
        is_embedding, answers = "Pooling" in modules, modules.get("LogitScore")
        answer_ids = None if answers is None else (answers.get("false_token_id"), answers.get("true_token_id"))
        mode = _mode(modules["Pooling"], path) if is_embedding else cls.mode
        max_tokens, lower = _transformer(modules.get("Transformer", {}))
        prompt = _default_prompt(checkpoint.path / "config_sentence_transformers.json")
        if prompt and mode == "mean" and not modules["Pooling"].get("include_prompt", True):
            raise UnsupportedError(f"{path} wants a mean without its default prompt (include_prompt); this is not supported")
        return cls(mode, "Normalize" in modules, is_embedding, answer_ids, max_tokens, prompt, lower)

    def text(self, content: str) -> str:
        """Return the text whose tokens are read. The tokenizer's own normalizers come after it."""
        return Lowercase().normalize_str(self.prompt + content) if self.lower else self.prompt + content


def _modules(path: Path) -> dict[str, dict[str, Any]]:
    """Return the modules of sentence-transformers: class name -> settings."""
    check_file(path, MAX_JSON_BYTES)
    try:
        folders = {str(item["type"]).rpartition(".")[2]: str(item["path"]) for item in json.loads(path.read_text("utf-8"))}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} must be a list of modules with a type and a path; download it again") from error
    for folder in folders.values():
        if folder != Path(folder).name:
            raise CheckpointError(f"{path} names {shown(folder)}, outside its folder; download it again")
    settings = {"Transformer": "sentence_bert_config.json"}  # the others have a config.json
    files = {name: path.parent / folder / settings.get(name, "config.json") for name, folder in folders.items()}
    return {name: read_json(file) if file.exists() else {} for name, file in files.items()}


def _transformer(settings: dict[str, Any]) -> tuple[int | None, bool]:
    """Return max_seq_length and do_lower_case of sentence_bert_config.json."""
    for name in ("processing_kwargs", "tokenizer_name_or_path"):
        if settings.get(name):
            raise UnsupportedError(f"{name} must be None, got {shown(settings[name])}; others are not supported")
    max_tokens, lower = settings.get("max_seq_length"), settings.get("do_lower_case", False)
    check_integer("max_seq_length", max_tokens, 1, None, ">= 1", or_none=True)
    check_flag("do_lower_case", lower)
    return max_tokens, lower


def _default_prompt(path: Path) -> str:
    """Return the prompt before each text, which the file names, or "" if it names none or does not exist."""
    settings = read_json(path) if path.exists() else {}
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts, dict) or not isinstance(prompt := prompts.get(name), str):
        raise CheckpointError(f"default_prompt_name in {path} must name one of its prompts, got {shown(name)}")
    return prompt


def _mode(settings: dict[str, object], path: Path) -> str:
    """Return the mode of a Pooling, by its newer or its older settings."""
    wanted = [settings["pooling_mode"]] if "pooling_mode" in settings else []
    wanted += [
        name.removeprefix("pooling_mode_") for name, value in settings.items() if value is True and name != "include_prompt"
    ]
    known = {"lasttoken": "lasttoken", "mean": "mean", "mean_tokens": "mean"}
    if len(wanted) != 1 or wanted[0] not in known:
        raise UnsupportedError(f"{path} wants the pooling {shown(wanted)}; lasttoken or mean is supported")
    return known[wanted[0]]


# ---- texts to requests


class Pooler:
    """Prepares texts for one LLM. It may be called by any thread."""

    def __init__(self, llm: LoadedLLM) -> None:
        """Read what the checkpoint asks for. Raises: the errors of Pooling.of."""
        engine: Any = llm.engine  # its executor is a LocalExecutor
        self.pooling = Pooling.of(llm.checkpoint)
        self._hidden_size = engine.executor.runner.model.config.hidden_size
        self._inputs, self._tokenizer, self._max_model_len = engine.inputs, engine.tokenizer, engine.max_model_len

    def prepare(self, prompt: Any, params: PoolingParams, **options: Any) -> PreparedRequest:
        """Prepare a text to be embedded. options: the options of reading.prepare."""
        if (params.dimensions or 1) > self._hidden_size:
            raise out_of_range("dimensions", params.dimensions, f"at most the model's {self._hidden_size}")
        content = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, dict) else prompt
        if isinstance(content, str):
            content = self.pooling.text(content)
            prompt = prompt | {"prompt": content} if isinstance(prompt, dict) else content
        if (most := self._most_tokens(params)) is not None:
            if isinstance(content, str) and self._tokenizer is not None:
                full, bare = (self._tokenizer.encode("a", add_special_tokens=add) for add in (True, False))
                start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
                ids = self._framed(content, full[:start], full[start + len(bare) :], most)
                prompt = {"prompt": content, "prompt_token_ids": ids}
            elif isinstance(content, list):
                prompt = content[:most]
        reader = _EmbeddingReader(self.pooling, params.dimensions)
        return reading.prepare(self._inputs, prompt, reader, self._max_model_len, **options)

    def prepare_pair(
        self, query: str, document: str, instruction: str, params: PoolingParams, **options: Any
    ) -> PreparedRequest:
        """Prepare a pair for a reranker. Raises: UnsupportedError if the model lacks the answers' tokens, InvalidValueError."""
        answer_ids: Any = None
        if self._tokenizer is not None:
            answer_ids = tuple(self._tokenizer.backend.token_to_id(answer) for answer in ("no", "yes"))
        if answer_ids is None or None in answer_ids or self.pooling.answer_ids not in (None, answer_ids):
            raise UnsupportedError(
                "this model is no reranker that answers by the tokens 'yes' and 'no', as Qwen3-Reranker does, and its "
                "modules.json has no Pooling; use one of these, or embed()"
            )
        if params.dimensions is not None:
            raise InvalidValueError(
                f"dimensions are for embeddings, and this is a reranker; leave it out, got {params.dimensions}"
            )
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        before, after = (self._tokenizer.encode(text, add_special_tokens=False) for text in (_BEFORE, _AFTER))
        ids = self._framed(text, before, after, self._most_tokens(params))
        prompt = {"prompt": _BEFORE + text + _AFTER, "prompt_token_ids": ids}
        return reading.prepare(self._inputs, prompt, _ScoreReader(answer_ids), self._max_model_len, **options)

    def _most_tokens(self, params: PoolingParams) -> int | None:
        most = params.truncate_prompt_tokens
        if (most or 0) > self._max_model_len:
            raise out_of_range("truncate_prompt_tokens", most, f"at most the model's {self._max_model_len}")
        if most is None and (self.pooling.max_tokens or math.inf) <= self._max_model_len:
            return self.pooling.max_tokens
        return self._max_model_len if most == -1 else most

    def _framed(self, text: str, before: list[int], after: list[int], most: int | None) -> list[int]:
        """Return the ids of a text between others. Only the text is truncated."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, max_tokens=most or self._max_model_len)
        num = len(ids) if most is None else max(most - len(before) - len(after), 0)
        return [*before, *ids[:num], *after]


class Scoring:
    """The scores of a call. prepares: make the requests that it needs. texts: for each score, the indices of its requests."""

    def __init__(
        self,
        pooler: Pooler,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        params: PoolingParams,
        instruction: str | None = None,
        **options: Any,
    ) -> None:
        """options: the options of reading.prepare. Raises: InvalidTypeError, InvalidValueError."""
        given: tuple[Any, Any] = queries, documents
        first, second = (list(texts) if isinstance(texts, list | tuple) else [texts] for texts in given)
        for text in (*first, *second):
            if not isinstance(text, str):
                raise InvalidTypeError(f"queries and documents must be strings or lists of strings, got {shown(text)}")
        if not second or len(first) not in (1, len(second)):
            numbers = f"{len(first)} queries and {len(second)} documents"
            raise InvalidValueError(f"there must be documents, and one query, or one for each document, got {numbers}")
        if pooler.pooling.is_embedding:
            if instruction is not None:
                raise InvalidValueError("instruction is for rerankers, and this is an embedding model; write it into the query")
            self.prepares = [partial(pooler.prepare, text, params, **options) for text in (*first, *second)]
            self.texts: list[tuple[int, ...]] = [(i % len(first), len(first) + i) for i in range(len(second))]
        else:
            pairs: list[tuple[Any, Any]] = [(first[i % len(first)], document) for i, document in enumerate(second)]
            self.prepares = [
                partial(pooler.prepare_pair, *pair, instruction or INSTRUCTION, params, **options) for pair in pairs
            ]
            self.texts = [(i,) for i in range(len(second))]

    def scores(self, prepared: Sequence[PreparedRequest]) -> list[float]:
        """Return the scores, after the requests were read to their ends."""
        found = []
        for texts in self.texts:
            readers = [prepared[text].reader for text in texts]
            if len(readers) == 1:
                found.append(float(readers[0].score))
            else:
                cosine = float(torch.cosine_similarity(readers[0].embedding, readers[1].embedding, dim=0))
                found.append(min(max(cosine, -1.0), 1.0))  # rounding may exceed the range
        return found


class _EmbeddingReader(PromptReader):
    """Reduces a text's rows to a vector: its last row, or the sum of all."""

    def __init__(self, pooling: Pooling, dimensions: int | None) -> None:
        self._pooling, self._dimensions = pooling, dimensions
        self._vector = torch.empty(0)
        self._num_tokens = 0

    def read(self, executor: "LocalExecutor", hidden: Tensor, chunk: PromptRows, ends: "HeadRows", row: int | None) -> None:
        if self._pooling.mode == "lasttoken":
            self._vector = hidden[chunk.stop - 1].float().clone()
            return
        rows = hidden[chunk.start : chunk.stop].float().sum(0)
        self._vector = self._vector + rows if chunk.position else rows
        self._num_tokens = chunk.position + chunk.stop - chunk.start

    @property
    def embedding(self) -> Tensor:
        """The embedding, [dimensions], in fp32."""
        mean = self._vector if self._pooling.mode == "lasttoken" else self._vector / self._num_tokens
        kept = mean[: self._dimensions]
        return torch.nn.functional.normalize(kept, dim=0) if self._pooling.normalize else kept


class _ScoreReader(PromptReader):
    """Reads the probability of one of two answers. answer_ids: the ids of "no" and "yes". score: the probability of "yes"."""

    score: Tensor

    def __init__(self, answer_ids: tuple[int, int]) -> None:
        self._answer_ids = list(answer_ids)

    def read(self, executor: "LocalExecutor", hidden: Tensor, chunk: PromptRows, ends: "HeadRows", row: int | None) -> None:
        if row is not None:
            self.score = ends.logits[row, self._answer_ids].softmax(-1)[1]
