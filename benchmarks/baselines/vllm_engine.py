"""vLLM's LLM, in one process, for worker.py."""

import os
from typing import TYPE_CHECKING, Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm

if TYPE_CHECKING:
    from benchmarks.baselines.worker import Setup


class Engine:
    def __init__(self, setup: "Setup") -> None:
        self.name = f"vLLM {vllm.__version__}"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[: setup.num_threads]))
        self._llm = vllm.LLM(
            setup.model,
            dtype=setup.dtype,
            skip_tokenizer_init=True,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            enable_prefix_caching=False,
            block_size=128,
            num_gpu_blocks_override=setup.num_cache_tokens // 128 + setup.max_num_seqs,
            kv_cache_memory_bytes=2**30,  # overridden by the line above; without it a share of the whole memory must be free
        )

    def run(self, *, prompts: list[list[int]], output_lens: list[int], sampling: dict[str, Any]) -> list[int]:
        params = [
            vllm.SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                temperature=sampling["temperature"],
                top_k=sampling["top_k"],
                top_p=sampling["top_p"],
            )
            for length in output_lens
        ]
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]
