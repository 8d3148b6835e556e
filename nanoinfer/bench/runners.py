"""Run a workload through nanoinfer or through transformers' generate, and record the time of each token.

Both get the same token ids and run in one process, in turns. nanoinfer's requests arrive at the workload's times. Transformers'
generate takes all of them as one batch, padded on the left to the longest prompt and run to the longest answer.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from nanoinfer.bench.timing import RequestTiming
from nanoinfer.bench.workloads import Workload
from nanoinfer.llm import LLM

if sys.platform != "win32":
    import resource


class NanoinferRunner:
    """Runs workloads on an LLM, one after the other."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def run(self, workload: Workload, run: int) -> list[RequestTiming]:
        engine = self.llm.engine
        prompts = workload.prompts(engine.executor.info.vocab_size, run)
        waiting = list(zip(workload.arrivals or [0.0] * len(prompts), prompts, workload.params(), strict=True))
        waiting.reverse()  # the next one is last
        timings, running = [], []
        start = time.perf_counter()
        while waiting or engine.num_unfinished:
            while waiting and start + waiting[-1][0] <= time.perf_counter():
                arrival, prompt, params = waiting.pop()
                request = engine.add_request(prompt, params)
                timings.append(RequestTiming(start + arrival))
                running.append((request, timings[-1]))
            if not engine.num_unfinished:
                time.sleep(max(start + waiting[-1][0] - time.perf_counter(), 0))
                continue
            engine.step()
            now = time.perf_counter()
            for request, timing in running:
                num_new = request.sequences[0].num_output_tokens - len(timing.token_times)
                timing.token_times += [now] * num_new  # with accepted drafts, several at once
            running = [(request, timing) for request, timing in running if request.output is None]
        return timings


class TransformersRunner:
    """Runs workloads through generate of transformers."""

    def __init__(self, checkpoint: Path | str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def run(self, workload: Workload, run: int) -> list[RequestTiming]:
        from transformers import StoppingCriteria, StoppingCriteriaList

        prompts = workload.prompts(self.model.config.vocab_size, run)
        width = max(map(len, prompts))
        device = self.model.device
        input_ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        times: list[float] = []

        class Clock(StoppingCriteria):
            """Records the time after every token, and stops no sequence."""

            def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
                times.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        sampling: dict[str, Any] = {"do_sample": False}
        if workload.sampling.get("temperature", 1.0) > 0:
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | workload.sampling
        start = time.perf_counter()
        self.model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max(workload.output_lens),
            stopping_criteria=StoppingCriteriaList([Clock()]),
            **sampling,
        )
        return [RequestTiming(start, times[:length]) for length in workload.output_lens]


def memory_in_use(device: torch.device) -> int:
    """Bytes in use by this process.

    On CUDA: the peak that torch has allocated. On Linux: the anonymous memory (not backed by a file). On macOS: the peak
    resident memory. On Windows: 0, not supported.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        fields = Path("/proc/self/status").read_text()
        return int(fields.partition("RssAnon:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        if sys.platform == "win32":
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
