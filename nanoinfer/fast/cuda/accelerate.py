"""Compile a model for a GPU, and capture its steps as CUDA graphs.

In: the plain runtime. Out: a runtime with Triton kernels and CUDA graphs. Without Triton the model stays as it is, and the
sampler runs its stages.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from torch import nn

from nanoinfer.config import EngineConfig
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast import batch_independence
from nanoinfer.fast.compile import CompiledModel, compile_modules
from nanoinfer.fast.cuda.graphs import CUDACapture, RowNumbers, StepGraphs, prompt_sizes
from nanoinfer.fast.cuda.pdl import PDLCapture
from nanoinfer.fast.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.fast.trace import copied
from nanoinfer.models.qwen_moe import Experts
from nanoinfer.models.registry import Model
from nanoinfer.sampling.routes import Route

logger = logging.getLogger(__name__)


def compile_model(model: nn.Module, *, is_invariant: bool = False) -> CompiledModel:
    """Compile a model. Without Triton it runs as it is, which is logged.

    is_invariant: whether rows have the same bits in any number of rows, in all linear layers (invariant.py).
    """
    report = CompiledModel(copied(model))
    try:
        compile_for_cuda = import_module("nanoinfer.fast.cuda.compile").compile_for_cuda
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        report.left[""] = "triton is not installed"
        logger.info("triton is not installed: norms, rotations and gates run as torch's own operators, one after the other")
        return report
    if not is_invariant:
        import_module("nanoinfer.fast.cuda.experts").replace_experts(report.model)
    elif any(isinstance(module, Experts) for module in report.model.modules()):
        logger.info("batch_invariant: experts run one after the other, since their kernels add in another order for few tokens")
    compile_modules(report.model, partial(compile_for_cuda, merges={}, is_invariant=is_invariant), report)
    if is_invariant:
        import_module("nanoinfer.fast.cuda.invariant").make_linears_invariant(report.model)
    return report


def accelerate_on_cuda(runtime: Runtime, config: EngineConfig) -> Runtime:
    """Return a runtime with kernels and CUDA graphs."""
    is_invariant = config.scheduler.batch_invariant
    report = compile_model(cast(nn.Module, runtime.model), is_invariant=is_invariant)
    backend, num_rows = runtime.backend, config.max_num_rows
    further: Sequence[RowNumbers] = ()
    if config.enable_lora and find_spec("triton"):
        from nanoinfer.fast.cuda.lora import use_kernels

        num_checked = is_invariant * sum(batch_independence.PROMPT_LENGTHS)
        further = use_kernels(report.model, max(config.scheduler.max_num_batched_tokens + num_rows, num_checked))
    capture = PDLCapture(CUDACapture(runtime.device), runtime.device)
    on_first_use = config.cudagraph_capture != "idle"
    routes: tuple[Route, ...] = (FewLogits(),) if find_spec("triton") else ()
    if routes and backend.supports_cuda_graph and runtime.weights.shards is None:  # the graphs of ranks would wait for others
        routes = (SamplerGraphs(num_rows, capture, on_first_use=on_first_use), *routes)
    runtime = replace(runtime, model=cast(Model, report.model), routes=routes, report=report)
    if is_invariant and find_spec("triton"):
        runtime = import_module("nanoinfer.fast.cuda.invariant").checked(runtime, config)
    can_capture = all(getattr(one, "supports_cuda_graph", True) for one in (backend, *report.model.modules()))
    if not can_capture or (config.enable_lora and not further):  # without Triton, torch adds the adapters
        return runtime
    has_prompts = getattr(backend, "supports_prompt_graph", False) and not is_invariant  # all queries are decodes then
    sizes = prompt_sizes(config.scheduler.max_num_batched_tokens) if has_prompts else ()
    make = partial(
        StepGraphs, max_num_rows=num_rows, capture=capture, on_first_use=on_first_use, sizes=sizes,
        num_groups=len(runtime.sizes.windows), further=further,
        max_num_decodes=1 if config.speculative is None or is_invariant else 1 + config.speculative.num_speculative_tokens,
    )  # fmt: skip
    return replace(runtime, make_step_graphs=make, num_graph_rows=num_rows, prompt_graph_sizes=sizes)
