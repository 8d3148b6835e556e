"""Serve one engine to process.py, in the engine's own Python: `python worker.py openvino`.

One JSON object per line. The first on standard input is a Setup, which Engine gets. The answer on standard output is {"engine":
name and version}. Each further line is a workload: prompts (lists of token ids), output_lens and sampling
(temperature, top_k, top_p; 0 or 1 is off, as in SamplingParams). The answer is {"seconds": of Engine.run, "num_tokens": of each
request}. What an engine prints goes to standard error. An error ends it.
"""

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Setup:
    """What every engine is given.

    Attributes:
        model: a checkpoint's folder.
        cache: a folder for converted models.
        dtype: "bfloat16", "float32" or "float16".
        device: "cpu", for transformers and nano-vllm also "cuda:0".
        num_cache_tokens: of all sequences together.
    """

    model: str
    cache: str
    dtype: str
    device: str
    num_threads: int
    max_model_len: int
    max_num_seqs: int
    num_cache_tokens: int


def main() -> None:
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name = sys.argv[1]
    engine = import_module(f"{name}_engine").Engine(Setup(**json.loads(sys.stdin.readline())))
    print(json.dumps({"engine": engine.name}), file=answers, flush=True)
    for line in sys.stdin:
        workload = json.loads(line)
        start = time.perf_counter()
        num_tokens = engine.run(**workload)
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "num_tokens": num_tokens}), file=answers, flush=True)


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends. While it is stopped, it cannot see the end of its input."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
