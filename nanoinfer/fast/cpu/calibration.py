"""Find out how much each input of each linear layer counts, for weights that are rounded to 4 bits (quantized.py).

In: a model that is about to be rounded. Out: the moments of its layers' inputs, kept for the next start, or none.

The model reads the user's text, or random ids, in float32, whose kernels have the same bits on every processor. A layer is read
from the checkpoint when it is called, and freed afterwards. Of several ranks, rank 0 runs the whole model.
"""

import ctypes
import io
import logging
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.config import EngineConfig
from nanoinfer.errors import InvalidValueError, UnsupportedError, first_line, shown
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast.batch_independence import hidden_rows, scratch_sequences
from nanoinfer.fast.compile import CompiledModel
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.cpu.linear import PackedLinear
from nanoinfer.fast.cpu.packs import KeptArrays, Packs
from nanoinfer.fast.cpu.program import KernelCall, fields
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.features.quantization.rounding import WITHOUT_CALIBRATION, Moments, stored_integers
from nanoinfer.features.training.loaded_weights import LoadedWeights
from nanoinfer.features.training.stored import Identity, StoredParameter, store
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import on_meta
from nanoinfer.loading.weights import fill, find_sources
from nanoinfer.models.layers import Hidden, Untraced
from nanoinfer.sampling.draw import philox
from nanoinfer.system.progress import progress_bar
from nanoinfer.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_TOKENS = 512  # random ones
MAX_CALIBRATION_TOKENS = 2048

Compile = Callable[..., CompiledModel]  # compile_model (accelerate.py)


def read_calibration(path: str, tokenizer: Tokenizer | None) -> list[int]:
    """Return the first tokens of a text. Raises: InvalidValueError if there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            if tokenizer and (ids := tokenizer.encode(file.read(32 * MAX_CALIBRATION_TOKENS))):
                return ids[:MAX_CALIBRATION_TOKENS]
        reason = "it has no tokens"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)  # without the path
    raise InvalidValueError(f"calibration must be a text file in UTF-8, got {shown(path)}: {reason}; leave it out")


def find_moments(runtime: Runtime, compile_with: Compile) -> Moments:
    """Return the moments of an earlier start or of a pass that is made now. Empty: there are none, as the log says.

    All ranks of a model call it together. Raises: UnsupportedError if the user has given a text that cannot be used.
    """
    weights = cast(LoadedWeights, runtime.weights)
    shards, ids = weights.shards, weights.calibration_ids
    linears = [module.weight for module in cast(nn.Module, runtime.model).modules() if type(module) is nn.Linear]
    stored = {weight.source.name: weight for weight in linears if isinstance(weight, StoredParameter)}
    moments: Moments = {}
    try:
        are_kept = [stored_integers(weight, 4) is not None for weight in linears]
        if (shards is None or shards.rank == 0) and (ids or not all(are_kept)):
            if any(are_kept):  # a layer in float32 would raise the peak of memory
                raise UnsupportedError("the checkpoint has integers of 4 bits for some weights")
            moments = _kept_or_measured(runtime, next((one.identity for one in stored.values()), None), compile_with)
    except (UnsupportedError, AttributeError, TypeError) as error:  # a model's own code may read more of its layers
        if ids:
            raise UnsupportedError(f"calibration cannot be used: {error}; or leave it out") from error
        logger.warning(WITHOUT_CALIBRATION, error)
    if shards is None:
        return moments
    torch.save(moments, content := io.BytesIO())
    sent = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
    size = int(shards.gather(torch.tensor([len(sent)]))[0])
    first = shards.gather(F.pad(sent, (0, size - len(sent))))[0]  # a negative padding cuts
    whole: Moments = torch.load(io.BytesIO(first.numpy().tobytes()))
    return {name: shards.inputs_of(stored[name].source, values) for name, values in whole.items() if name in stored}


def _kept_or_measured(runtime: Runtime, identity: Identity | None, compile_with: Compile) -> Moments:
    weights = cast(LoadedWeights, runtime.weights)
    origin, ids = weights.origin, weights.calibration_ids
    if origin is None or identity is None or not KeptArrays.are_possible:
        raise UnsupportedError("moments are kept for checkpoints without merged adapters, on Linux and macOS")
    file = KeptArrays(identity._replace(part=(0, 1)), "moments", (), repr(ids).encode())
    if file.arrays:
        return {name: array.view(torch.float32) for name, [array] in file.arrays.items()}
    try:
        file.check_folder()  # before the pass, which takes long
    except (OSError, InvalidValueError) as error:
        hint = "name another folder by NANOINFER_CACHE"
        raise UnsupportedError(f"moments cannot be kept: {first_line(error)}; {hint}") from error
    moments = _measured(runtime, origin.config, ids, compile_with)
    file.keep({name: [values.view(torch.uint8)] for name, values in moments.items()})
    return moments


@torch.inference_mode()
def _measured(runtime: Runtime, engine: EngineConfig, ids: Sequence[int], compile_with: Compile) -> Moments:
    """Read ids, or random ones if there are none, with the checkpoint's whole model. runtime: the sizes of its cache."""
    moments: dict[str, Tensor] = {}
    model, files = on_meta(Checkpoint.open(engine.model, engine.revision))
    sources = find_sources(model, files, torch.float32)
    store(model, sources, {module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)})
    fill(model, sources, torch.device("cpu"))
    compiled = partial(compile_with, pack=partial(_MeasuredLinear, moments=moments))

    def compute(layer: nn.Module, *given: Any) -> Any:
        out = compiled(layer, packs=(packs := Packs())).model(*given)
        for array in chain.from_iterable(pack.arrays() for pack in packs.values()):
            array.untyped_storage().resize_(0)  # now: compiled modules refer to each other in circles
        bar.update()
        return out

    def measure_head(head: Any, x: Hidden) -> Tensor:
        sums = moments[head.weight.source.name] = torch.zeros(head.in_features)
        for row in x:  # torch's sum has another order on other processors
            sums += row * row
        return x.new_zeros(()).expand(len(x), head.out_features)  # nobody reads the logits

    for owner, name, module in [(one, *child) for one in model.modules() for child in one.named_children()]:
        if isinstance(module, nn.Embedding):
            read: Any = cast(StoredParameter, module.weight).source.read
            setattr(owner, name, _Calls(module, lambda x, read=read: torch.cat([read(slice(i, i + 1)) for i in x.tolist()])))
        elif f"{name}.weight" == model.weight_rules.head:
            setattr(owner, name, _Calls(module, partial(measure_head, module)))
        elif isinstance(owner, nn.ModuleList) and owner in model.children():
            setattr(owner, name, _Calls(module, partial(compute, module)))
    config, groups = model.config, len(runtime.sizes.windows)
    random = philox((np.arange(NUM_TOKENS, dtype=np.uint64), 0, 0, 0), (0, 0))[0] * config.vocab_size >> 32
    text = [*(ids or random.tolist())][: config.max_position_embeddings]
    sequences = scratch_sequences([text], runtime.block_size, groups)
    sizes = replace(runtime.sizes, head_dim=config.head_dim)
    runtime = replace(runtime, sizes=sizes, cache_dtype=torch.float32, cache_class=KVCache)
    runtime = replace(runtime, backend=KernelBackend.of(config, torch.float32))
    with progress_bar("calibrating", config.num_hidden_layers) as bar:
        whole: Any = compiled(model.eval()).model
        runtime = replace(runtime, model=whole)  # on the CPU, also where the engine's model is on a GPU
        cache = runtime.make_cache(groups * len(sequences[0].block_table), 1)
        whole.compute_logits(hidden_rows(ModelRunner(whole, cache, runtime.begin_step), sequences, [[len(text)]]))
    return moments


class MeasuredCall(ctypes.Structure):
    kept: object  # what the fields point to
    _fields_ = fields((KernelCall, "call"), (c_void_p, "sums"))


class _MeasuredLinear(PackedLinear):
    """A linear layer that adds the squares of its inputs to zeros, its moments."""

    def __init__(self, fused: FusedLinear, moments: dict[str, Tensor], **options: Any) -> None:
        super().__init__(fused, **options)
        self._sums = torch.zeros(self.num_in)
        moments |= {cast(StoredParameter, linear.weight).source.name: self._sums for linear in fused.linears}

    def call(self, **slices: Any) -> KernelCall:
        arguments = MeasuredCall(inner := super().call(**slices), self._sums.data_ptr())
        arguments.kept = inner
        return KernelCall(native.load(Path(__file__).with_name("rounding.cpp"), structures=(MeasuredCall,)).measure, arguments)


class _Calls(Untraced):
    """Calls a function in place of a module, whose other attributes it has."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__ |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
        self.forward = function
