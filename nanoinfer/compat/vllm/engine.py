"""VLLMEngine: an LLM whose steps the caller makes, with the methods of vLLM's LLMEngine, under whose name it is imported.

In: prompts with SamplingParams, and calls of step(). Out: RequestOutputs. LLM.generate and LLM.stream make the steps
themselves. All three call nanoinfer/engine.
"""

import asyncio
from collections.abc import Sequence
from functools import cached_property

from nanoinfer import RequestStream
from nanoinfer.arguments import check_argument_names
from nanoinfer.engine.prompts import PromptType
from nanoinfer.errors import InvalidValueError, shown
from nanoinfer.features.adapters.adapters import adapter_of, remove_adapter
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.llm import LLM
from nanoinfer.outputs import RequestOutput
from nanoinfer.sampling_params import SamplingParams


class VLLMEngine(LLM):
    """Add requests, and call step() while has_unfinished_requests()."""

    @cached_property
    def _streams(self) -> dict[str, RequestStream]:
        """The requests whose last output was not returned, by id."""
        return {}

    @check_argument_names("add_request()")
    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a prompt. A prompt that is too long gets an output with finish_reason "error" in the next step.

        Args:
            request_id: The request's name, for abort_request() and in the outputs. No unfinished request may have it.
            prompt, lora_request, priority: As for AsyncLLM.generate.
            params: The sampling parameters. Their output_kind says what the outputs of step() hold.

        Raises:
            InvalidPromptError, InvalidTypeError, InvalidValueError: As LLM.generate does.
        """
        if not isinstance(request_id, str) or request_id in self._streams:
            raise InvalidValueError(f"request_id must be a string that no unfinished request has, got {shown(request_id)}")
        engine = self.engine
        prepared = engine.inputs.prepare(prompt, params, priority=priority, lora_request=lora_request)
        stream = RequestStream(request_id, prepared.params.n, asyncio.Event(), engine.abort)
        stream.prepared = prepared
        stream.request = engine.submit(prepared, request_id=request_id, streaming=True)
        self._streams[request_id] = stream

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read and check an adapter before a request names it. Returns True. Raises: as add_request does."""
        adapter_of(self.engine.inputs, lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. Requests that use it go on. Returns whether the id was known."""
        return remove_adapter(self.engine.inputs, lora_id)

    def step(self) -> list[RequestOutput]:
        """Compute a step. Returns the outputs of all requests that have new output."""
        if self.engine.num_unfinished:
            self.engine.step()
        outputs = []
        for stream in list(self._streams.values()):
            if stream.deliver():
                outputs.append(stream.output_with(stream.take()))
            if stream.output is not None:
                del self._streams[stream.request_id]
        return [output for output in outputs if output is not None]

    def has_unfinished_requests(self) -> bool:
        """Whether step() still has something to return."""
        return bool(self._streams)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output was not returned yet."""
        return len(self._streams)

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """End requests. The next step returns their outputs, with finish_reason "abort". Unknown ids are ignored."""
        self.engine.abort(*([request_ids] if isinstance(request_ids, str) else request_ids))
