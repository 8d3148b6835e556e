"""Time the parts of an engine's steps: functions of the host, and on the GPU what lies between events."""

import inspect
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from nanoinfer.engine.llm_engine import LLMEngine
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.sampler import SampledTokens, Sampler


class Watch:
    """Times of the steps, by name. A time on the host does not contain those of the functions that it calls.

    gpu: torch's module of the device. None: only the host is timed. clock: returns seconds.
    """

    def __init__(self, gpu: Any = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._gpu, self._clock = gpu, clock
        self._steps: list[dict[str, float]] = []
        self._running: list[tuple[str, list[float]]] = []  # the functions that are running, with the seconds of their callees
        self._spans: list[tuple[dict[str, float], str, Any, Any]] = []  # step, name, events

    @contextmanager
    def engine(self, engine: LLMEngine) -> Iterator[None]:
        """Time the steps of an engine. Earlier times are forgotten."""
        self._steps, self._spans = [], []
        executor: Any = engine.executor  # a LocalExecutor
        named = (
            (engine, "step", "rest"), (engine.scheduler, "schedule", "schedule"), (engine.scheduler, "commit", "commit"),
            (engine, "_collect", "advance"), (executor, "launch", "launch"), (executor, "collect", "collect"),
            (ForwardBatch, "build", "build"), (executor.runner, "forward", "forward"),
            (SamplingBatch, "build", "parameters"), (Sampler, "__call__", "sample"), (SampledTokens, "read", "wait"),
        )  # fmt: skip
        with ExitStack() as stack:
            for owner, attribute, name in named:
                function = getattr(owner, attribute)
                timed: Any = self._timed(function, name)
                timed = staticmethod(timed) if isinstance(owner, type) and inspect.ismethod(function) else timed
                stack.enter_context(mock.patch.object(owner, attribute, timed))
            if self._gpu is not None:
                head = executor.runner.model.lm_head  # a graph may compute the head, and then it belongs to that graph
                stack.enter_context(mock.patch.object(head, "forward", self._between_events(head.forward, "head")))
            yield
        if self._gpu is not None:
            self._gpu.synchronize()
        for step, name, start, end in self._spans:
            step[f"gpu {name}"] = step.get(f"gpu {name}", 0.0) + start.elapsed_time(end) / 1e3

    @contextmanager
    def graphs(self) -> Iterator[None]:
        """Time the replays of the graphs that are captured meanwhile."""
        made = self._gpu.CUDAGraph
        replay = self._between_events(made.replay, None)
        with mock.patch.object(made, "replay", replay):
            yield

    def medians(self) -> dict[str, float]:
        """Return the medians over the steps in milliseconds: the step, the host without its waiting, the GPU, their parts."""
        names = dict.fromkeys(name for step in self._steps for name in step)
        parts = {name: 1e3 * statistics.median(step.get(name, 0.0) for step in self._steps) for name in names}
        host = {name: time for name, time in parts.items() if not name.startswith("gpu ")}
        sums = {"step": sum(host.values()), "host": sum(host.values()) - host.get("wait", 0.0)}
        sums |= {"gpu": sum(parts.values()) - sum(host.values())} if self._gpu is not None else {}
        return {f"{name}, ms": round(time, 4) for name, time in (sums | parts).items()}

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if name == "rest":
                self._steps.append(defaultdict(float))
            inner = [0.0]
            self._running.append((name, inner))
            start = self._clock()
            try:
                return function(*arguments, **options)
            finally:
                seconds = self._clock() - start
                self._running.pop()
                if self._steps:
                    self._steps[-1][name] += seconds - inner[0]
                if self._running:
                    self._running[-1][1][0] += seconds

        return timed

    def _between_events(self, function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """Put events around what a function launches. name: None for replays, of the sampler's graphs and others."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if not self._running or self._gpu.is_current_stream_capturing():
                return function(*arguments, **options)
            start, end = (self._gpu.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = function(*arguments, **options)
            end.record()
            kind = name or ("draw" if any(running == "sample" for running, _ in self._running) else "forward")
            self._spans.append((self._steps[-1], kind, start, end))
            return result

        return timed
