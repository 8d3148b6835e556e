"""Check a user's own stages and logits processors, before anything is loaded or runs. Nothing here needs torch."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoinfer.config import class_named, named
from nanoinfer.errors import InvalidTypeError, shown
from nanoinfer.sampling_params import LogitsProcessor

if TYPE_CHECKING:
    from torch import Tensor

    from nanoinfer.sampling.sampler import Stage

_SIGNATURES = "(prompt_ids, output_ids, logits) -> logits or (output_ids, logits) -> logits"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def checked_stages(given: object) -> "tuple[Stage, ...]":
    """Check LLM's stages, a list of functions or its name. Returns the functions."""
    stages = named("stages", given, "a list of functions or its name, such as 'my_module.STAGES'")
    stages = tuple(stages) if isinstance(stages, list) else stages
    if not isinstance(stages, tuple) or not all(callable(stage) for stage in stages):
        raise InvalidTypeError(f"stages must be a list of functions (logits, SamplingBatch) -> logits, got {shown(stages)}")
    return stages


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

    processor: "Callable[[list[int], Tensor], Tensor]"

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: "Tensor") -> "Tensor":
        return self.processor(output_ids, logits)


def processor_functions(processors: object) -> tuple[LogitsProcessor, ...]:
    """Check the logits_processors of SamplingParams. Returns them as functions of three arguments."""
    if not isinstance(processors, Sequence) or not all(callable(processor) for processor in processors):
        raise InvalidTypeError(f"logits_processors must be a list of functions {_SIGNATURES}, got {shown(processors)}")
    return tuple(_WithoutPrompt(one) if _num_arguments(one) == 2 else one for one in processors)


def _num_arguments(processor: LogitsProcessor) -> int:
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
