"""Methods of LLM for trainers: replace weights in place, pause, give memory back, compute log-probabilities.

In: an LLM, of which each function here is a method (LLM.__getattr__ finds it). Out: the same LLM with other weights, or less
memory. Nothing here is imported by an LLM that only generates.

An answer has the weights with which its request began: weights change only while no request runs. Then the prefix cache,
which holds results of the old weights, is reset.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from nanoinfer.engine import reading
from nanoinfer.engine.llm_engine import LLMEngine
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
from nanoinfer.loading import update
from nanoinfer.loading.loader import divided
from nanoinfer.loading.weights import Weights
from nanoinfer.prompts import PromptType
from nanoinfer.scheduling.step_plan import PromptRows
from nanoinfer.vllm_compat import check_argument_names

if TYPE_CHECKING:
    from nanoinfer.execution.local_executor import LocalExecutor
    from nanoinfer.execution.model_runner import ModelRunner
    from nanoinfer.llm import LLM
    from nanoinfer.sampling.routes import HeadRows

__all__ = [
    *("compute_logprobs", "is_sleeping", "pause", "resume", "sleep", "update_weights", "update_weights_from_path", "wake_up"),
]

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

_GIVE_ALL = "give it all of them by update_weights(pairs) or update_weights_from_path(folder) first"


class EngineAsleepError(EnginePausedError):
    """The memory that requests and updates need was freed by sleep()."""


class WeightsMissingError(EnginePausedError):
    """The engine has no weights, or a mix of two versions, until an update with all of them."""


# ---- weights


def update_weights(self: "LLM", pairs: Iterable[tuple[str, Tensor]]) -> int:
    """Replace weights in place, all or some of them, and forget the cached prefixes.

    Everything is checked before anything changes, so a refused call leaves the LLM as it was. If reading or copying a tensor
    fails after that, requests are refused until all weights are given.

    Args:
        pairs: the checkpoint's name of each tensor, as in model.named_parameters() of transformers, and the tensor, in any
            float dtype and on any device. The names and shapes are those of loading.

    Returns:
        The new weights_version.

    Raises:
        WeightsError: the model lacks a name, a shape differs, a tensor is no float, or a tied head comes without its embedding.
        NanoinferError: requests are running. pause() ends them.
        UnsupportedError: the weights are rounded, have adapters merged into them, or are laid out for a GPU.
    """
    runner = _runner_of(self.engine)
    weights = divided(update.GivenWeights(pairs), update.origin_of(runner.weights).rules)
    _begin_update(self.engine, weights)
    for name in weights:
        runner.on_all_ranks(update.fill, name, weights.read(name))
    return _finish_update(self.engine)


def update_weights_from_path(self: "LLM", path: str) -> int:
    """Replace weights in place by those in files, of which each rank reads its part.

    Args:
        path: on this machine, the folder of a checkpoint of the same model, with the files that LLM(model) reads, or a
            .safetensors file with all or some of the tensors.

    Returns, Raises: as in update_weights, and the errors of LLM() for missing and damaged files.
    """
    runner = _runner_of(self.engine)
    weights = update.open_path(update.origin_of(runner.weights), path)
    _begin_update(self.engine, weights, must_be_whole=not update.is_file(path))
    runner.on_all_ranks(update.fill_from, path)
    return _finish_update(self.engine)


def _begin_update(engine: LLMEngine, weights: Weights, *, must_be_whole: bool = False) -> None:
    """Check everything, then refuse requests until _finish_update is called."""
    origin = update.origin_of(_runner_of(engine).weights)
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


def max_file_bytes(llm: "LLM") -> int:
    """Return the size of the largest .safetensors file for update_weights_from_path. Raises: as update_weights does."""
    return update.max_file_bytes(update.origin_of(_runner_of(llm.engine).weights))


# ---- pauses, and memory


def pause(self: "LLM", mode: Literal["wait", "abort"] = "wait") -> None:
    """Accept no further requests until resume(), and end running requests.

    Args:
        mode: "wait" generates running answers to the end, for open streams too. "abort" ends them with that finish_reason.
    """
    refuse_requests(self, mode)
    while self.engine.num_unfinished:
        self.engine.step()


def refuse_requests(llm: "LLM", mode: str) -> None:
    """Begin a pause: accept no further requests. mode: "abort" also ends running requests."""
    if not is_one_of(mode, ("wait", "abort")):
        raise InvalidValueError(f"mode must be 'wait' or 'abort', got {shown(mode)}")
    llm.engine.refusals["pause"] = EnginePausedError("this LLM is paused; call resume() first, or POST /resume of a server")
    if mode == "abort":
        llm.engine.abort(*llm.engine.unfinished_request_ids)


def resume(self: "LLM") -> None:
    """Accept requests again after pause()."""
    self.engine.refusals.pop("pause", None)


def sleep(self: "LLM", level: int = 1) -> None:
    """Give memory back to the system until wake_up(). It needs Linux and a model on a CPU. No request may run.

    Args:
        level: 1 frees the KV cache, and with it the cached prefixes. 2 also frees the weights: after wake_up() all of them must
            come by update_weights or update_weights_from_path.

    Raises:
        NanoinferError: requests are running. pause() ends them.
        UnsupportedError: the system is not Linux, the model is on a GPU, or its weights cannot be replaced.
    """
    if type(level) is not int or level not in (1, 2):
        raise InvalidValueError(f"level must be 1 or 2, got {shown(level)}; 1 frees the KV cache, 2 the weights as well")
    engine, runner = self.engine, _runner_of(self.engine)
    if engine.num_unfinished:
        raise NanoinferError(f"{engine.num_unfinished} requests run; wait for their end, or call pause() first")
    if not update.can_release or self.info.device != "cpu":
        raise UnsupportedError("sleep() needs Linux, and a model on a CPU; use close(), and later a new LLM")
    if level == 2:
        update.origin_of(runner.weights)
    engine.reset_prefix_cache()
    for tag in TAGS[2 - level :]:
        without = "weights" if tag == "weights" else "KV cache"
        engine.refusals[tag] = EngineAsleepError(f"this LLM sleeps, without its {without}; call wake_up() first")
        runner.on_all_ranks(partial(update.release, weights=tag == "weights"))


def wake_up(self: "LLM", tags: Sequence[Tag] | None = None) -> None:
    """End sleep(). The memory is taken when it is written.

    Args:
        tags: ["weights"] or ["kv_cache"] takes back the memory of one of them, so that the other can follow later. None: both.
    """
    wanted = TAGS if tags is None else tags
    if not all(is_one_of(tag, TAGS) for tag in wanted):
        raise InvalidValueError(f"tags must be None or a list of 'weights' and 'kv_cache', got {shown(tags)}")
    for tag in wanted:
        if tag == "weights" and tag in self.engine.refusals:
            no_weights = f"sleep(level=2) has freed the weights of this LLM; {_GIVE_ALL}"
            self.engine.refusals[tag] = WeightsMissingError(no_weights)
        else:
            self.engine.refusals.pop(tag, None)


def is_sleeping(self: "LLM") -> bool:
    """Whether sleep() has freed memory that wake_up() has not taken back."""
    return any(isinstance(refusal, EngineAsleepError) for refusal in self.engine.refusals.values())


# ---- log-probabilities of given tokens


@check_argument_names("compute_logprobs()")
def compute_logprobs(self: "LLM", prompts: PromptType | Sequence[PromptType], temperature: float = 1.0) -> list[list[float]]:
    """Compute the log-probability of every token after the first, as the sampler would report it.

    If batch_independent holds and the LLM was made with batch_invariant=True, they have the bits of the log-probabilities that
    were returned when the same tokens were sampled: those of SamplingParams(logprobs=0), or with another temperature those of
    LLM(logprobs_mode="processed") and a request that sets nothing but this temperature. Otherwise a prefill rounds differently
    than a decode: they differ by some 1e-6 in float32, and by up to 0.1 in bfloat16.

    Args:
        prompts: as in generate(), prompts with their answers, of at most max_model_len tokens each.
        temperature: the number > 0 by which logits are divided.

    Returns:
        For each prompt, the natural logarithm of the probability of every token but the first, after the tokens before it.

    Raises:
        InvalidPromptError, InvalidTypeError, InvalidValueError: as in generate, and for too many tokens.
        NanoinferError: the model's numbers are not finite.
    """
    check_number("temperature", temperature, math.ulp(0.0), math.inf, "finite and > 0")
    inputs, max_model_len = self.engine.inputs, self.engine.max_model_len
    prepared = reading.prepare_all(
        prompts, lambda prompt: reading.prepare(inputs, prompt, _LogprobsReader(float(temperature)), max_model_len)
    )
    reading.check(request.output for request in self._complete(prepared, use_tqdm=False))
    return [item.reader.values for item in prepared]


class _LogprobsReader:
    """Reads the log-probabilities of a text. values: those read so far, for every token after the first."""

    def __init__(self, temperature: float) -> None:
        self.values: list[float] = []
        self._temperature = temperature

    def read(self, executor: "LocalExecutor", hidden: Tensor, part: PromptRows, ends: "HeadRows", row: int | None) -> None:
        num_tokens = len(part.sequence.prompt_token_ids)
        part = replace(part, stop=min(part.stop, part.start + num_tokens - 1 - part.position))  # without a successor
        found = executor.prompt_logprobs(hidden, part, num_top=0, temperature=self._temperature)
        self.values[part.position :] = [entry.values[0] for entry in found]
