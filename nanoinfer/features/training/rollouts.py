"""What the methods of LLM do for those who train with it: new weights in place, pauses, memory given back, log-probabilities.

LLM's methods (methods.py) say what the arguments mean. An LLM that only generates does not import this file.

An answer has the weights with which its request began: weights change only while no request runs. Then the prefix cache,
which holds results of the old weights, is reset.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.engine.prompts import PromptType
from nanoinfer.errors import (
    EnginePausedError,
    InvalidValueError,
    NanoinferError,
    UnsupportedError,
    WeightsError,
    check_number,
    is_one_of,
    shown,
)
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.features import LoadedLLM
from nanoinfer.features.logprobs import reading
from nanoinfer.features.logprobs.prompt_logprobs import PromptLogprobsReader
from nanoinfer.features.training import update
from nanoinfer.features.training.loaded_weights import Origin
from nanoinfer.loading.weights import Weights, divided

if TYPE_CHECKING:
    from nanoinfer.execution.model_runner import ModelRunner

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

_GIVE_ALL = "give it all of them by update_weights(pairs) or update_weights_from_path(folder) first"


class EngineAsleepError(EnginePausedError):
    """The memory that requests and updates need was freed by sleep()."""


class WeightsMissingError(EnginePausedError):
    """The engine has no weights, or a mix of two versions, until an update with all of them."""


# ---- weights


def update_weights(engine: LLMEngine, pairs: Iterable[tuple[str, Tensor]]) -> int:
    """Replace weights by given tensors. Returns the new weights_version."""
    runner = _runner_of(engine)
    weights = divided(update.GivenWeights(pairs), origin_of(engine).rules)
    _begin_update(engine, weights)
    for name in weights:
        runner.on_all_ranks(update.fill, name, weights.read(name))
    return _finish_update(engine)


def update_weights_from_path(engine: LLMEngine, path: str) -> int:
    """Replace weights by those in files. Returns the new weights_version."""
    weights = update.open_path(origin_of(engine), path)
    _begin_update(engine, weights, must_be_whole=not update.is_file(path))
    _runner_of(engine).on_all_ranks(update.fill_from, path)
    return _finish_update(engine)


def _begin_update(engine: LLMEngine, weights: Weights, *, must_be_whole: bool = False) -> None:
    """Check everything, then refuse requests until _finish_update is called."""
    origin = origin_of(engine)
    if engine.num_unfinished:
        raise NanoinferError(
            f"the weights cannot be replaced while {engine.num_unfinished} requests run; wait for their end, or call "
            "pause(mode='wait') or pause(mode='abort') first"
        )
    refusal = engine.refusals.get("weights")
    if isinstance(refusal, EngineAsleepError):
        raise EngineAsleepError(*refusal.args)
    if not update.check(origin, weights) and (must_be_whole or refusal is not None):
        raise WeightsError(
            f"{len(weights)} tensors are not all weights of the model, and all are needed here; none was changed"
        )
    engine.reset_prefix_cache()
    half_updated = f"an update of this LLM's weights failed after some were replaced; {_GIVE_ALL}"
    engine.refusals["weights"] = WeightsMissingError(half_updated)


def _finish_update(engine: LLMEngine) -> int:
    _runner_of(engine).on_all_ranks(update.finish)
    engine.refusals.pop("weights", None)
    engine.weights_version += 1
    return engine.weights_version


def _runner_of(engine: LLMEngine) -> "ModelRunner":
    runner: ModelRunner = engine.executor.runner  # type: ignore[attr-defined]  # a LocalExecutor has it
    return runner


def origin_of(engine: LLMEngine) -> Origin:
    """Return how the engine's model was loaded. Raises: UnsupportedError if its weights cannot be replaced."""
    return update.origin_of(update.weights_of(_runner_of(engine)))


# ---- pauses, and memory


def refuse_requests(engine: LLMEngine, mode: str) -> None:
    """Begin a pause: accept no further requests, and with mode "abort" end those that run."""
    if not is_one_of(mode, ("wait", "abort")):
        raise InvalidValueError(f"mode must be 'wait' or 'abort', got {shown(mode)}")
    engine.refusals["pause"] = EnginePausedError("this LLM is paused; call resume() first, or POST /resume of a server")
    if mode == "abort":
        engine.abort(*engine.unfinished_request_ids)


def sleep(engine: LLMEngine, level: int) -> None:
    """Free the KV cache, and with level 2 the weights."""
    if type(level) is not int or level not in (1, 2):
        raise InvalidValueError(f"level must be 1 or 2, got {shown(level)}; 1 frees the KV cache, 2 the weights as well")
    runner = _runner_of(engine)
    if engine.num_unfinished:
        raise NanoinferError(f"{engine.num_unfinished} requests run; wait for their end, or call pause() first")
    if not update.can_release or engine.executor.info.device != "cpu":
        raise UnsupportedError("sleep() needs Linux, and a model on a CPU; use close(), and later a new LLM")
    if level == 2:
        origin_of(engine)
    engine.reset_prefix_cache()
    for tag in TAGS[2 - level :]:
        without = "weights" if tag == "weights" else "KV cache"
        engine.refusals[tag] = EngineAsleepError(f"this LLM sleeps, without its {without}; call wake_up() first")
        runner.on_all_ranks(partial(update.release, weights=tag == "weights"))
        executor = engine.executor
        for owner in executor.graph_owners if tag == "kv_cache" and isinstance(executor, LocalExecutor) else ():
            if isinstance(owner, LocalExecutor):  # a drafter, whose cache has the same tokens
                update.release(owner.runner, weights=False)


def wake_up(engine: LLMEngine, tags: Sequence[Tag] | None) -> None:
    """Accept requests again, if all that was freed is back. The memory is taken when it is written."""
    wanted = TAGS if tags is None else tags
    if not all(is_one_of(tag, TAGS) for tag in wanted):
        raise InvalidValueError(f"tags must be None or a list of 'weights' and 'kv_cache', got {shown(tags)}")
    for tag in wanted:
        if tag == "weights" and tag in engine.refusals:
            no_weights = f"sleep(level=2) has freed the weights of this LLM; {_GIVE_ALL}"
            engine.refusals[tag] = WeightsMissingError(no_weights)
        else:
            engine.refusals.pop(tag, None)


# ---- log-probabilities of given tokens


def compute_logprobs(llm: LoadedLLM, prompts: PromptType | Sequence[PromptType], temperature: float) -> list[list[float]]:
    """Read the log-probability of every token after the first."""
    check_number("temperature", temperature, math.ulp(0.0), math.inf, "finite and > 0")
    inputs, max_model_len = llm.engine.inputs, llm.engine.max_model_len
    prepared = reading.prepare_all(
        prompts, lambda prompt: reading.prepare(inputs, prompt, PromptLogprobsReader(0, float(temperature)), max_model_len)
    )
    reading.check(request.output for request in llm._complete(prepared, use_tqdm=False))
    return [[next(iter(position.values())).logprob for position in item.reader.positions[1:]] for item in prepared]
