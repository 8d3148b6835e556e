"""The time of LLM.embed compared with that of transformers, which gets the same texts as one padded batch.

python -m benchmarks.embeddings --random-model gpt2 --dtype float32

Both have random weights and take turns. The lengths of the texts spread evenly over the orders of magnitude, as those of
documents do: half of them are shorter than the geometric mean of both bounds. Both results are compared, too.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModel

from nanoinfer import LLM
from nanoinfer_lab.bench.random_models import RANDOM_MODELS, checkpoint_of


def texts_of(num: int, low: int, high: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids of `num` texts, whose lengths are between low and high, log-uniform."""
    rng = random.Random(seed)
    lengths = [round(math.exp(rng.uniform(math.log(low), math.log(high)))) for _ in range(num)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def padded_batch(folder: str, dtype: str) -> Callable[[list[list[int]]], Tensor]:
    """transformers' embeddings: the last token's row of one right-padded batch, normalised."""
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def embed(texts: list[list[int]]) -> Tensor:
        lengths = torch.tensor(list(map(len, texts)))
        ids = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, texts)), batch_first=True)
        mask = torch.arange(ids.shape[1]) < lengths.unsqueeze(1)
        rows = model(ids, attention_mask=mask.long()).last_hidden_state[torch.arange(len(texts)), lengths - 1]
        return torch.nn.functional.normalize(rows.float(), dim=-1)

    return embed


def measure(folder: str, dtype: str, texts: list[list[int]], rounds: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each round, and the largest difference between both embeddings."""
    theirs = padded_batch(folder, dtype)
    seconds: dict[str, list[float]] = {"nanoinfer": [], "transformers": []}
    with LLM(folder, dtype=dtype) as llm:
        for _ in range(rounds + 1):  # the first one warms up
            start = time.perf_counter()
            ours = torch.tensor([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)])
            middle = time.perf_counter()
            wanted = theirs(texts)
            seconds["nanoinfer"].append(middle - start)
            seconds["transformers"].append(time.perf_counter() - middle)
    return {name: each[1:] for name, each in seconds.items()}, float((ours - wanted).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random-model", default="gpt2", choices=sorted(RANDOM_MODELS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-texts", type=int, default=64)
    parser.add_argument("--min-len", type=int, default=8)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    texts = texts_of(args.num_texts, args.min_len, args.max_len, vocab_size=50_000)
    with checkpoint_of(None, args.random_model, args.dtype) as folder:
        assert folder is not None
        seconds, difference = measure(folder, args.dtype, texts, args.rounds)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    num_tokens = sum(map(len, texts))
    print(f"{len(texts)} texts, {num_tokens} tokens, {len(texts) * max(map(len, texts))} with padding")
    for name, one in medians.items():
        print(f"{name:14} {one:7.3f} s, {num_tokens / one:9.0f} tokens per second")
    print(f"{medians['transformers'] / medians['nanoinfer']:.2f} times transformers, largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
