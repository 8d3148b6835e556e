"""The methods of LLM for training. rollouts.py does what they say, and is imported when it is needed."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from nanoinfer.arguments import check_argument_names
from nanoinfer.engine.prompts import PromptType
from nanoinfer.features import LoadedLLM

if TYPE_CHECKING:
    from nanoinfer.features.training.rollouts import Tag


class WeightMethods:
    """The part of LLM that trainers use: new weights in place, pauses, memory given back, log-probabilities of given tokens."""

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
        from nanoinfer.features.training import rollouts

        return rollouts.update_weights(self.engine, pairs)

    def update_weights_from_path(self: LoadedLLM, path: str) -> int:
        """Replace weights in place by those in files, of which each rank reads its part.

        Args:
            path: The folder, on this machine, of a checkpoint of the same model with the files that LLM(model) reads, or a
                .safetensors file with all or some of the tensors.

        Returns, Raises: As update_weights, and as LLM() does for missing and corrupted files.
        """
        from nanoinfer.features.training import rollouts

        return rollouts.update_weights_from_path(self.engine, path)

    def pause(self: LoadedLLM, mode: Literal["wait", "abort"] = "wait") -> None:
        """Accept no further requests until resume(), and end those that run.

        Args:
            mode: What happens to running requests. "wait" completes their answers, which open streams then yield. "abort" ends
                them with finish_reason "abort".
        """
        from nanoinfer.features.training import rollouts

        rollouts.refuse_requests(self.engine, mode)
        while self.engine.num_unfinished:
            self.engine.step()

    def resume(self: LoadedLLM) -> None:
        """Accept requests again after pause()."""
        self.engine.refusals.pop("pause", None)

    def sleep(self: LoadedLLM, level: int = 1) -> None:
        """Give memory back to the system until wake_up(). It requires Linux, a model on a CPU, and that no request runs.

        Args:
            level: What is freed. 1: the KV cache with the cached prefixes. 2: the weights as well, all of which must then come
                from update_weights or update_weights_from_path after wake_up().

        Raises:
            NanoinferError: Requests run. pause() ends them.
            UnsupportedError: The system is not Linux, the model is on a GPU, or its weights cannot be replaced.
        """
        from nanoinfer.features.training import rollouts

        rollouts.sleep(self.engine, level)

    def wake_up(self: LoadedLLM, tags: "Sequence[Tag] | None" = None) -> None:
        """End sleep(). Linux provides the memory when it is first written.

        Args:
            tags: What to bring back: ["weights"] or ["kv_cache"], so that a later call brings back the other. None: both.
        """
        from nanoinfer.features.training import rollouts

        rollouts.wake_up(self.engine, tags)

    def is_sleeping(self: LoadedLLM) -> bool:
        """Whether sleep() has freed memory that wake_up() has not taken back."""
        from nanoinfer.features.training import rollouts

        return any(isinstance(refusal, rollouts.EngineAsleepError) for refusal in self.engine.refusals.values())

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
        from nanoinfer.features.training import rollouts

        return rollouts.compute_logprobs(self, prompts, temperature)
