"""Compile a model for a GPU, and capture its steps as CUDA graphs.

In: the plain runtime. Out: a runtime with Triton kernels and CUDA graphs. Without Triton the model stays as it is, and the
sampler runs its stages.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch
from torch import nn

from nanoinfer.config import BITS, EngineConfig
from nanoinfer.execution.model_runner import Replayer
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast import batch_independence
from nanoinfer.fast.compile import CompiledModel, compile_modules
from nanoinfer.fast.cuda.graphs import Capture, CUDACapture, StepGraphs, prompt_sizes
from nanoinfer.fast.cuda.pdl import PDLCapture
from nanoinfer.fast.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.fast.trace import copied
from nanoinfer.features.quantization.rounding import Moments, check_sizes, quantize_model
from nanoinfer.features.training.loaded_weights import LoadedWeights
from nanoinfer.features.training.stored import device_of
from nanoinfer.models.registry import Model
from nanoinfer.sampling.routes import Route

logger = logging.getLogger(__name__)


def compile_model(
    model: nn.Module,
    quantization: str | None = None,
    *,
    is_invariant: bool = False,
    weights: LoadedWeights | None = None,
    moments: Moments | None = None,
) -> CompiledModel:
    """Compile a model. Without Triton it runs as it is, which is logged.

    Args:
        model: a model with its weights on a GPU. If they are rounded, those of linear layers may be StoredParameters.
        quantization: "int8" or "int4" rounds the weights of linear layers to 8 or 4 bits. None: they stay as they are.
        is_invariant: whether rows in 16 bits have the same bits in any number of rows, in all linear layers (invariant.py).
        weights: receives the rounded weights as kernels read them. None: nobody replaces them.
        moments: how much the inputs count when weights are rounded to 4 bits. None: they all count the same.

    Raises: UnsupportedError if the sizes of a layer do not fit the quantisation.
    """
    if quantization:
        check_sizes(model)
    report = CompiledModel(copied(model))
    try:
        compiling = import_module("nanoinfer.fast.cuda.compile")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        report.left[""] = "triton is not installed"
        logger.info("triton is not installed: norms, rotations and gates run as torch's own operators, one after the other")
        if quantization:
            quantize_model(report.model, quantization, device_of(model))
        return report
    if not quantization:
        import_module("nanoinfer.fast.cuda.experts").replace_experts(report.model, is_invariant=is_invariant)
        lower = partial(compiling.compile_for_cuda, layers=compiling.Merges(), is_invariant=is_invariant)
        compile_modules(report.model, lower, report)
        if is_invariant:
            import_module("nanoinfer.fast.cuda.invariant").make_linears_invariant(report.model)
        return report
    weights, moments = LoadedWeights() if weights is None else weights, moments or {}
    layers = compiling.IntegerLayers(model, BITS[quantization], weights, moments)
    with torch.inference_mode():
        compile_modules(report.model, lambda trace: compiling.compile_for_cuda(trace, layers) + layers.finish(trace), report)
        layers.replace_others(report.model)
    return report


def _moments_of(runtime: Runtime) -> Moments:
    """Find the moments on the CPU, whose kernels give the same on every machine. Empty: there are none, as the log says."""
    from nanoinfer.fast.cpu import accelerate, calibration

    return calibration.find_moments(runtime, accelerate.compile_model)


def accelerate_on_cuda(runtime: Runtime, config: EngineConfig) -> Runtime:
    """Return a runtime with kernels and CUDA graphs. Raises: UnsupportedError as compile_model does."""
    model, weights = cast(nn.Module, runtime.model), cast(LoadedWeights, runtime.weights)
    is_invariant = config.scheduler.batch_invariant
    moments = _moments_of(runtime) if config.quantization == "int4" else None
    report = compile_model(model, config.quantization, is_invariant=is_invariant, weights=weights, moments=moments)
    backend, num_rows = runtime.backend, config.max_num_rows
    graphs_of: Callable[..., Replayer] = StepGraphs
    if config.enable_lora and find_spec("triton"):
        lora = import_module("nanoinfer.fast.cuda.lora")
        num_checked = is_invariant * sum(batch_independence.PROMPT_LENGTHS)
        most_rows = max(config.scheduler.max_num_batched_tokens + num_rows, num_checked)
        rows = lora.use_kernels(report.model, most_rows, can_be_off=not is_invariant)
        graphs_of = partial(lora.AdaptedGraphs, rows=rows)
    capture: Capture = PDLCapture(CUDACapture(runtime.device), runtime.device)
    if (shards := runtime.weights.shards) is not None:
        capture = shards.together(capture)
    on_first_use = config.cudagraph_capture != "idle"
    routes: tuple[Route, ...] = (FewLogits(),) if find_spec("triton") else ()
    if routes and backend.supports_cuda_graph and shards is None:  # rank 0 alone draws
        routes = (SamplerGraphs(num_rows, capture, on_first_use=on_first_use), *routes)
    runtime = replace(runtime, model=cast(Model, report.model), routes=routes, report=report)
    if config.bits_of_copy is not None and shards is None:  # else build.py refuses such drafts, on rank 0 alone
        drafter = compile_model(model, f"int{config.bits_of_copy}", weights=weights)
        runtime = replace(runtime, rounded_copy=cast(Model, drafter.model))
    if is_invariant and not config.quantization and find_spec("triton"):
        runtime = import_module("nanoinfer.fast.cuda.invariant").checked(runtime, config)
    can_capture = all(getattr(one, "supports_cuda_graph", True) for one in (backend, *report.model.modules()))
    if config.enable_lora and (graphs_of is StepGraphs or shards is not None):
        can_capture = False  # torch adds the adapters, or they are on several ranks
    if not can_capture:
        return runtime
    has_prompts = getattr(backend, "supports_prompt_graph", False) and not is_invariant  # all queries are decodes then
    sizes = prompt_sizes(config.scheduler.max_num_batched_tokens) if has_prompts else ()
    make = partial(
        graphs_of, max_num_rows=num_rows, capture=capture, on_first_use=on_first_use, sizes=sizes,
        num_groups=len(runtime.sizes.windows),
        max_num_decodes=1 if config.speculative is None or is_invariant else 1 + config.speculative.num_speculative_tokens,
    )  # fmt: skip
    return replace(runtime, make_step_graphs=make, num_graph_rows=num_rows, prompt_graph_sizes=sizes)
