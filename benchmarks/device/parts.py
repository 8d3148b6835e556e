"""The parts in the order of their worth, and what the process of a part runs.

In: the name of a part and a Setup. Out: a JSON line for each result. Each follows a line on stdin, so processes can take turns.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

Results = Iterator[dict[str, Any]]  # "what": the row's name. "text": what is printed below the table. Others are columns


@dataclass(frozen=True, slots=True)
class Setup:
    """What a part measures.

    device: "cuda", or "sim" for the simulated device (tests/helpers/simulated_device.py), on which the shapes are tiny. "": no
        device, only the parts that need none.
    model: the folder of the checkpoint.
    """

    device: str
    model: str

    @property
    def is_simulated(self) -> bool:
        return self.device == "sim"


@dataclass(frozen=True, slots=True)
class Part:
    """function: a module of this folder and its function, Setup -> Results. seconds: the part's share of the time.

    is_compared: another tree is measured interleaved with this one. needs_gpu: without a GPU the part does not run.
    """

    name: str
    function: str
    seconds: int
    is_compared: bool = False
    needs_gpu: bool = True


PARTS = (
    Part("doctor", "checks:doctor", 40),
    Part("tests", "checks:tests", 150),
    Part("workloads", "engine:workloads", 75, is_compared=True),
    Part("bits", "features:fewer_bits", 60),
    Part("nano-vllm", "engine:beside_nano_vllm", 120),
    Part("steps", "engine:steps", 60, is_compared=True),
    Part("latency", "engine:latency", 40, is_compared=True),
    Part("kernels", "kernels:bandwidths", 45, is_compared=True),
    Part("prompts", "engine:prompts", 50, is_compared=True),
    Part("graphs", "engine:graphs", 40, is_compared=True),
    Part("families", "features:families", 60),
    Part("features", "features:outcomes", 90),
    Part("invariance", "features:same_bits", 20),
    Part("sleep", "features:sleep", 15),
    Part("sanitizer", "checks:sanitizer", 60),
    Part("host", "host:steps", 30, is_compared=True, needs_gpu=False),
    Part("transformers", "checks:report", 90),
)


def work(name: str, setup_text: str) -> None:
    """Run a part. What its libraries print goes to stderr."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    [function] = [part.function for part in PARTS if part.name == name]
    setup = Setup(**json.loads(setup_text))
    with ExitStack() as stack:
        if setup.is_simulated:
            simulated_device = import_module("tests.helpers.simulated_device")
            simulated_device.install()
            stack.enter_context(simulated_device.engine_may_use_it())
        sys.stdin.readline()
        for result in resolve_name(f"benchmarks.device.{function}")(setup):
            print(json.dumps(result), file=lines, flush=True)
            sys.stdin.readline()
