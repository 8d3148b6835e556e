"""A user's own stages of the sampler, LLM(stages=[*STAGES, mine]): checked, with what they return."""

from torch import Tensor

from nanoinfer.errors import InvalidTypeError, InvalidValueError
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.stages import STAGES, Stage, stage_name


def checked_stages(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Return the stages, of which those of users are checked when they run. Raises: InvalidValueError if one is missing."""
    if missing := [stage_name(stage) for stage in STAGES if stage not in stages]:
        raise InvalidValueError(
            f"stages lacks {', '.join(missing)}, so parameters would be ignored; use [*STAGES, mine], STAGES being in "
            "nanoinfer.sampling.sampler"
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
