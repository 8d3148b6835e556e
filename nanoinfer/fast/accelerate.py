"""The only entry to this folder: turn a runtime into one that gives the same tokens in less time.

In: the plain runtime, with the textbook model. Out: a Runtime. build.py calls it unless enforce_eager=True, and a run
with enforce_eager=True imports nothing of this folder.

A model is traced (trace.py), fused (fuse.py), and compiled for its device (cpu/compile.py, cuda/compile.py). This needs no
knowledge of model families: a model file of a user's own is compiled by the same rules. What cannot be traced or has no kernel
runs as it is, and the CompiledModel says why. The forward pass of its `model` is the compiled one, and
`print(model.forward.__self__.code)` shows it.
"""

from typing import TYPE_CHECKING

from nanoinfer.config import EngineConfig
from nanoinfer.engine.observer import Planner
from nanoinfer.execution.runtime import Runtime

if TYPE_CHECKING:
    from nanoinfer.execution.local_executor import LocalExecutor


def accelerate(runtime: Runtime, config: EngineConfig) -> Runtime:
    """Return a faster runtime for the device of the model, whose weights go where the kernels read them.

    Raises:
        UnsupportedError: a quantisation that the model's layers do not support.
    """
    if next(runtime.model.parameters()).device.type == "cpu":
        from nanoinfer.fast.cpu.accelerate import accelerate_on_cpu

        return accelerate_on_cpu(runtime, config)
    from nanoinfer.fast.cuda.accelerate import accelerate_on_cuda

    return accelerate_on_cuda(runtime, config)


def executor_class(runtime: Runtime, config: EngineConfig) -> "type[LocalExecutor]":
    """Return the class of the executor of a runtime."""
    from nanoinfer.execution.local_executor import LocalExecutor

    if runtime.make_step_graphs is None:
        return LocalExecutor
    from nanoinfer.fast.cuda.steady import SteadyExecutor, supports_steady_steps

    return SteadyExecutor if supports_steady_steps(runtime, config) else LocalExecutor


def planner_of(executor: "LocalExecutor") -> Planner:
    """Return what plans the steps of an engine with this executor."""
    if executor.device.type == "cpu":
        return Planner()
    from nanoinfer.fast.cuda.steady import Continued, SteadyExecutor

    return Continued() if isinstance(executor, SteadyExecutor) else Planner()
