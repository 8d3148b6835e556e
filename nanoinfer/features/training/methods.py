"""The methods of LLM for training: new weights in place, pauses, memory given back, log-probabilities of given tokens.

An answer has the weights with which its request began: weights change only while no request runs. Then the prefix cache,
which holds results of the old weights, is reset. What they need besides the engine is imported when they are called.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from nanoinfer.arguments import check_argument_names
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
from nanoinfer.features import LoadedLLM

if TYPE_CHECKING:
    from nanoinfer.loading.weights import Weights

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")

_GIVE_ALL = "give it all of them by update_weights(pairs) or update_weights_from_path(folder) first"


class EngineAsleepError(EnginePausedError):
    """The memory that requests and updates need was freed by sleep()."""


class WeightsMissingError(EnginePausedError):
    """The engine has no weights, or a mix of two versions, until an update with all of them."""


class WeightMethods:
    """The part of LLM that trainers use."""

    def update_weights(self: LoadedLLM, pairs: Iterable[tuple[str, Tensor]]) -> int:
        """Replace weights in place, all or some of them, and forget the cached prefixes.

        Everything is checked before anything changes, so a refused call leaves the LLM as it was. If reading or copying a
        tensor fails after that, requests are refused until all weights are given.

        Args:
            pairs: The checkpoint's name of each tensor, as in model.named_parameters() of transformers, and the tensor, in any
                float dtype and on any device. Names and shapes must be those that LLM() loads.

        Returns:
            The new weights_version.

        Raises:
            WeightsError: An unknown name, a wrong shape, a dtype that is not a float, or a tied head without its embedding.
            NanoinferError: Requests run. pause() ends them.
            UnsupportedError: The weights are rounded, or have adapters merged into them.
        """
        from nanoinfer.features.training import update
        from nanoinfer.loading.weights import divided

        runner = update.runner_of(self.engine)
        weights = divided(update.GivenWeights(pairs), update.origin_of(runner).rules)
        _begin_update(self.engine, weights)
        for name in weights:
            runner.on_all_ranks(update.fill, name, weights.read(name))
        return _finish_update(self.engine)

    def update_weights_from_path(self: LoadedLLM, path: str) -> int:
        """Replace weights in place by those in files, of which each rank reads its part.

        Args:
            path: The folder, on this machine, of a checkpoint of the same model with the files that LLM(model) reads, or a
                .safetensors file with all or some of the tensors.

        Returns, Raises: As update_weights, and as LLM() does for missing and corrupted files.
        """
        from nanoinfer.features.training import update

        runner = update.runner_of(self.engine)
        weights = update.open_path(update.origin_of(runner), path)
        _begin_update(self.engine, weights, must_be_whole=not update.is_file(path))
        runner.on_all_ranks(update.fill_from, path)
        return _finish_update(self.engine)

    def pause(self: LoadedLLM, mode: Literal["wait", "abort"] = "wait") -> None:
        """Accept no further requests until resume(), and end those that run.

        Args:
            mode: What happens to running requests. "wait" completes their answers, which open streams then yield. "abort" ends
                them with finish_reason "abort".
        """
        refuse_requests(self.engine, mode)
        while self.engine.num_unfinished:
            self.engine.step()

    def resume(self: LoadedLLM) -> None:
        """Accept requests again after pause()."""
        self.engine.refusals.pop("pause", None)

    def sleep(self: LoadedLLM, level: int = 1) -> None:
        """Give memory back until wake_up(): a CPU's to the system, which must be Linux, or a GPU's. No request may run.

        On a GPU, CUDA graphs are freed as well, and later steps capture them again.

        Args:
            level: What is freed. 1: the KV cache with the cached prefixes, and on a GPU the weights, which the host keeps in
                pinned memory. 2: the weights for good, so that all must come from update_weights or update_weights_from_path
                after wake_up().

        Raises:
            NanoinferError: Requests run. pause() ends them.
            UnsupportedError: The model is on a CPU, and the system is not Linux. With level 2, the weights cannot be replaced.
        """
        from nanoinfer.features.training import update

        if type(level) is not int or level not in (1, 2):
            raise InvalidValueError(f"level must be 1 or 2, got {shown(level)}; 1 frees the KV cache, 2 the weights as well")
        engine = self.engine
        if engine.num_unfinished:
            raise NanoinferError(f"{engine.num_unfinished} requests run; wait for their end, or call pause() first")
        is_on_cpu = engine.executor.info.device == "cpu"
        if sys.platform != "linux" and is_on_cpu:
            raise UnsupportedError("sleep() of a model on a CPU needs Linux; use close(), and later a new LLM")
        if level == 2:
            update.origin_of(update.runner_of(engine))  # raises if the weights cannot be replaced
        engine.reset_prefix_cache()
        for tag in TAGS[2 - level if is_on_cpu else 0 :]:
            without = "weights" if tag == "weights" else "KV cache"
            engine.refusals[tag] = EngineAsleepError(f"this LLM sleeps, without its {without}; call wake_up() first")
            update.release_all(engine, weights=tag == "weights", is_kept=tag == "weights" and level == 1)

    def wake_up(self: LoadedLLM, tags: Sequence[Tag] | None = None) -> None:
        """End sleep(). A GPU's memory is allocated again, and Linux provides a CPU's when it is first written.

        Args:
            tags: What to bring back: ["weights"] or ["kv_cache"], so that a later call brings back the other. None: both.
        """
        from nanoinfer.features.training import update

        refusals, wanted = self.engine.refusals, TAGS if tags is None else tags
        if not all(is_one_of(tag, TAGS) for tag in wanted):
            raise InvalidValueError(f"tags must be None or a list of 'weights' and 'kv_cache', got {shown(tags)}")
        for tag in wanted:
            if not isinstance(refusals.get(tag), EngineAsleepError):
                continue
            if not update.take_back_all(self.engine, weights=tag == "weights") and tag == "weights":
                refusals[tag] = WeightsMissingError(f"sleep(level=2) has freed the weights of this LLM; {_GIVE_ALL}")
            else:
                del refusals[tag]

    def is_sleeping(self: LoadedLLM) -> bool:
        """Whether sleep() has freed memory that wake_up() has not taken back."""
        return any(isinstance(refusal, EngineAsleepError) for refusal in self.engine.refusals.values())

    @check_argument_names("compute_logprobs()")
    def compute_logprobs(
        self: LoadedLLM, prompts: PromptType | Sequence[PromptType], temperature: float = 1.0
    ) -> list[list[float]]:
        """Compute the log-probability of every token after the first, as the sampler would have reported it.

        If batch_independent holds and the LLM was made with batch_invariant=True, the results are the very log-probabilities
        that SamplingParams(logprobs=0) returned when the same tokens were sampled. With another temperature, compare with a
        request to LLM(logprobs_mode="processed") that sets nothing but this temperature. Without both, a prefill rounds
        differently than a decode: results differ by some 1e-6 in float32, and by up to 0.1 in bfloat16.

        Args:
            prompts: Prompts with their answers, in the forms of generate(), of at most max_model_len tokens each.
            temperature: The divisor of the logits, > 0.

        Returns:
            For each prompt, the natural logarithm of the probability of every token but the first, given the tokens before that
            token.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: As generate does, and for a prompt with too many tokens.
            NanoinferError: The model's numbers are not finite.
        """
        from nanoinfer.features.logprobs import reading
        from nanoinfer.features.logprobs.prompt_logprobs import PromptLogprobsReader

        check_number("temperature", temperature, math.ulp(0.0), math.inf, "finite and > 0")
        inputs, max_model_len = self.engine.inputs, self.engine.max_model_len
        prepared = reading.prepare_all(
            prompts, lambda prompt: reading.prepare(inputs, prompt, PromptLogprobsReader(0, float(temperature)), max_model_len)
        )
        reading.check(request.output for request in self._complete(prepared, use_tqdm=False))
        return [[next(iter(position.values())).logprob for position in item.reader.positions[1:]] for item in prepared]


def refuse_requests(engine: LLMEngine, mode: str) -> None:
    """Begin a pause: accept no further requests, and with mode "abort" end those that run."""
    if not is_one_of(mode, ("wait", "abort")):
        raise InvalidValueError(f"mode must be 'wait' or 'abort', got {shown(mode)}")
    engine.refusals["pause"] = EnginePausedError("this LLM is paused; call resume() first, or POST /resume of a server")
    if mode == "abort":
        engine.abort(*engine.unfinished_request_ids)


def _begin_update(engine: LLMEngine, weights: "Weights", *, must_be_whole: bool = False) -> None:
    """Check everything, then refuse requests until _finish_update is called."""
    from nanoinfer.features.training import update

    origin = update.origin_of(update.runner_of(engine))
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
    """Accept requests again. Returns the new weights_version."""
    from nanoinfer.features.training import update

    update.runner_of(engine).on_all_ranks(update.finish)
    engine.refusals.pop("weights", None)
    engine.weights_version += 1
    return engine.weights_version
