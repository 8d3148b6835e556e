"""nanoinfer: an LLM inference engine small enough to read in an evening.

One token's journey, from the prompt to the output:

    prompt -> tokenizer -> Sequence -> Scheduler -> ForwardBatch -> model(attend) -> last hidden rows -> LM head
           -> Sampler -> stop ids -> detokenizer -> stop strings -> RequestOutput

The map. Imports point downwards, one folder to another, without a circle; tests/docs/test_architecture.py holds the table.

    llm.py                LLM: generate, stream, chat, beam_search
    async_llm.py          AsyncLLM: the same for asyncio, many requests at once
    sampling_params.py    what one request may ask for
    structured_outputs.py the form that an answer must have: JSON schema, regex, choice, grammar
    outputs.py            RequestOutput, CompletionOutput, Delta, RequestMetrics
    config.py             CacheConfig, SchedulerConfig, EngineConfig
    errors.py             the error classes and the argument checks that raise them
    cli/                  the `nanoinfer` command: generate, chat, serve, explain, models, inspect, bench, doctor
    server/               `nanoinfer serve`: OpenAI's API over HTTP
    engine/               requests in, outputs out: LLMEngine, prompts, stopping, beam search. No torch
    scheduling/           sequences, cache blocks, and which sequences run in a step. No torch
    speculative/          speculative decoding: n-gram and draft-model proposers, and when drafts pay. No torch
    execution/            a step's plan -> tensors, the model, sampled tokens
    distributed/          one model on several ranks
    sampling/             logits -> token ids, stage by stage
    models/               checkpoints, weights, GPT-2, Llama and Qwen; linear layers and kernels that make them fast
    attention/            the paged KV cache and the backends that read it
    devices/              CPU and GPU details: copies, CUDA graphs, OpenMP threads, measured row invariance
    tokenization/         text -> token ids, token ids -> text; chat templates, tools, answers -> messages
    tracing/              events, Recorder, the HTML replay
    bench/                throughput, latency, the roofline; peers/ runs other engines beside this one
    bundled/              tiny-gpt2, tiny-qwen3, and the stories they were trained on

Axes, in the shapes written everywhere: num_tokens (packed tokens of one step), num_seqs (sequences of one step), num_rows or
batch (rows that get a token), hidden, vocab, num_heads (query heads), num_kv_heads, head_dim, num_blocks, block_size.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoinfer.async_llm import AsyncLLM as AsyncLLM
    from nanoinfer.attention.base import register_backend as register_backend
    from nanoinfer.engine.inputs import PromptType as PromptType
    from nanoinfer.engine.inputs import TextPrompt as TextPrompt
    from nanoinfer.engine.inputs import TokensPrompt as TokensPrompt
    from nanoinfer.errors import NanoinferError as NanoinferError
    from nanoinfer.llm import LLM as LLM
    from nanoinfer.models.registry import register_model as register_model
    from nanoinfer.outputs import BeamSearchOutput as BeamSearchOutput
    from nanoinfer.outputs import CompletionOutput as CompletionOutput
    from nanoinfer.outputs import Delta as Delta
    from nanoinfer.outputs import RequestOutput as RequestOutput
    from nanoinfer.sampling_params import BeamSearchParams as BeamSearchParams
    from nanoinfer.sampling_params import SamplingParams as SamplingParams
    from nanoinfer.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from nanoinfer.tokenization.chat_parsing import ChatParser as ChatParser
    from nanoinfer.tokenization.chat_parsing import parse_chat_answer as parse_chat_answer
    from nanoinfer.tracing import Recorder as Recorder

__version__ = "0.1.0"

# The public names, imported on first use, so that `import nanoinfer` does not wait a second for torch.
_PUBLIC = {
    "LLM": "nanoinfer.llm",
    "AsyncLLM": "nanoinfer.async_llm",
    "SamplingParams": "nanoinfer.sampling_params",
    "BeamSearchParams": "nanoinfer.sampling_params",
    "StructuredOutputsParams": "nanoinfer.sampling_params",
    "PromptType": "nanoinfer.engine.inputs",
    "TextPrompt": "nanoinfer.engine.inputs",
    "TokensPrompt": "nanoinfer.engine.inputs",
    "RequestOutput": "nanoinfer.outputs",
    "CompletionOutput": "nanoinfer.outputs",
    "BeamSearchOutput": "nanoinfer.outputs",
    "Delta": "nanoinfer.outputs",
    "NanoinferError": "nanoinfer.errors",
    "Recorder": "nanoinfer.tracing",
    "ChatParser": "nanoinfer.tokenization.chat_parsing",
    "parse_chat_answer": "nanoinfer.tokenization.chat_parsing",
    "register_model": "nanoinfer.models.registry",
    "register_backend": "nanoinfer.attention.base",
}
__all__ = ["__version__", *_PUBLIC]


if not TYPE_CHECKING:  # a type checker would take every unknown name for one of these

    def __getattr__(name: str) -> object:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'nanoinfer' has no attribute {name!r}")
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
