"""Requests with different LoRA adapters in one engine, of which one at a time is in memory."""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest


def write_adapter(folder: Path, seed: int) -> str:
    """vLLM's example downloads one."""
    torch.manual_seed(seed)
    a, b, name = torch.randn(8, 192), torch.randn(128, 8) / 8, "base_model.model.model.layers.0.self_attn.o_proj"
    folder.mkdir()
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def create_test_prompts(folder: Path) -> list[tuple[str, SamplingParams, LoRARequest | None]]:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    first = LoRARequest("first-lora", 1, write_adapter(folder / "first", 1))
    second = LoRARequest("second-lora", 2, write_adapter(folder / "second", 2))
    return [("Once upon a time", params, request) for request in (None, first, second)]


def process_requests(engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams, LoRARequest | None]]) -> list[str]:
    request_id, texts = 0, {}
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params, lora_request = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                texts[request_output.request_id] = request_output.outputs[0].text
    return [texts[str(i)] for i in range(request_id)]


def main():
    engine_args = EngineArgs(
        model="tiny-qwen3", enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=256
    )
    with tempfile.TemporaryDirectory() as folder:
        base, first, second = process_requests(LLMEngine.from_engine_args(engine_args), create_test_prompts(Path(folder)))
    print(f"Base: {base!r}")
    print("The adapters change the text:", base != first, second not in (base, first))


if __name__ == "__main__":
    main()
