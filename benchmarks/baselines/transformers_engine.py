"""Transformers' generate, for worker.py: all requests as one batch, padded on the left and run to the longest answer."""

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from benchmarks.baselines.worker import Setup


class Engine:
    def __init__(self, setup: "Setup") -> None:
        self.name = f"transformers {transformers.__version__}"
        torch.set_num_threads(setup.num_threads)
        transformers.utils.logging.disable_progress_bar()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=getattr(torch, setup.dtype), attn_implementation="sdpa"
        )
        self._model = loaded.to(setup.device).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def run(self, *, prompts: list[list[int]], output_lens: list[int], sampling: dict[str, Any]) -> list[int]:
        width = max(map(len, prompts))
        device = self._model.device
        input_ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        how = {"do_sample": True, **sampling} if sampling["temperature"] > 0 else {"do_sample": False}
        output = self._model.generate(input_ids=input_ids, attention_mask=mask, max_new_tokens=max(output_lens), **how)
        num_new = output.cpu().shape[1] - width  # the copy waits for a GPU
        return [min(length, num_new) for length in output_lens]
