"""Compile a model and its attention for a CPU.

In: the plain runtime. Out: a runtime whose model and attention are computed by C++ kernels. Without a compiler they stay
as they are, and one log line says so.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from nanoinfer.attention.cpu import CPUBackend
from nanoinfer.config import BITS, EngineConfig
from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast.batch_independence import is_batch_independent, one_layer_of_each_kind
from nanoinfer.fast.compile import CompiledModel, compile_modules
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.cpu.calibration import find_moments
from nanoinfer.fast.cpu.compile import Pack, compile_for_cpu
from nanoinfer.fast.cpu.delta import KernelRecurrence
from nanoinfer.fast.cpu.linear import KernelEmbedding, KernelLinear, PackedLinear
from nanoinfer.fast.cpu.packs import Packs
from nanoinfer.fast.cpu.program import has_tiles
from nanoinfer.fast.cpu.quantized import PackedQuantizedLinear
from nanoinfer.fast.cpu.screen import GROUP_SIZES, LEAST_BYTES, ScreenedLinear, num_copy_bytes
from nanoinfer.fast.cpu.threads import one_torch_thread
from nanoinfer.fast.fuse import FusedLinear, fuse
from nanoinfer.fast.sampling.few_logits import FewLogits
from nanoinfer.fast.sampling.kernels import use_exponentials
from nanoinfer.fast.trace import Trace, copied, has_hooks, trace
from nanoinfer.features.hybrid.gated_delta import DeltaRecurrence
from nanoinfer.features.quantization.rounding import check_sizes, quantize_model
from nanoinfer.features.training.loaded_weights import LoadedWeights
from nanoinfer.features.training.stored import StoredParameter
from nanoinfer.features.training.stored import load as load_stored
from nanoinfer.models.registry import Model
from nanoinfer.system.process import available_cpu_memory
from nanoinfer.system.progress import progress_bar

logger = logging.getLogger(__name__)


def compile_model(
    model: nn.Module,
    quantization: str | None = None,
    *,
    weights: LoadedWeights | None = None,
    keeps_plain: bool = False,
    packs: Packs | None = None,
    pack: Callable[..., PackedLinear] = PackedLinear,
) -> CompiledModel:
    """Compile a model: its forward pass as programs, and every other nn.Linear as a separate kernel.

    Linear layers are laid out in turn, from the checkpoint where it still has the numbers, and a plain weight is freed. A
    subclass of nn.Linear stays as it is, because it may do more than multiply.

    Args:
        model: a model with its weights, or with StoredParameters, on a CPU.
        quantization: "int8" or "int4" rounds all weights, also the head's, to 8 or 4 bits. None: they stay as they are.
        weights: receives the weights as kernels read them. None: nobody replaces the weights.
        keeps_plain: whether to keep the plain weights, so that the model can also run plainly, or be compiled again.
        packs: layers that are laid out already, now or by an earlier start. It receives the others. None: there are none.
        pack: lays a layer out that is not rounded.

    Raises: UnsupportedError if the sizes of a layer do not fit the quantisation.
    """
    compiled, dtype = CompiledModel(copied(model)), next(model.parameters()).dtype
    weights, packs = LoadedWeights() if weights is None else weights, Packs() if packs is None else packs
    if quantization:
        check_sizes(model)
        pack = partial(PackedQuantizedLinear, bits=BITS[quantization], moments=packs.moments)
    laid_out = partial(_lay_out, pack=pack, packs=packs)
    with torch.inference_mode(), progress_bar("packing weights", sum(type(one) is nn.Linear for one in model.modules())) as bar:
        _compile_recurrences(compiled, dtype, weights)
        num_uses: Counter[nn.Module] = Counter()  # calls of linear layers in the traces that are not compiled yet

        def packed(fused: FusedLinear) -> PackedLinear:
            bar.update(len(fused.linears))
            result = laid_out(fused)
            num_uses.subtract(fused.linears)
            for linear, start in fused.starts():
                weights.add_kernel_weight(linear, result, start)
                if num_uses[linear] <= 0 and not keeps_plain:
                    linear.register_parameter("weight", None)
                    linear.register_parameter("bias", None)
            return result

        def lower(trace: Trace) -> int:
            fuse(trace)
            for name, value in trace.owned.items():  # what the forward pass uses itself, without a module
                if isinstance(value, StoredParameter):
                    trace.owned[name] = value.source.load(value.device)
            modules = map(trace.module, trace.graph.nodes)
            num_uses.update(linear for fused in modules if isinstance(fused, FusedLinear) for linear in fused.linears)
            programs = compile_for_cpu(trace, packed, dtype, weights)
            compiled.num_plain_linears += sum(isinstance(trace.module(node), FusedLinear) for node in trace.graph.nodes)
            return sum(len(program.operations) for program in programs)

        _share_tables(compiled.model, laid_out, keeps_plain=keeps_plain)
        compile_modules(compiled.model, lower, compiled)
        _replace_linears(compiled, set(num_uses), packed)
    return compiled


def _lay_out(fused: FusedLinear, pack: Callable[..., PackedLinear], packs: Packs) -> PackedLinear:
    """Lay linear layers out for their kernel, unless packs has them. Without a kernel they are read as torch computes them."""
    key = fused.linears, fused.activation
    if fused.linears == (packs.screened,):
        pack = ScreenedLinear
    try:
        packs[key] = packs.get(key) or pack(fused, kept=packs.kept(fused.linears))
    except UnsupportedError:
        for linear in fused.linears:
            load_stored(linear, linear.weight.device)
        raise
    return packs[key]


class _Logits(nn.Module):
    """Computes a model's logits, to be traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = cast(Model, self.model).compute_logits(hidden)
        return logits


def screened_head(model: nn.Module) -> nn.Linear | None:
    """Return the LM head, if its logits are the model's and a copy in 8 bits pays and fits into memory. None: otherwise."""
    try:
        traced = trace(_Logits(model))
    except Exception:  # raised by the model's own code, which was given symbols
        return None
    _, *computed, result = traced.graph.nodes
    if len(computed) != 1 or result.args != (computed[0],):
        return None
    head = traced.module(computed[0])
    if type(head) is not nn.Linear or head.bias is not None or has_hooks(head):
        return None
    if head.in_features % GROUP_SIZES[-1] or head.weight.nbytes < LEAST_BYTES:
        return None
    num_bytes = num_copy_bytes(head) + sum(weight.nbytes for weight in model.parameters())
    return head if num_bytes <= available_cpu_memory() else None


def _share_tables(model: nn.Module, pack: Pack, *, keeps_plain: bool) -> None:
    """Let an embedding read its rows from the kernel weight of the head with which it shares its table.

    Not if the kernel weight is rounded and the embedding is not.
    """
    heads = {module.weight: module for module in model.modules() if type(module) is nn.Linear}
    for path, table in list(model.named_modules()):
        if isinstance(table, nn.Embedding) and table.weight in heads:
            with suppress(UnsupportedError):  # no kernel has this number of inputs
                head = pack(FusedLinear(heads[table.weight]))
                if head.is_exact and type(table).forward is nn.Embedding.forward:
                    _replace(model, path, KernelEmbedding(head))
                    if not keeps_plain:
                        table.register_parameter("weight", None)
                    continue
            load_stored(table, table.weight.device)


def _compile_recurrences(compiled: CompiledModel, dtype: torch.dtype, weights: LoadedWeights) -> None:
    for path, module in list(compiled.model.named_modules()):
        if type(module) is DeltaRecurrence:
            try:
                kernel = KernelRecurrence(module, dtype)
            except UnsupportedError as error:
                compiled.left[path] = str(error)
            else:
                _replace(compiled.model, path, kernel)
                weights.add_renewal(kernel.lay_out_weights)
                compiled.compiled[path] = 1


def _replace_linears(compiled: CompiledModel, in_programs: set[nn.Module], pack: Pack) -> None:
    """Compute the linear layers that are in no program by separate kernels."""
    linears = [(path, module) for path, module in compiled.model.named_modules() if type(module) is nn.Linear]
    for path, linear in linears:
        if linear in in_programs:
            continue
        try:
            _replace(compiled.model, path, KernelLinear(pack(FusedLinear(linear))))
        except UnsupportedError as error:
            compiled.left[path] = str(error)
            compiled.num_plain_linears += 1


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent).register_module(name, module)


def accelerate_on_cpu(runtime: Runtime, config: EngineConfig) -> Runtime:
    """Return a runtime with kernels. Raises: UnsupportedError as compile_model does."""
    sizes = runtime.model.config
    try:
        has_tiles()  # loads program.cpp, without which no kernel runs
        use_exponentials()
        runtime = replace(runtime, routes=(FewLogits(),))
        kernels = KernelBackend.of(sizes, runtime.dtype, has_int8_pages=runtime.cache_dtype == torch.int8)
    except UnsupportedError as error:
        if config.calibration is not None:
            raise UnsupportedError(f"calibration needs C++ kernels: {error}; leave it out") from error
        logger.warning("the model runs without its C++ kernels, which are faster: %s", error)
        if config.quantization:
            quantize_model(cast(nn.Module, runtime.model), config.quantization)
        load_stored(cast(nn.Module, runtime.model), runtime.device)
        return runtime
    if type(runtime.backend) is CPUBackend:
        runtime = replace(runtime, backend=kernels)
    model = cast(nn.Module, runtime.model)
    head = screened_head(model) if config.screened_head and not config.quantization else None
    drafts = config.bits_of_copy is not None and runtime.weights.shards is None  # else build.py refuses them, on rank 0 alone
    rounds = config.quantization == "int4" or (drafts and config.bits_of_copy == BITS["int4"])
    moments = find_moments(runtime, compile_model) if rounds else None
    packs = Packs(model, config.quantization, head, moments)
    compile_with = partial(compile_model, quantization=config.quantization, packs=packs)
    few_layers = compile_with(one_layer_of_each_kind(model, sizes.num_hidden_layers), keeps_plain=True).model
    tried = replace(runtime, model=cast(Model, few_layers))
    is_independent = is_batch_independent(tried, has_single_queries=config.scheduler.batch_invariant)
    compiled = compile_with(model, weights=cast(LoadedWeights, runtime.weights), keeps_plain=drafts)
    packs.keep()
    runtime = replace(runtime, model=cast(Model, compiled.model), report=compiled)
    if head is not None and isinstance(packed := packs.get(((head,), None)), ScreenedLinear):
        runtime = replace(runtime, routes=(FewLogits(packed, runtime.model.compute_logits),))
    if drafts:
        rounded_to = f"int{config.bits_of_copy}"
        packs, drafter = Packs(model, rounded_to, moments=moments), _drafter_of(model, compiled.model)
        drafter = compile_model(drafter, rounded_to, weights=cast(LoadedWeights, runtime.weights), packs=packs).model
        packs.keep()
        runtime = replace(runtime, rounded_copy=cast(Model, drafter))
    if compiled.num_plain_linears:
        return runtime  # torch's products need all threads, and their bits depend on the batch
    return replace(runtime, is_batch_independent=is_independent, in_step=one_torch_thread)


def _drafter_of(model: nn.Module, compiled: nn.Module) -> nn.Module:
    """Copy a model, to be compiled with rounded weights as the drafter of its compiled form."""
    drafter = copied(model)
    for path, module in compiled.named_modules():
        if isinstance(module, KernelEmbedding):
            _replace(drafter, path, module)  # of the model's own head, whose table is exact
    return drafter
