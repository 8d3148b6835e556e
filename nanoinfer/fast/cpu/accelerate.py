"""Compile a model and its attention for a CPU.

In: the plain parts of an engine. Out: parts whose model and attention are computed by C++ kernels. Without a compiler they stay
as they are, and one log line says so.
"""

import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.config import EngineConfig
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.parts import Parts
from nanoinfer.fast.accelerate import CompileReport, compile_modules
from nanoinfer.fast.batch_independence import is_batch_independent, one_layer_of_each_kind
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.cpu.compile import Pack, compile_for_cpu
from nanoinfer.fast.cpu.delta import KernelRecurrence
from nanoinfer.fast.cpu.linear import KernelLinear, PackedLinear
from nanoinfer.fast.cpu.quantized import PackedQuantizedLinear
from nanoinfer.fast.fuse import FusedLinear, fuse
from nanoinfer.fast.sampling import make_routes
from nanoinfer.fast.trace import Trace
from nanoinfer.loading.quantization import BITS, check_sizes, quantize_model
from nanoinfer.loading.weights import progress_bar
from nanoinfer.models.gated_delta import DeltaRecurrence

logger = logging.getLogger(__name__)


def compile_model(model: nn.Module, quantization: str | None = None, *, is_trial: bool = False) -> CompileReport:
    """Compile a model in place: its forward pass as programs, and every other nn.Linear as a kernel of its own.

    One linear layer is laid out at a time, and its plain weight freed unless something else holds it: a tied head leaves the
    embedding its own copy. A subclass of nn.Linear is left alone, because it may do more than multiply.

    Args:
        model: with its weights, on a CPU.
        quantization: None, or "int8" or "int4" for weights in 8 or 4 bits, also the head's.
        is_trial: keep the plain weights of the programs, so that the model can be compiled again.

    Raises:
        UnsupportedError: layers whose sizes do not fit the quantisation.
    """
    report, dtype = CompileReport(), next(model.parameters()).dtype
    pack: Pack = PackedLinear
    if quantization:
        check_sizes(model, quantization)
        pack = partial(PackedQuantizedLinear, bits=BITS[quantization])
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    with torch.inference_mode(), progress_bar("packing weights", len(linears)) as bar:
        num_uses: Counter[nn.Module] = Counter()  # calls of linear layers in the traces that are still to be compiled

        def packed(fused: FusedLinear) -> Any:
            bar.update(len(fused.linears))
            result = pack(fused)
            num_uses.subtract(fused.linears)
            for linear, start in () if is_trial else fused.starts():
                _keep_packed(linear, result, start, frees_plain=num_uses[linear] <= 0)
            return result

        def lower(trace: Trace) -> int:
            fuse(trace)
            modules = map(trace.module, trace.graph.nodes)
            num_uses.update(linear for fused in modules if isinstance(fused, FusedLinear) for linear in fused.linears)
            programs = compile_for_cpu(trace, packed, dtype)
            report.num_plain_linears += sum(isinstance(trace.module(node), FusedLinear) for node in trace.graph.nodes)
            return sum(len(program.operations) for program in programs)

        _compile_recurrences(model, dtype, report)
        compile_modules(model, lower, report)
        in_programs = set(num_uses)
        outside = [(path, linear) for path, linear in model.named_modules() if type(linear) is nn.Linear]
        _replace_linears(model, [(path, linear) for path, linear in outside if linear not in in_programs], packed, report)
    return report


def _compile_recurrences(model: nn.Module, dtype: torch.dtype, report: CompileReport) -> None:
    """Compute what depends on states by kernels."""
    for path, module in model.named_modules():
        if type(module) is DeltaRecurrence:
            try:
                kernel = KernelRecurrence(module, dtype)
                setattr(module, "kernel", kernel)  # noqa: B010 (mypy refuses the other form)
                setattr(module, "forward", kernel.forward)  # noqa: B010 (mypy refuses the other form)
            except UnsupportedError as error:
                report.left[path] = str(error)
            else:
                report.compiled[path] = 1


def _replace_linears(model: nn.Module, linears: list[tuple[str, nn.Linear]], pack: Pack, report: CompileReport) -> None:
    """Compute linear layers that are in no program by kernels of their own."""
    for path, linear in linears:
        parent, _, name = path.rpartition(".")
        try:
            result = pack(FusedLinear(linear))
        except UnsupportedError as error:
            report.left[path] = str(error)
            report.num_plain_linears += 1
        else:
            setattr(model.get_submodule(parent), name, KernelLinear(result))
            _keep_packed(linear, result, 0, frees_plain=True)  # in a trial, too: the kernel is there to stay


def _keep_packed(linear: Any, packed: Any, start: int, *, frees_plain: bool) -> None:
    """Note where an update of the layer's weight is to write (loading/update.py)."""
    linear.packed = {**getattr(linear, "packed", {}), packed: start}
    if frees_plain:
        linear.register_parameter("weight", None)
        linear.register_parameter("bias", None)


def accelerate_on_cpu(parts: Parts, config: EngineConfig) -> Parts:
    """Return parts with kernels. Raises: UnsupportedError, as compile_model does."""
    sizes = parts.model.config
    parts = replace(parts, routes=(*parts.routes, *make_routes(parts.device, parts.dtype, sizes.vocab_size, 0)))
    try:
        kernels = KernelBackend(
            parts.dtype,
            num_heads=sizes.num_attention_heads,
            num_kv_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
            has_int8_pages=parts.cache_dtype == torch.int8,
        )
    except UnsupportedError as error:
        logger.warning("the model runs without its C++ kernels, which are faster: %s", error)
        if config.quantization:
            quantize_model(cast(nn.Module, parts.model), config.quantization)
        return parts
    if type(parts.backend) is CPUBackend:
        parts = replace(parts, backend=kernels)
    is_independent = _try_out(parts, config)
    report = compile_model(cast(nn.Module, parts.model), config.quantization)
    return replace(parts, is_batch_independent=is_independent and not report.num_plain_linears, report=report)


def _try_out(parts: Parts, config: EngineConfig) -> bool:
    """Compile one layer of each kind, and try whether a row's bits depend on the batch."""
    model: Any = parts.model
    with one_layer_of_each_kind(model, model.config.num_hidden_layers):
        compile_model(model, config.quantization, is_trial=True)
        return is_batch_independent(
            model,
            parts.backend,
            parts.block_size,
            parts.cache_dtype,
            has_single_queries=config.scheduler.batch_invariant,
        )
