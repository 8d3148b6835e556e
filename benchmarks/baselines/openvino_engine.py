"""OpenVINO GenAI's ContinuousBatchingPipeline, for worker.py."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino
import openvino_genai as genai

if TYPE_CHECKING:
    from benchmarks.baselines.worker import Setup


class Engine:
    def __init__(self, setup: "Setup") -> None:
        self.name = f"OpenVINO GenAI {genai.__version__}"
        folder = Path(setup.cache, "openvino")
        if not folder.exists():
            _export(setup.model, folder)
        precision = {"bfloat16": "bf16", "float32": "f32"}[setup.dtype]
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = setup.max_num_seqs
        scheduler.max_num_batched_tokens = 4096
        scheduler.num_kv_blocks = setup.num_cache_tokens // 32 + setup.max_num_seqs
        scheduler.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(folder),
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": precision,
                "KV_CACHE_PRECISION": precision,
                "INFERENCE_NUM_THREADS": setup.num_threads,
                "PERFORMANCE_HINT": "LATENCY",
            },
        )

    def run(self, *, prompts: list[list[int]], output_lens: list[int], sampling: dict[str, Any]) -> list[int]:
        configs = []
        for length in output_lens:
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = length
            config.ignore_eos = True
            config.apply_chat_template = False
            if sampling["temperature"] > 0:
                config.do_sample = True
                config.temperature = sampling["temperature"]
                config.top_k = sampling["top_k"] or 2**31
                config.top_p = sampling["top_p"]
            configs.append(config)
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        results = self._pipeline.generate(inputs, configs)
        return [len(result.m_generation_ids[0]) for result in results]


def _export(model: str, folder: Path) -> None:
    """Write OpenVINO's form of a checkpoint, with fp32 weights, which the plugin converts when it loads them."""
    part = folder.with_name("openvino.part")
    shutil.rmtree(part, ignore_errors=True)
    program = Path(sys.executable).with_name("optimum-cli")
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    subprocess.run([program, "export", "openvino", "--model", model, *options, part], check=True)
    part.rename(folder)
