"""The time of LLM.update_weights compared with that of loading a model, whose file is in the page cache.

python -m benchmarks.weights --random-model gpt2 --dtype float32
"""

import argparse
import statistics
import time

from safetensors.torch import load_file

from nanoinfer import LLM
from nanoinfer_lab.bench.random_models import RANDOM_MODELS, checkpoint_of


def measure(folder: str, dtype: str, rounds: int) -> dict[str, float]:
    """Return the medians in seconds of a load, of an update with tensors in memory, and of one from the folder."""
    seconds: dict[str, list[float]] = {"load": [], "update_weights": [], "update_weights_from_path": []}
    tensors = load_file(f"{folder}/model.safetensors")
    with LLM(folder, dtype=dtype, kv_cache_memory=2**24):
        pass  # compiles the kernels, and reads the file
    for _ in range(rounds):
        start = time.perf_counter()
        llm = LLM(folder, dtype=dtype, kv_cache_memory=2**24)
        loaded = time.perf_counter()
        llm.update_weights(tensors.items())
        updated = time.perf_counter()
        llm.update_weights_from_path(folder)
        times = (loaded - start, updated - loaded, time.perf_counter() - updated)
        for name, one in zip(seconds, times, strict=True):
            seconds[name].append(one)
        llm.close()
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random-model", default="gpt2", choices=sorted(RANDOM_MODELS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with checkpoint_of(None, args.random_model, args.dtype) as folder:
        assert folder is not None
        medians = measure(folder, args.dtype, args.rounds)
    for name, one in medians.items():
        print(f"{name:26} {one:6.3f} s, {one / medians['load']:.2f} of a load")


if __name__ == "__main__":
    main()
