"""What LLM(prefix_cache_dir=...) saves and costs, and whether it survives being killed.

python -m benchmarks.prefix_cache_dir --random-model qwen3-0.6b --tokens 2000
python -m benchmarks.prefix_cache_dir --kills 50
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer_lab.bench.random_models import RANDOM_MODELS, checkpoint_of

PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False)
LIMIT = 2**24  # bytes of the folder of processes that are killed
SMALL: dict[str, Any] = {
    "block_size": 16,
    "batch_invariant": True,
    "kv_cache_memory": 2**21,
    "prefix_cache_size": LIMIT,
    "seed": 0,
}
PROMPTS = [[random.Random(number).randrange(500) for _ in range(300)] for number in range(40)]  # 6 of them fill the KV cache


def answer(llm: LLM, prompt: list[int]) -> RequestOutput:
    return llm.generate({"prompt_token_ids": prompt}, PARAMS, use_tqdm=False)[0]


def measure(model: str, dtype: str, num_tokens: int, rounds: int) -> dict[str, float]:
    """Return medians in seconds: loads without and with the folder, close(), and times to the first token of one prompt."""
    names = ("load", "load with files", "close with files", "first token, cold", "in memory", "after a restart")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    LLM(model, dtype=dtype).close()  # compiles the kernels
    for number in range(rounds):
        rng, times = random.Random(number), dict[str, float]()
        prompt, other = ([rng.randrange(90) for _ in range(num)] for num in (num_tokens, num_tokens // 20))
        start = time.perf_counter()
        LLM(model, dtype=dtype).close()
        times["load"] = time.perf_counter() - start
        with tempfile.TemporaryDirectory() as folder:
            for names_of_run in (("first token, cold", "in memory"), ("after a restart",)):
                start = time.perf_counter()
                llm = LLM(model, dtype=dtype, prefix_cache_dir=f"{folder}/kv")
                times["load with files"] = time.perf_counter() - start
                answer(llm, other)
                for name in names_of_run:
                    output = answer(llm, prompt)
                    assert output.metrics.ttft is not None
                    times[name] = output.metrics.ttft
                    if name == "in memory":
                        expected = output
                start = time.perf_counter()
                llm.close()
                times.setdefault("close with files", time.perf_counter() - start)
        assert (output.outputs, output.num_cached_tokens) == (expected.outputs, expected.num_cached_tokens), "not the same bits"
        for name in names:
            seconds[name].append(times[name])
    return {name: statistics.median(each) for name, each in seconds.items()}


def write(folder: str) -> None:
    """Let blocks leave the memory for ever, in a process that is killed."""
    llm, rng = LLM("tiny-qwen3", **SMALL, prefix_cache_dir=folder), random.Random()
    print("writing", flush=True)
    while True:
        answer(llm, rng.choice(PROMPTS))


def kill(num_kills: int) -> int:
    """Kill processes while they write, and compare what is read then. Returns the number of tokens that were found."""
    with LLM("tiny-qwen3", **SMALL) as llm:
        expected = [answer(llm, prompt).outputs for prompt in PROMPTS]
    num_found = 0
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "kv")
        for _ in range(num_kills):
            command = [sys.executable, "-m", "benchmarks.prefix_cache_dir", "--write", str(folder)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(random.uniform(0, 1))
                process.kill()
            num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.name != "lock")
            assert num_bytes <= LIMIT, num_bytes
            with LLM("tiny-qwen3", **SMALL, prefix_cache_dir=folder) as llm:
                outputs = [answer(llm, prompt) for prompt in PROMPTS]
            assert [output.outputs for output in outputs] == expected, "not the same bits"
            num_found += sum(output.num_cached_tokens or 0 for output in outputs)
    return num_found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-model", default="qwen3-0.6b", choices=sorted(RANDOM_MODELS))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, help="instead, kill a process that writes this many times, and check what is read")
    parser.add_argument("--write", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.write)
    if args.kills:
        print(f"{args.kills} kills: the folder kept its limit, all bits are the same, {kill(args.kills):,} tokens were found")
        return
    with checkpoint_of(None, args.random_model, args.dtype) as model:
        assert model is not None
        for name, one in measure(model, args.dtype, args.tokens, args.rounds).items():
            print(f"{name:20} {one:7.3f} s")


if __name__ == "__main__":
    main()
