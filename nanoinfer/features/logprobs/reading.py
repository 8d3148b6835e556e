"""Requests that read a prompt instead of answering it, for log-probabilities of given tokens and for embeddings.

In: a prompt, and the PromptReader that sees its hidden rows. Out: a request that is scheduled like all others. It ends with a
sampled token that nobody reads, so it needs no rules of its own, and numbers that are not finite are found.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from nanoinfer.engine.inputs import InputProcessor, PreparedRequest, TooLong, as_list, with_prompt_index
from nanoinfer.errors import InvalidPromptError, NanoinferError
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


def prepare(
    inputs: InputProcessor,
    prompt: object,
    reader: object,
    max_model_len: int,
    *,
    priority: int | None = None,
    timeout: float | None = None,
) -> PreparedRequest:
    """Prepare a prompt of at most max_model_len tokens. A longer prompt is not refused: PreparedRequest.error says so."""
    prepared, error = inputs.prepare_prompt(prompt, replace(PARAMS, timeout=timeout), priority=priority), None
    if (num := len(prepared.prompt_token_ids)) > max_model_len:
        message = f"This model's maximum context length is {max_model_len} tokens. However, the text has {num} tokens"
        error = TooLong(f"{message}; shorten it", num, max_model_len)
    return replace(prepared, reader=reader, is_answered=False, error=error)


def prepare_all(prompts: object, prepare_one: Callable[..., PreparedRequest]) -> list[PreparedRequest]:
    """Prepare one prompt or a list of them. Raises: InvalidPromptError, with the prompt's index, if a prompt is too long."""
    prepared = []
    for index, prompt in enumerate(as_list(prompts)):
        with with_prompt_index(index):
            prepared.append(prepare_one(prompt))
            if (error := prepared[-1].error) is not None:
                raise InvalidPromptError(error.message)
    return prepared


def check(outputs: Iterable[RequestOutput | None]) -> None:
    """Check that every prompt was read to its end. Raises: NanoinferError."""
    for output in outputs:
        assert output is not None, "it has ended"
        answer = output.outputs[0]
        if answer.finish_reason not in ("stop", "length"):
            raise NanoinferError(f"the prompt was not read to its end: {answer.error or answer.finish_reason}")
