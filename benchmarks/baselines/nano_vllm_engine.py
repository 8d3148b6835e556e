"""nano-vllm's LLM on one GPU, for worker.py. compare.py asks it for a temperature alone, which is all that it has."""

import os
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"  # it ends a process that was stopped for minutes

import torch
from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine import llm_engine
from nanovllm.engine.model_runner import ModelRunner

if TYPE_CHECKING:
    from benchmarks.baselines.worker import Setup

BLOCK_SIZE = 256  # nano-vllm's smallest


class Engine:
    def __init__(self, setup: "Setup") -> None:
        try:
            self.name = f"nano-vllm {version('nano-vllm')}"
        except PackageNotFoundError:  # its folder is on Python's path
            self.name = "nano-vllm"
        config = Config(setup.model).hf_config
        if config.dtype != getattr(torch, setup.dtype):
            raise ValueError(
                f"nano-vllm computes in the checkpoint's dtype, {config.dtype}, got dtype={setup.dtype}; leave it out"
            )
        # as the other engines: no tokenizer is read, and no text is made of the tokens
        tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda token_ids: "")
        llm_engine.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *args, **options: tokenizer)
        torch._dynamo.config.recompile_limit = 64  # its RMSNorm needs about as many variants as the default allows, which is 8
        _fix_num_blocks(-(-setup.num_cache_tokens // BLOCK_SIZE))
        self._llm = LLM(
            setup.model,
            max_model_len=setup.max_model_len,
            max_num_seqs=-(-setup.max_num_seqs // 16) * 16,  # its CUDA graphs are for multiples of 16 sequences
            kvcache_block_size=BLOCK_SIZE,
        )

    def run(self, *, prompts: list[list[int]], output_lens: list[int], sampling: dict[str, Any]) -> list[int]:
        params = [SamplingParams(sampling["temperature"], max_tokens=length, ignore_eos=True) for length in output_lens]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(output["token_ids"]) for output in outputs]


def _fix_num_blocks(num_blocks: int) -> None:
    """Give the KV cache a number of blocks. nano-vllm has a share of the GPU's memory, which other engines use, too."""
    allocate = ModelRunner.allocate_kv_cache

    def allocate_kv_cache(runner: ModelRunner) -> None:
        config = runner.config.hf_config
        block_elements = 2 * config.num_hidden_layers * BLOCK_SIZE * config.num_key_value_heads * config.head_dim
        cache_bytes = (num_blocks + 0.5) * block_elements * config.dtype.itemsize  # it rounds down
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        temporary = stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
        runner.config.gpu_memory_utilization = (total - free + temporary + cache_bytes) / total
        allocate(runner)

    ModelRunner.allocate_kv_cache = allocate_kv_cache
