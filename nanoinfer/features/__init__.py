"""What a request or an argument asks for, with a folder for each feature. The core calls their hooks, and build.py names them.

LLM has the methods of some features from their folders: ChatMethods, EmbeddingMethods, WeightMethods. They see LoadedLLM of it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nanoinfer.engine.inputs import PreparedRequest
    from nanoinfer.engine.llm_engine import LLMEngine
    from nanoinfer.engine.prompts import PromptType
    from nanoinfer.engine.request import Request
    from nanoinfer.features.adapters.request import LoRARequest
    from nanoinfer.loading.checkpoint import Checkpoint
    from nanoinfer.outputs import RequestOutput
    from nanoinfer.sampling_params import SamplingParams


class LoadedLLM(Protocol):
    """What the methods in the folders of features may use of an LLM (llm.py)."""

    checkpoint: "Checkpoint"

    @property
    def engine(self) -> "LLMEngine": ...
    def get_default_sampling_params(self) -> "SamplingParams": ...
    def generate(
        self,
        prompts: "Sequence[PromptType]",
        sampling_params: "Sequence[SamplingParams]",
        use_tqdm: bool,
        *,
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None",
        priority: Sequence[int] | None,
    ) -> "list[RequestOutput]": ...
    def _complete(self, prepared: "list[PreparedRequest]", use_tqdm: bool) -> "list[Request]": ...
