"""The time of answers with an adapter for each request, compared with that of the plain model, interleaved.

python -m benchmarks.lora --random-model gpt2 --dtype float32
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanoinfer import LLM, SamplingParams
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer_lab.bench.random_models import RANDOM_MODELS, checkpoint_of

NOT_ADAPTED = ("wte", "wpe", "embed_tokens", "lm_head")


def write_adapters(folder: str, out: Path, num: int, rank: int) -> list[LoRARequest]:
    """Write random adapters of every linear layer of a checkpoint, but not of its LM head."""
    shapes = {}
    with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is not a dict)
            shape, module = file.get_slice(name).get_shape(), name.removesuffix(".weight")
            if len(shape) == 2 and module.rpartition(".")[2] not in NOT_ADAPTED:
                shapes[module] = shape[::-1] if module.rpartition(".")[2].startswith("c_") else shape  # GPT-2's are [in, out]
    requests = []
    for i in range(num):
        path = out / str(i)
        path.mkdir()
        torch.manual_seed(i)
        tensors = {}
        for module, (num_out, num_in) in shapes.items():
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, num_in) * 0.02
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(num_out, rank) * 0.02
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
        requests.append(LoRARequest(f"adapter {i}", i + 1, str(path)))
    return requests


def measure(
    folder: str, dtype: str, *, rows: int, adapters: int, rank: int, tokens: int, rounds: int, **engine: Any
) -> dict[str, float]:
    """Return the medians in seconds of `rows` answers of `tokens` tokens, by a plain model and by one with adapters.

    engine: further arguments of LLM.
    """
    with tempfile.TemporaryDirectory() as out:
        requests = write_adapters(folder, Path(out), adapters, rank)
        options: dict[str, Any] = {"dtype": dtype, "kv_cache_memory": 2**28, "max_num_seqs": rows} | engine
        plain = LLM(folder, **options)
        adapted = LLM(folder, **options, enable_lora=True, max_loras=adapters, max_lora_rank=rank)
        prompts = [[i % plain.info.vocab_size] * 16 for i in range(rows)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        cases = {
            "plain": (plain, None),
            "no row with an adapter": (adapted, None),
            f"{adapters} adapters": (adapted, [requests[i % adapters] for i in range(rows)]),
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for repeat in range(rounds + 1):
            for name, (llm, lora_request) in cases.items():
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)
                if repeat:  # the first round warms up, and loads the adapters
                    seconds[name].append(time.perf_counter() - start)
        plain.close()
        adapted.close()
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random-model", default="gpt2", choices=sorted(RANDOM_MODELS))
    parser.add_argument("--dtype", default="float32")
    for name, default in (("rows", 64), ("adapters", 8), ("rank", 16), ("tokens", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = vars(parser.parse_args())
    with checkpoint_of(None, args.pop("random_model"), args["dtype"]) as folder:
        assert folder is not None
        medians = measure(folder, **args)
    for name, one in medians.items():
        print(f"{name:24} {one:7.3f} s, {one / medians['plain']:.2f} of the plain model")


if __name__ == "__main__":
    main()
