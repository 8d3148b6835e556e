"""nanoinfer: an LLM inference engine to read, run and change.

The journey of a token, from the prompt to the output:

    prompt -> tokenizer -> Sequence -> Scheduler -> ForwardBatch -> model(attend) -> last hidden rows -> LM head
           -> Sampler -> stop ids -> detokenizer -> stop strings -> RequestOutput

docs/architecture.md says what each folder does and may import. Imports point downwards, without circles.

Axes, in the shapes written everywhere: num_tokens (packed tokens of one step), num_seqs (sequences of one step), num_rows or
batch (rows that get a token), hidden, vocab, num_heads (query heads), num_kv_heads, head_dim, num_blocks, block_size.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoinfer.attention.base import register_backend as register_backend
    from nanoinfer.compat.vllm.neutral import argument_of_vllm as argument_of_vllm
    from nanoinfer.compat.vllm.neutral import missing_attribute as missing_attribute
    from nanoinfer.compat.vllm.parser import add_cli_arguments as add_cli_arguments
    from nanoinfer.compat.vllm.parser import given_arguments as given_arguments
    from nanoinfer.config import AsyncEngineArgs as AsyncEngineArgs
    from nanoinfer.config import EngineArgs as EngineArgs
    from nanoinfer.engine.prompts import PromptType as PromptType
    from nanoinfer.engine.prompts import TextPrompt as TextPrompt
    from nanoinfer.engine.prompts import TokensPrompt as TokensPrompt
    from nanoinfer.errors import NanoinferError as NanoinferError
    from nanoinfer.features.adapters.request import LoRARequest as LoRARequest
    from nanoinfer.features.beam_search.params import BeamSearchOutput as BeamSearchOutput
    from nanoinfer.features.beam_search.params import BeamSearchParams as BeamSearchParams
    from nanoinfer.features.beam_search.params import BeamSearchSequence as BeamSearchSequence
    from nanoinfer.features.beam_search.search import BeamSearch as BeamSearch
    from nanoinfer.features.chat.parsing import ChatParser as ChatParser
    from nanoinfer.features.chat.parsing import parse_chat_answer as parse_chat_answer
    from nanoinfer.features.drafts.config import SpeculativeConfig as SpeculativeConfig
    from nanoinfer.features.own_code.logits_processors import processor_classes as processor_classes
    from nanoinfer.features.own_code.logits_processors import processor_functions as processor_functions
    from nanoinfer.features.structured.params import RepetitionDetectionParams as RepetitionDetectionParams
    from nanoinfer.features.structured.params import StructuredOutputsParams as StructuredOutputsParams
    from nanoinfer.features.tracing import Recorder as Recorder
    from nanoinfer.llm import LLM as LLM
    from nanoinfer.loading.tokenizer_files import read_tokenizer as read_tokenizer
    from nanoinfer.models.registry import register_model as register_model
    from nanoinfer.outputs import CompletionOutput as CompletionOutput
    from nanoinfer.outputs import Delta as Delta
    from nanoinfer.outputs import RequestOutput as RequestOutput
    from nanoinfer.sampling_params import SamplingParams as SamplingParams
    from nanoinfer.server.async_llm import AsyncLLM as AsyncLLM
    from nanoinfer.server.async_llm import RequestStream as RequestStream

__version__ = "0.3.0.dev0"

# Public name -> its module, imported on first use, so that `import nanoinfer` does not wait a second for torch.
_NAMES = {
    "llm": "LLM",
    "server.async_llm": "AsyncLLM",
    "config": "EngineArgs AsyncEngineArgs",
    "sampling_params": "SamplingParams",
    "features.beam_search.params": "BeamSearchParams BeamSearchOutput",
    "features.structured.params": "StructuredOutputsParams",
    "engine.prompts": "PromptType TextPrompt TokensPrompt",
    "outputs": "RequestOutput CompletionOutput Delta",
    "errors": "NanoinferError",
    "features.drafts.config": "SpeculativeConfig",
    "features.tracing": "Recorder",
    "features.chat.parsing": "ChatParser parse_chat_answer",
    "models.registry": "register_model",
    "attention.base": "register_backend",
}
# What files of the core ask of features and of compat/, which they do not import. The same, but not for users.
_ASKED = {
    "features.adapters.request": "LoRARequest",
    "features.beam_search.params": "BeamSearchSequence",
    "features.beam_search.search": "BeamSearch",
    "features.structured.params": "GuidedDecodingParams RepetitionDetectionParams",
    "features.own_code.logits_processors": "processor_classes processor_functions",
    "server.async_llm": "RequestStream",
    "loading.tokenizer_files": "read_tokenizer",
    "compat.vllm.neutral": "argument_of_vllm missing_attribute",
    "compat.vllm.parser": "add_cli_arguments given_arguments",
}
__all__ = ["__version__", *" ".join(_NAMES.values()).split()]
_MODULES = {name: f"nanoinfer.{module}" for module, names in (*_NAMES.items(), *_ASKED.items()) for name in names.split()}


if not TYPE_CHECKING:  # otherwise a type checker would accept every unknown name

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return getattr(import_module(_MODULES[name]), name)
        if name[0].isupper():  # else a submodule that is not imported yet, or a special name
            from nanoinfer.compat.vllm import names

            if hasattr(names, name):
                return getattr(names, name)
        raise AttributeError(f"module 'nanoinfer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


# So that vLLM's modules, and those that have moved, are found after those of the package.
__path__ += [f"{__path__[0]}/compat/vllm/modules", f"{__path__[0]}/compat/moved"]
