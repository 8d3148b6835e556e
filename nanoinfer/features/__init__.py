"""What a request or an argument asks for, with a folder for each feature. The core calls their hooks, and build.py names them.

LLM has the methods of some features from their folders: ChatMethods, EmbeddingMethods, WeightMethods. They see LoadedLLM of it.
"""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nanoinfer.engine.inputs import PreparedRequest
    from nanoinfer.engine.llm_engine import LLMEngine
    from nanoinfer.engine.request import Request
    from nanoinfer.loading.checkpoint import Checkpoint
    from nanoinfer.outputs import RequestOutput
    from nanoinfer.sampling_params import SamplingParams


class LoadedLLM(Protocol):
    """What the methods in the folders of features may use of an LLM (llm.py)."""

    checkpoint: "Checkpoint"

    @property
    def engine(self) -> "LLMEngine": ...
    def get_default_sampling_params(self) -> "SamplingParams": ...
    def generate(self, *prompts_and_params: Any, **options: Any) -> "list[RequestOutput]": ...
    def _complete(self, prepared: "list[PreparedRequest]", use_tqdm: bool) -> "list[Request]": ...
