"""A user's own stages, and vLLM's V1 logits processors, of which LLM(logits_processors=[...]) makes stages.

In: stages and classes. Out: the sampler's stages, with a BatchProcessor for each class. A processor sees all rows and keeps
state by row. Before each step it learns how the rows differ from the last step: which rows are gone, which are new, and which
have moved. The functions at the end check the logits_processors of LLM and of SamplingParams.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanoinfer import sampling_params
from nanoinfer.config import CacheConfig, EngineConfig, SchedulerConfig, class_named
from nanoinfer.errors import InvalidTypeError, InvalidValueError, shown, takes
from nanoinfer.execution.executor import ExecutorInfo
from nanoinfer.sampling import stages
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.stages import STAGES, Stage, stage_name
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling import sequence

_SIGNATURES = "(prompt_ids, output_ids, logits) -> logits or (output_ids, logits) -> logits"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

T = TypeVar("T")


class MoveDirectionality(Enum):
    """UNIDIRECTIONAL: row a becomes row b. SWAP: the two change places."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


RemovedRequest = int
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
MovedRequest = tuple[int, int, MoveDirectionality]
RequestLogitsProcessor = Callable[[list[int], Tensor], Tensor] | Callable[[list[int], list[int], Tensor], Tensor]


@dataclass(frozen=True)
class BatchUpdate:
    """The difference between the rows and those of the last step. Apply it in the order removed, added, moved.

    Attributes:
        batch_size: the number of rows.
        removed: the rows whose answer has ended, or does not continue in this step.
        added: (row, params, prompt ids, output ids) of new rows. The list of output ids grows with the answer.
        moved: (from, to, direction) of rows that have moved.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the model, under vLLM's names."""

    vocab_size: int
    max_model_len: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(frozen=True)
class VllmConfig:
    """The LLM's settings that a processor receives, under vLLM's names."""

    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    speculative_config: None = None  # there are no drafts where logits processors run


class LogitsProcessor(ABC):
    """The interface of a processor. One instance serves all requests of an LLM."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if the processor cannot serve these parameters, for example because of their extra_args."""
        return None  # need not be overridden

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return changed logits. logits: [batch, vocab], fp32, and may be written to."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which logit is the largest. If so, it is applied after the temperature and min_p."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Take note of changed rows before each apply. None: the rows are the same as in the last step."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Base class of processors that have a function for each request that asks for it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return (output_ids, logits [vocab]) -> logits, or (prompt_ids, output_ids, logits) -> logits, or None."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Tensor) -> Tensor:
        for row, processor in self.req_info.items():
            logits[row] = processor(logits[row])
        return logits

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> "partial[Tensor] | None":
        processor: Any = self.new_req_logits_processor(params)
        if processor is None:
            return None
        has_prompt = len(inspect.signature(processor).parameters) == 3
        return partial(processor, prompt_ids, output_ids) if has_prompt else partial(processor, output_ids)


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Apply an update to a dict of row -> state, and return whether it changed. new_state: makes the state of a row."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for row, params, prompt_ids, output_ids in batch_update.added:
        req_entries.pop(row, None)
        if (state := new_state(params, prompt_ids, output_ids)) is not None:
            req_entries[row] = state
    for source, target, direction in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return before != req_entries


class BatchProcessor:
    """A stage of the sampler that calls a LogitsProcessor."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor
        self.__name__ = type(processor).__name__  # the stage's name in messages and traces
        self._rows: list[sequence.Sequence] = []  # the rows of the previous step
        self._output_ids: dict[sequence.Sequence, list[int]] = {}

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        rows = list(batch.sequences)
        output_ids = {seq: self._output_ids.get(seq, []) for seq in rows}
        for seq, ids in output_ids.items():
            ids += seq.token_ids[len(seq.prompt_token_ids) + len(ids) :]
        self.processor.update_state(difference(self._rows, rows, output_ids))
        self._rows, self._output_ids = rows, output_ids
        return self.processor.apply(logits)


def difference(
    old: list[sequence.Sequence], new: list[sequence.Sequence], output_ids: dict[sequence.Sequence, list[int]]
) -> BatchUpdate | None:
    """Describe how the rows `new` come from the rows `old`. Returns None if they are the same."""
    if old == new:
        return None
    added: list[AddedRequest] = []
    moved: list[MovedRequest] = []
    rows = [seq if seq in output_ids else None for seq in old]
    known = set(old)
    for seq in new:
        if seq not in known:
            if None not in rows:
                rows.append(None)
            row = rows.index(None)
            rows[row] = seq
            added.append((row, seq.params, seq.prompt_token_ids, output_ids[seq]))
    removed = [row for row in range(len(old)) if rows[row] is None]  # an added row replaces the row that was there
    for target, wanted in enumerate(new):
        if rows[target] is not wanted:
            source, direction = rows.index(wanted), MoveDirectionality.SWAP
            if rows[target] is None:
                direction = MoveDirectionality.UNIDIRECTIONAL
            rows[source], rows[target] = rows[target], wanted
            moved.append((source, target, direction))
    return BatchUpdate(len(new), removed, added, moved)


def with_processors(config: EngineConfig, device: torch.device, info: ExecutorInfo) -> EngineConfig:
    """Check config.stages, and add a stage for each class of config.logits_processors.

    It is before the temperature, or after min_p if argmax-invariant. Raises: InvalidValueError if one of STAGES is missing.
    """
    plain = STAGES if config.stages is None else checked_stages(config.stages)
    vllm_config = VllmConfig(ModelConfig(info.vocab_size, info.max_model_len), config.scheduler, config.cache)
    before, after = list[Stage](), list[Stage]()
    for cls in config.logits_processors:
        processor: Any = cls(vllm_config, device, False)
        (after if processor.is_argmax_invariant() else before).append(checked(BatchProcessor(processor)))
    at, then = plain.index(stages.apply_temperature), plain.index(stages.keep_min_p) + 1
    return replace(config, stages=(*plain[:at], *before, *plain[at:then], *after, *plain[then:]))


def checked_stages(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Return the stages, of which those of users are checked when they run."""
    if missing := [stage_name(stage) for stage in STAGES if stage not in stages]:
        raise InvalidValueError(
            f"stages lacks {', '.join(missing)}, so parameters would be ignored; use [*STAGES, mine], STAGES being in "
            "nanoinfer.sampling.sampler"
        )
    for stage in stages:
        if not takes(stage, "logits", "batch"):
            raise InvalidTypeError(
                f"stage {stage_name(stage)} must be a function of two arguments, (logits, batch) -> logits: logits "
                f"[rows, vocab] and a SamplingBatch, got {shown(stage)}"
            )
    return tuple(stage if stage in STAGES else checked(stage) for stage in stages)


def checked(stage: Stage) -> Stage:
    """Return the stage with a check of what it returns: raises InvalidTypeError unless it is logits of the same shape."""
    name = stage_name(stage)

    def run(logits: Tensor, batch: SamplingBatch) -> Tensor:
        processed = stage(logits, batch)
        if not isinstance(processed, Tensor) or processed.shape != logits.shape:
            got = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
            raise InvalidTypeError(f"stage {name} must return logits of shape {tuple(logits.shape)}, got {got}")
        return processed.contiguous()

    run.__name__ = name
    return run


def processor_classes(given: object) -> tuple[type, ...]:
    """Check LLM's logits_processors, a list of classes or their names. Returns the classes."""
    methods = ("apply", "is_argmax_invariant", "update_state")
    classes = [class_named("each of logits_processors", one) for one in given] if isinstance(given, list | tuple) else [None]
    if not all(hasattr(one, name) for one in classes for name in methods):
        raise InvalidTypeError(
            f"logits_processors must be a list of classes with {', '.join(methods)}, or their names, got {shown(given)}; "
            "a function is for one request: SamplingParams(logits_processors=[...])"
        )
    return tuple(one for one in classes if one is not None)


@dataclass(frozen=True)
class _WithoutPrompt:
    """A logits processor (output_ids, logits) -> logits, called as the others are."""

    processor: Callable[[list[int], Tensor], Tensor]

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
        return self.processor(output_ids, logits)


def processor_functions(processors: object) -> tuple[sampling_params.LogitsProcessor, ...]:
    """Check the logits_processors of SamplingParams. Returns them as functions of three arguments."""
    if not isinstance(processors, Sequence) or not all(callable(processor) for processor in processors):
        raise InvalidTypeError(f"logits_processors must be a list of functions {_SIGNATURES}, got {shown(processors)}")
    return tuple(_WithoutPrompt(one) if _num_arguments(one) == 2 else one for one in processors)


def _num_arguments(processor: Callable[..., Tensor]) -> int:
    """Two if a processor requires exactly two arguments, else three."""
    try:
        signature = inspect.signature(processor)
        required = [one for one in signature.parameters.values() if one.default is one.empty and one.kind in _POSITIONAL]
        num_arguments = 2 if len(required) == 2 else 3
        signature.bind(*range(num_arguments))
    except (TypeError, ValueError) as error:  # ValueError: some functions in C have no signature
        raise InvalidTypeError(
            f"each of logits_processors must be a function {_SIGNATURES}, got {shown(processor)} ({error}); wrap it in a lambda"
        ) from None
    return num_arguments
