"""Compile a model for a GPU, and capture its decode steps as CUDA graphs.

In: the plain runtime. Out: a runtime with Triton kernels and CUDA graphs. Without Triton the model stays as it is, and the
sampler runs its stages.
"""

import logging
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from torch import nn

from nanoinfer.config import EngineConfig
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast.compile import CompiledModel, compile_modules
from nanoinfer.fast.cuda.graphs import CUDACapture, DecodeGraphs
from nanoinfer.fast.sampling.cuda_graphs import SamplerGraphs
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.fast.trace import copied
from nanoinfer.models.registry import Model
from nanoinfer.sampling.routes import Route

logger = logging.getLogger(__name__)


def compile_model(model: nn.Module) -> CompiledModel:
    """Compile a model. Without Triton it runs as it is, which is logged."""
    report = CompiledModel(copied(model))
    try:
        compile_for_cuda = import_module("nanoinfer.fast.cuda.compile").compile_for_cuda
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        report.left[""] = "triton is not installed"
        logger.info("triton is not installed: norms, rotations and gates run as torch's own operators, one after the other")
        return report
    compile_modules(report.model, partial(compile_for_cuda, merges={}), report)
    return report


def accelerate_on_cuda(runtime: Runtime, config: EngineConfig) -> Runtime:
    """Return a runtime with kernels and CUDA graphs."""
    report = compile_model(cast(nn.Module, runtime.model))
    num_graph_rows = config.max_num_rows if runtime.backend.supports_cuda_graph else 0
    make_decode_graphs = None
    if num_graph_rows and getattr(runtime.model, "supports_cuda_graph", True):
        make_decode_graphs = partial(DecodeGraphs, max_num_rows=num_graph_rows, capture=CUDACapture(runtime.device))
    routes: tuple[Route, ...] = ()
    if find_spec("triton"):
        graphs = (SamplerGraphs(num_graph_rows, CUDACapture(runtime.device)),) if num_graph_rows else ()
        routes = (*graphs, FewLogits())
    model = cast(Model, report.model)
    num_graph_rows = 0 if make_decode_graphs is None else num_graph_rows
    return replace(
        runtime, model=model, routes=routes, make_decode_graphs=make_decode_graphs, num_graph_rows=num_graph_rows, report=report
    )
