"""A decode step after a short and after a long text: layers with states, with windows, and with attention to everything.

python -m benchmarks.contexts --dtype bfloat16

The models have four layers of the same width and random weights. A state has one size, so the model with states slows down by
what its one layer with attention reads, and the model with windows by what is in a window.
"""

import argparse
import tempfile
import time
from typing import Any

import torch
import transformers

from nanoinfer import LLM, SamplingParams
from nanoinfer.config import DTYPES

VOCAB_SIZE = 1024
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "3 layers with states, 1 with attention": ("Qwen3_5TextConfig", {"linear_num_value_heads": 16}),
    "4 layers with a window of 512": ("MistralConfig", {"sliding_window": 512}),
    "4 layers with attention": ("MistralConfig", {"sliding_window": None}),
}


def measure(name: str, dtype: str, contexts: list[int], num_tokens: int, sizes: dict[str, Any] = SIZES) -> list[float]:
    """Return the milliseconds of the fastest decode step of one sequence, for each number of tokens before it."""
    config_class, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**sizes | more)
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPES[dtype]))
        model.save_pretrained(folder)
        with LLM(folder, dtype=dtype, max_num_seqs=1, enable_prefix_caching=False, device="cpu") as llm:
            return [_fastest_step(llm, context, num_tokens) for context in (contexts[0], *contexts)][1:]  # the first warms up


def _fastest_step(llm: LLM, context: int, num_tokens: int) -> float:
    prompt = {"prompt_token_ids": torch.randint(VOCAB_SIZE, (context,)).tolist()}
    params = SamplingParams(temperature=0, max_tokens=num_tokens + 1, ignore_eos=True, detokenize=False)
    request, seconds = llm.engine.add_request(prompt, params), []
    while llm.engine.num_unfinished:
        is_decode = request.sequences[0].num_output_tokens > 0
        start = time.perf_counter()
        llm.engine.step()
        seconds += [time.perf_counter() - start] if is_decode else []
    assert len(seconds) == num_tokens
    return 1e3 * min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 10_000], help="tokens before the measured ones")
    parser.add_argument("--num-tokens", type=int, default=64, help="measured decode steps")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    for name in MODELS:
        steps = measure(name, args.dtype, args.contexts, args.num_tokens)
        shown = ", ".join(f"{step:.2f} ms after {context:,}" for context, step in zip(args.contexts, steps, strict=True))
        print(f"{name:40} {shown} tokens: {steps[-1] - steps[0]:+.2f} ms")


if __name__ == "__main__":
    main()
