"""The methods of LLM for those who train with it: new weights in place, pauses, memory given back, log-probabilities.

In: an LLM, of which each function here is a method (LLM.__getattr__ finds it). Out: the same LLM with other weights, or less
memory. Nothing here is imported by an LLM that only generates.

An answer has the weights that its request began with: weights change only while no request runs, and then the prefix cache,
which holds what the old ones computed, is reset.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from nanoinfer.engine.inputs import PromptType
from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.errors import (
    InvalidValueError,
    NanoinferError,
    UnsupportedError,
    WeightsError,
    check_number,
    is_one_of,
    shown,
)
from nanoinfer.loading import update
from nanoinfer.loading.weights import Weights
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence as Scored
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan, prompt_rows_of
from nanoinfer.vllm_compat import check_argument_names

if TYPE_CHECKING:
    from nanoinfer.execution.model_runner import ModelRunner
    from nanoinfer.llm import LLM

__all__ = [
    *("compute_logprobs", "is_sleeping", "pause", "resume", "sleep", "update_weights", "update_weights_from_path", "wake_up"),
]

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

_PAUSED = "this LLM is paused; call resume() first"
_ASLEEP = "this LLM sleeps, without its {}; call wake_up() first"
_GIVE_ALL = "give it all of them by update_weights(pairs) or update_weights_from_path(folder) first"
_NO_WEIGHTS = f"sleep(level=2) has freed the weights of this LLM; {_GIVE_ALL}"
_HALF_UPDATED = f"an update of this LLM's weights failed after some were replaced; {_GIVE_ALL}"
_MISSING = (_NO_WEIGHTS, _HALF_UPDATED)


# ---- weights


def update_weights(self: "LLM", pairs: Iterable[tuple[str, Tensor]]) -> int:
    """Replace weights in place, all or some of them, and forget the cached prefixes.

    Everything is checked before anything changes, so a refused call leaves the LLM as it was. If reading or copying a tensor
    fails after that, requests are refused until all weights are given.

    Args:
        pairs: The checkpoint's name of each tensor, as in model.named_parameters() of transformers, and the tensor, in any
            float dtype and on any device. The names and shapes are those of loading.

    Returns:
        The new weights_version.

    Raises:
        WeightsError: A name that the model does not have, another shape, or no float. A tied head without its embedding.
        NanoinferError: Requests run. pause() ends them.
        UnsupportedError: The weights are rounded, have adapters merged into them, or are laid out for a GPU.
    """
    weights = update.GivenWeights(pairs)
    _begin_update(self.engine, weights)
    runner = _runner_of(self.engine)
    for name in weights:
        runner.on_all_ranks(update.fill, name, weights.read(name))
    return _updated(self.engine)


def update_weights_from_path(self: "LLM", folder: str) -> int:
    """Replace all weights in place by those of a checkpoint of the same model. Each rank reads its part.

    Args:
        folder: A folder of this machine, with the files that LLM(model) reads.

    Returns, Raises: As update_weights, and as LLM() does for missing and damaged files.
    """
    runner = _runner_of(self.engine)
    weights = update.open_folder(update.origin_of(runner.model), folder)
    _begin_update(self.engine, weights, must_be_whole=True)
    runner.on_all_ranks(update.fill_from, folder)
    return _updated(self.engine)


def _begin_update(engine: LLMEngine, weights: Weights, *, must_be_whole: bool = False) -> None:
    """Check everything, then refuse requests until _updated."""
    origin = update.origin_of(_runner_of(engine).model)
    if engine.num_unfinished:
        raise NanoinferError(
            f"the weights cannot be replaced while {engine.num_unfinished} requests run; wait for their end, or call "
            "pause(mode='wait') or pause(mode='abort') first"
        )
    refusal = engine.refusals.get("weights")
    if refusal is not None and refusal not in _MISSING:
        raise NanoinferError(refusal)
    if not update.check(origin, weights) and (must_be_whole or refusal is not None):
        raise WeightsError(
            f"{len(weights)} tensors are not all weights of the model, and all are needed here; none was changed"
        )
    engine.reset_prefix_cache()
    engine.refusals["weights"] = _HALF_UPDATED


def _updated(engine: LLMEngine) -> int:
    engine.refusals.pop("weights", None)
    engine.weights_version += 1
    return engine.weights_version


def _runner_of(engine: LLMEngine) -> "ModelRunner":
    runner: ModelRunner = engine.executor.runner  # type: ignore[attr-defined]  # of the LocalExecutor
    return runner


# ---- pauses, and memory


def pause(self: "LLM", mode: Literal["wait", "abort"] = "wait") -> None:
    """Accept no further requests until resume(), and end those that run.

    Args:
        mode: "wait" generates their answers to the end, which open streams then yield. "abort" ends them with finish_reason
            "abort".
    """
    refuse_requests(self, mode)
    while self.engine.num_unfinished:
        self.engine.step()


def refuse_requests(llm: "LLM", mode: str) -> None:
    """Begin a pause: accept no further requests, and with mode "abort" end those that run."""
    if not is_one_of(mode, ("wait", "abort")):
        raise InvalidValueError(f"mode must be 'wait' or 'abort', got {shown(mode)}")
    llm.engine.refusals["pause"] = _PAUSED
    if mode == "abort":
        llm.engine.abort(*llm.engine.unfinished_request_ids)


def resume(self: "LLM") -> None:
    """Accept requests again after pause()."""
    self.engine.refusals.pop("pause", None)


def sleep(self: "LLM", level: int = 1) -> None:
    """Give memory back to the system until wake_up(). On Linux, with a model on a CPU. No request may run.

    Args:
        level: 1 frees the KV cache, and with it the cached prefixes. 2 frees the weights, too: after wake_up() all of them must
            come by update_weights or update_weights_from_path.

    Raises:
        NanoinferError: Requests run. pause() ends them.
        UnsupportedError: Another system, a GPU, or weights that cannot be replaced.
    """
    if type(level) is not int or level not in (1, 2):
        raise InvalidValueError(f"level must be 1 or 2, got {shown(level)}; 1 frees the KV cache, 2 the weights as well")
    engine, runner = self.engine, _runner_of(self.engine)
    if engine.num_unfinished:
        raise NanoinferError(f"{engine.num_unfinished} requests run; wait for their end, or call pause() first")
    if not update.can_release or self.info.device != "cpu":
        raise UnsupportedError("sleep() needs Linux, and a model on a CPU; use close(), and later a new LLM")
    if level == 2:
        update.origin_of(runner.model)
    engine.reset_prefix_cache()
    for tag in TAGS[2 - level :]:
        engine.refusals[tag] = _ASLEEP.format("weights" if tag == "weights" else "KV cache")
        runner.on_all_ranks(partial(update.release, weights=tag == "weights"))


def wake_up(self: "LLM", tags: Sequence[Tag] | None = None) -> None:
    """End sleep(). The memory is taken when it is written.

    Args:
        tags: ["weights"] or ["kv_cache"], to take the memory of the other one later. None is both.
    """
    for tag in TAGS if tags is None else tags:
        if not is_one_of(tag, TAGS):
            raise InvalidValueError(f"tags must be None or a list of 'weights' and 'kv_cache', got {shown(tags)}")
    for tag in TAGS if tags is None else tags:
        if tag == "weights" and tag in self.engine.refusals:
            self.engine.refusals[tag] = _NO_WEIGHTS
        else:
            self.engine.refusals.pop(tag, None)


def is_sleeping(self: "LLM") -> bool:
    """Whether sleep() has freed memory that wake_up() has not taken back."""
    return any(self.engine.refusals.get(tag, _NO_WEIGHTS) not in _MISSING for tag in TAGS)


# ---- log-probabilities of given tokens


@check_argument_names("compute_logprobs()")
def compute_logprobs(self: "LLM", prompts: PromptType | Sequence[PromptType], temperature: float = 1.0) -> list[list[float]]:
    """Compute the log-probability of every token after the first, as the sampler would have reported it.

    If batch_independent holds and the LLM was made with batch_invariant=True, they have the bits of the log-probabilities that
    were returned when the same tokens were sampled: those of SamplingParams(logprobs=0), or with another temperature those of
    LLM(logprobs_mode="processed") and a request that sets nothing but this temperature. Otherwise a prefill rounds differently
    than a decode: they differ by some 1e-6 in float32, and by up to 0.1 in bfloat16.

    Args:
        prompts: As for generate(): prompts with their answers, of at most max_model_len tokens each.
        temperature: Divides the logits. > 0.

    Returns:
        For each prompt one number less than it has tokens: the natural logarithm of each token's probability after those
        before it.

    Raises:
        InvalidPromptError, InvalidTypeError, InvalidValueError: As generate does. Too many tokens.
        NanoinferError: The KV cache has too few blocks for the longest one, which open streams may hold.
    """
    check_number("temperature", temperature, math.ulp(0.0), math.inf, "finite and > 0")
    engine = self.engine
    engine.check_accepting()
    if self.info.num_state_slots:
        raise UnsupportedError("compute_logprobs() does not support layers with states; use SamplingParams(prompt_logprobs=0)")
    params, sequences = SamplingParams(prompt_logprobs=0, detokenize=False), list[Scored]()
    for index, prepared in enumerate(engine.inputs.prepare_all(prompts, params)):
        ids = prepared.prompt_token_ids
        if len(ids) > engine.max_model_len:
            raise InvalidValueError(f"prompt {index}: {len(ids)} tokens, and at most {engine.max_model_len} fit; shorten it")
        sequences.append(Scored(f"logprobs{index}", ids, params, 0, len(ids)))
    found: dict[Scored, list[float]] = {seq: [] for seq in sequences}
    waiting, running = deque(seq for seq in sequences if seq.num_tokens > 1), list[Scored]()
    try:
        while waiting or running:
            with engine.guard.exclusive():
                plan = _scoring_plan(engine, waiting, running, float(temperature))
                for part in engine.run_plan(plan).prompt_logprobs:
                    found[part.sequence] += [one.values[0] for one in part.logprobs]
                for item in plan.scheduled:  # nothing is cached: these blocks have no use for a later request
                    item.sequence.num_computed_tokens += item.num_new_tokens
                for seq in [seq for seq in running if seq.num_computed_tokens == seq.num_tokens - 1]:
                    running.remove(seq)
                    engine.block_manager.free(seq)
    finally:
        with engine.guard.between_steps():
            for seq in running:
                engine.block_manager.free(seq)
    return [found[seq] for seq in sequences]


def _scoring_plan(engine: LLMEngine, waiting: "deque[Scored]", running: list["Scored"], temperature: float) -> StepPlan:
    """The next step: a chunk of each running sequence, and of waiting ones while blocks and max_num_batched_tokens suffice."""
    blocks, config = engine.block_manager, engine.scheduler.config
    scheduled: list[ScheduledSequence] = []
    budget = config.max_num_batched_tokens
    for seq in [*running, *waiting]:
        num = min(engine.scheduler.next_chunk(seq), seq.num_new_tokens - 1, budget)  # the last token has no successor
        if num < 1 or len(scheduled) == config.max_num_seqs:
            break
        if waiting and seq is waiting[0]:
            if not blocks.can_allocate(seq, seq.num_new_tokens - 1):  # all of it, so that no other one takes its blocks
                break
            blocks.start(seq, [])
            blocks.allocate(seq, seq.num_new_tokens - 1)
            running.append(waiting.popleft())
        scheduled.append(ScheduledSequence(seq, num))
        budget -= num
    if not scheduled:
        raise NanoinferError(
            f"the KV cache has {blocks.num_free_blocks} free blocks, too few for {waiting[0].num_tokens} tokens; "
            "raise kv_cache_memory, or let other requests end"
        )
    scheduled.sort(key=lambda item: item.num_new_tokens > 1)  # single tokens first: ForwardBatch's order
    rows = tuple(replace(part, temperature=temperature) for part in prompt_rows_of(scheduled))
    return StepPlan(tuple(scheduled), prompt_rows=rows)
