"""nanoinfer: an LLM inference engine small enough to read in an evening.

One token's journey, and the file of each station:

    prompt -> tokenizer -> Sequence -> Scheduler -> ForwardBatch -> model(attend) -> last hidden rows -> LM head
           -> Sampler -> stop ids -> detokenizer -> stop strings -> RequestOutput

The map, in floors. A file imports only from the floors below its own, and from files above it on its own floor.

    floor 0: words. Pure Python
      errors.py            the error tree
      checks.py            is a user's value of the right type, and in its range?
      viewer.py            events -> a page that replays a generation
      tracing.py           what happened, as frozen events; Recorder
      sampling_params.py   what one prompt may ask for
      outputs.py           RequestOutput, CompletionOutput, Delta, RequestMetrics
      config.py            CacheConfig, SchedulerConfig, EngineConfig
    floor 1: bookkeeping. No torch: its tests run in milliseconds
      checkpoint.py        a folder or hub name -> its files and JSON
      tokenizer.py         text -> ids, chat template
      sequence.py          one prompt's life: ids, block table, status
      block_manager.py     which cache blocks belong to whom
      scheduler.py         who runs this step, and how many tokens of each
      stopping.py          EOS, stop ids and lengths on ids; stop strings on text
      detokenizer.py       ids -> text as it grows, never half a character
      request.py           one request from outside: its text, its stream, its output
      prompts.py           prompts in the forms people have them -> token ids
    floor 2: arithmetic. torch; knows nothing of scheduling
      transfer.py          host to device without waiting
      openmp.py            how torch's threads wait for each other
      machine_checks.py    what has been measured about this machine, kept on disk
      cuda_graphs.py       recordings of what is launched on a GPU
      kv_cache.py          the tensors: write slots, read blocks, copy blocks, how many fit
      attention/base.py         what a model calls, what a backend is told, the table of backends
      attention/dense.py        no cache: the lesson and the oracle
      attention/reference.py    paged, in plain torch, on any device
      attention/cpu.py          paged, fast on a CPU
      attention/varlen.py       the FlashAttention in torch, on CUDA
      attention/flash.py        the flash-attn package, on CUDA
      attention/triton.py       our own kernels, on CUDA
      models/layers.py          RMSNorm, RoPE and YaRN, SwiGLU
      row_forms.py         in which calls a row has the same bits in any batch: measured
      linear.py            linear layers packed for a CPU, or in 8 bits
      fused.py             norms, rotation and gate in one kernel each, on CUDA
      models/weights.py         safetensors -> parameters
      models/gpt2.py            GPT-2
      models/qwen.py            Qwen2, Qwen2.5, Qwen3
      models/__init__.py        architecture -> model, load
    floor 3: execution
      sampling/state.py         ids and counts that grow with the output
      sampling/draw.py          integer weights, one uniform number, the token
      sampling/batch.py         what each row asked for, as tensors
      sampling/stages.py        the functions from logits to logits
      sampling/fast.py          the same tokens from fewer logits
      sampling/recorded.py      the draw from a CUDA graph
      sampling/logprobs.py      log-probabilities and ranks
      sampling/watch.py         what each stage did, for the tracer
      sampling/sampler.py       the list of stages, then the draw
      forward_batch.py     scheduled sequences -> the tensors of one step
      model_runner.py      tensors -> logits; decode steps from a CUDA graph
      batch_independence.py  is a row the same alone and in a batch? Tried at load
    floor 4
      loading.py           a checkpoint's name -> a model ready to run
      admission.py         what a request may ask of this engine
      engine.py            LLMEngine.step(): the whole story in a few lines
    floor 5: front doors
      beam_search.py       the likeliest answers, over forked sequences
      llm.py               LLM.generate, stream, chat, beam_search
      bench/sampler.py     the sampler beside transformers' warpers
      bench/workloads.py   what is measured: lengths, times, sampling
      bench/shapes.py      checkpoints of random weights
      bench/timing.py      when tokens came -> tokens per second, TTFT, TPOT, ITL
      bench/runners.py     a workload through nanoinfer, and through transformers
      bench/compare.py     both in turns, and the bars
      bench/roofline.py    what the machine allows, and how near a model comes
      bench/report.py      a dated entry for BENCHMARKS.md
      terminal.py          what the commands share: options, errors as one sentence
      bench/cli.py         the `nanoinfer bench` command
      explain.py           a recorded generation as a table
      doctor.py            what this machine has, and whether the backends are right on it
      cli.py               the `nanoinfer` command

Beside the floors: checkpoints/, the models in the box and the script that trains them.

Axes, in the shapes written everywhere: num_tokens (packed tokens of one step), num_seqs (sequences of one step), num_rows or
batch (rows that get a token), hidden, vocab, num_heads (query heads), num_kv_heads, head_dim, num_blocks, block_size.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoinfer.attention.base import register_backend as register_backend
    from nanoinfer.errors import NanoinferError as NanoinferError
    from nanoinfer.llm import LLM as LLM
    from nanoinfer.models import register_model as register_model
    from nanoinfer.outputs import BeamSearchOutput as BeamSearchOutput
    from nanoinfer.outputs import CompletionOutput as CompletionOutput
    from nanoinfer.outputs import Delta as Delta
    from nanoinfer.outputs import RequestOutput as RequestOutput
    from nanoinfer.sampling_params import BeamSearchParams as BeamSearchParams
    from nanoinfer.sampling_params import SamplingParams as SamplingParams
    from nanoinfer.tracing import Recorder as Recorder

__version__ = "0.1.0"

# The public names, imported when they are first used: `import nanoinfer` takes no second for torch.
_PUBLIC = {
    "LLM": "nanoinfer.llm",
    "SamplingParams": "nanoinfer.sampling_params",
    "BeamSearchParams": "nanoinfer.sampling_params",
    "RequestOutput": "nanoinfer.outputs",
    "CompletionOutput": "nanoinfer.outputs",
    "BeamSearchOutput": "nanoinfer.outputs",
    "Delta": "nanoinfer.outputs",
    "NanoinferError": "nanoinfer.errors",
    "Recorder": "nanoinfer.tracing",
    "register_model": "nanoinfer.models",
    "register_backend": "nanoinfer.attention.base",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'nanoinfer' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
