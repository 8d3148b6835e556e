"""nanoinfer: an LLM inference engine to read, run and change.

One token's journey, from the prompt to the output:

    prompt -> tokenizer -> Sequence -> Scheduler -> ForwardBatch -> model(attend) -> last hidden rows -> LM head
           -> Sampler -> stop ids -> detokenizer -> stop strings -> RequestOutput

The map. Imports point downwards, one folder to another, without a circle; tests/docs/test_architecture.py holds the table.

The public vocabulary:

    llm.py                LLM: generate, stream, chat, beam_search
    rollouts.py           LLM's methods for those who train with it: update_weights, sleep, pause, compute_logprobs
    pooling.py            LLM's embeddings and scores: embed, score
    async_llm.py          AsyncLLM: the same for asyncio, many requests at once
    prompts.py            the forms of a prompt
    sampling_params.py    what one request may ask for
    outputs.py            RequestOutput, CompletionOutput, Delta, RequestMetrics
    config.py             EngineArgs, what LLM takes, and the EngineConfig that is made of them
    errors.py             the error classes, and the checks of values that raise them
    vllm_compat.py        which of vLLM's further arguments are accepted, and how wrong ones are refused
    vllm_names.py         vLLM's modules and names: what they are here, or what to do instead
    vllm_engine.py        LLMEngine with vLLM's methods, for scripts that call step() themselves

What every token needs. docs/reading.md walks through it:

    engine/               requests in, outputs out: LLMEngine, prompts, stopping, beam search. No torch
    scheduling/           sequences, cache blocks, and which sequences run in a step. No torch
    execution/            a step's plan -> tensors, the model, sampled tokens
    attention/            the paged KV cache and the backends that read it
    models/               GPT-2, Llama, Qwen, Gemma 3 and gpt-oss as in a textbook
    sampling/             logits -> token ids, stage by stage
    tokenization/         text -> token ids, token ids -> text. No torch
    loading/              checkpoints -> weights: folders, hub names, GGUF, GPTQ, AWQ, FP8, LoRA
    system/               copies to a device, effects on the whole process, a helper process with limits, threads

What is imported when it is used:

    fast/                 the same numbers in less time: traced and fused layers, C++ and Triton kernels, CUDA graphs
    chat/                 messages, chat templates, tools, and answers as messages
    structured/           the form that an answer must have: JSON schema, regex, choice, grammar
    speculative/          speculative decoding: proposers of drafts (n-gram, draft model, mtp), and when they pay. No torch
    lora/                 a LoRA adapter for each request: which are in memory, and what they add to linear layers
    distributed/          one model on several ranks
    tracing/              events, Recorder, the HTML replay
    server/               `nanoinfer serve`: OpenAI's API over HTTP
    cli/                  the `nanoinfer` command: generate, chat, serve, batch, explain, models, inspect, bench, learn, doctor
    bench/                `nanoinfer bench`: throughput, latency, the roofline, the ladder, a server
    learn/                `nanoinfer learn`: functions of the engine to write, in a workbook that checks them
    training/             a model to be trained, whose log-probabilities have the engine's bits
    bundled/              tiny-gpt2, tiny-qwen3, and the grammar of the stories they were trained on

Axes, in the shapes written everywhere: num_tokens (packed tokens of one step), num_seqs (sequences of one step), num_rows or
batch (rows that get a token), hidden, vocab, num_heads (query heads), num_kv_heads, head_dim, num_blocks, block_size.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from nanoinfer.async_llm import AsyncLLM as AsyncLLM
    from nanoinfer.attention.base import register_backend as register_backend
    from nanoinfer.chat.parsing import ChatParser as ChatParser
    from nanoinfer.chat.parsing import parse_chat_answer as parse_chat_answer
    from nanoinfer.config import AsyncEngineArgs as AsyncEngineArgs
    from nanoinfer.config import EngineArgs as EngineArgs
    from nanoinfer.errors import NanoinferError as NanoinferError
    from nanoinfer.llm import LLM as LLM
    from nanoinfer.models.registry import register_model as register_model
    from nanoinfer.outputs import BeamSearchOutput as BeamSearchOutput
    from nanoinfer.outputs import CompletionOutput as CompletionOutput
    from nanoinfer.outputs import Delta as Delta
    from nanoinfer.outputs import RequestOutput as RequestOutput
    from nanoinfer.prompts import PromptType as PromptType
    from nanoinfer.prompts import TextPrompt as TextPrompt
    from nanoinfer.prompts import TokensPrompt as TokensPrompt
    from nanoinfer.sampling_params import BeamSearchParams as BeamSearchParams
    from nanoinfer.sampling_params import SamplingParams as SamplingParams
    from nanoinfer.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from nanoinfer.tracing import Recorder as Recorder

__version__ = "0.2.0.dev0"

# The module of each public name, imported on first use, so that `import nanoinfer` does not wait a second for torch.
_NAMES = {
    "llm": "LLM",
    "async_llm": "AsyncLLM",
    "config": "EngineArgs AsyncEngineArgs",
    "sampling_params": "SamplingParams BeamSearchParams StructuredOutputsParams",
    "prompts": "PromptType TextPrompt TokensPrompt",
    "outputs": "RequestOutput CompletionOutput BeamSearchOutput Delta",
    "errors": "NanoinferError",
    "tracing": "Recorder",
    "chat.parsing": "ChatParser parse_chat_answer",
    "models.registry": "register_model",
    "attention.base": "register_backend",
}
_PUBLIC = {name: f"nanoinfer.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_PUBLIC]


if not TYPE_CHECKING:  # a type checker would take every unknown name for one of these

    def __getattr__(name: str) -> object:
        if name in _PUBLIC:
            return getattr(import_module(_PUBLIC[name]), name)
        if not name[0].isupper():  # a submodule that is not imported yet, or a special name
            raise AttributeError(f"module 'nanoinfer' has no attribute {name!r}")
        from nanoinfer.vllm_names import named

        return named(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _VLLMModules:
    """Finds the modules that only vLLM has, after those of the package, so that a script for vLLM can import them."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        if not name.startswith("nanoinfer."):
            return None
        from nanoinfer import vllm_names

        return vllm_names.find_spec(name)


sys.meta_path.append(_VLLMModules())
