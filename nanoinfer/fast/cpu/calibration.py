"""Find out how much each input of each linear layer counts, for weights that are rounded to 4 bits (quantized.py).

In: a model that is about to be rounded. Out: the moments of its layers' inputs, kept for the next start, or none.

The model reads the user's text, or random ids, in float32, whose kernels have the same bits on every processor. A layer is read
from the checkpoint when it is called, and freed afterwards. Of several ranks, rank 0 runs the whole model.
"""

import ctypes
import io
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
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.config import EngineConfig
from nanoinfer.errors import InvalidValueError, UnsupportedError, first_line
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.execution.runtime import Runtime
from nanoinfer.fast.batch_independence import hidden_rows, scratch_sequences
from nanoinfer.fast.compile import CompiledModel
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.attention import KernelBackend
from nanoinfer.fast.cpu.linear import PackedLinear
from nanoinfer.fast.cpu.packs import KeptArrays
from nanoinfer.fast.cpu.program import KernelCall, fields
from nanoinfer.fast.fuse import FusedLinear
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import on_meta
from nanoinfer.loading.quantization import Moments, log_plain_rounding, stored_integers
from nanoinfer.loading.weights import StoredParameter, Weights, fill, place_weights, progress_bar
from nanoinfer.models.layers import Hidden, Ids, Untraced
from nanoinfer.sampling.draw import philox

NUM_TOKENS = 512  # random ones

Compile = Callable[..., CompiledModel]  # compile_model (accelerate.py)


def find_moments(runtime: Runtime, compile_with: Compile) -> Moments:
    """Return the moments of an earlier start or of a pass that is made now. Empty: there are none, as the log says.

    All ranks of a model call it together. Raises: UnsupportedError if the user has given a text that cannot be used.
    """
    shards, ids = runtime.weights.shards, runtime.weights.calibration_ids
    linears = [module.weight for module in cast(nn.Module, runtime.model).modules() if type(module) is nn.Linear]
    stored = {weight.source: weight.files for weight in linears if isinstance(weight, StoredParameter)}
    moments: Moments = {}
    try:
        are_kept = [stored_integers(weight, 4) is not None for weight in linears]
        if (shards is None or shards.rank == 0) and (ids or not all(are_kept)):
            if any(are_kept):  # a layer in float32 would raise the peak of memory
                raise UnsupportedError("the checkpoint has integers of 4 bits for some weights")
            moments = _kept_or_measured(runtime, next(iter(stored.values()), Weights()), compile_with)
    except (UnsupportedError, AttributeError, TypeError) as error:  # a model's own code may read more of its layers
        if ids:
            raise UnsupportedError(f"calibration cannot be used: {error}; or leave it out") from error
        log_plain_rounding(error)
    if shards is None:
        return moments
    torch.save(moments, content := io.BytesIO())
    sent = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
    size = int(shards.gather(torch.tensor([len(sent)]))[0])
    first = shards.gather(F.pad(sent, (0, size - len(sent))))[0]  # a negative padding cuts
    whole: Moments = torch.load(io.BytesIO(first.numpy().tobytes()))
    return {name: stored[name].inputs(name, values) for name, values in whole.items() if name in stored}


def _kept_or_measured(runtime: Runtime, files: Weights, compile_with: Compile) -> Moments:
    origin, ids = runtime.weights.origin, runtime.weights.calibration_ids
    if origin is None or files.identity is None or not KeptArrays.are_possible:
        raise UnsupportedError("moments are kept for checkpoints without merged adapters, on Linux and macOS")
    file = KeptArrays(files.identity._replace(part=(0, 1)), "moments", (), repr(ids).encode())
    if file.arrays:
        return {name: array.view(torch.float32) for name, [array] in file.arrays.items()}
    try:
        file.check_folder()  # before the pass, which takes long
    except (OSError, InvalidValueError) as error:
        raise UnsupportedError(
            f"moments cannot be kept: {first_line(error)}; name another folder by NANOINFER_CACHE"
        ) from error
    moments = _Calibration(origin.config, compile_with).run(runtime, ids)
    file.keep({name: [values.view(torch.uint8)] for name, values in moments.items()})
    return moments


class _Calibration:
    """A checkpoint's whole model in float32, whose linear layers add the squares of their inputs to moments."""

    def __init__(self, config: EngineConfig, compile_with: Compile) -> None:
        self._moments: dict[str, Tensor] = {}
        self._packs: list[PackedLinear] = []  # of the layer that is computed
        self._compile = partial(compile_with, pack=self._measured)
        model, files = on_meta(Checkpoint.open(config.model, config.revision))
        place_weights(model, files, model.weight_rules, torch.float32)
        tables = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]
        fill(model, torch.device("cpu"), kept={table.weight for table in tables})
        self._bar = progress_bar("calibrating", model.config.num_hidden_layers)
        places = [(path.rpartition("."), module) for path, module in model.named_modules()]
        for owner, name, module in [(model.get_submodule(parent), name, module) for (parent, _, name), module in places]:
            if isinstance(module, nn.Embedding):
                setattr(owner, name, _Calls(module, partial(_rows, module.weight)))
            elif f"{name}.weight" == model.weight_rules.head:
                setattr(owner, name, _Calls(module, partial(self._measure_head, module)))
            elif isinstance(owner, nn.ModuleList) and owner in model.children():
                owner[int(name)] = _Calls(module, partial(self._compute, module))
        self._model: Any = self._compile(model.eval()).model

    @torch.inference_mode()
    def run(self, runtime: Runtime, ids: Sequence[int]) -> Moments:
        """Read tokens, and return the moments. ids: empty: random ones. runtime: the sizes of the model's cache."""
        config, groups = self._model.config, len(runtime.sizes.groups)
        random = philox((np.arange(NUM_TOKENS, dtype=np.uint64), 0, 0, 0), (0, 0))[0] * config.vocab_size >> 32
        text = [*(ids or random.tolist())][: config.max_position_embeddings]
        sequences = scratch_sequences([text], runtime.block_size, groups)
        runtime = replace(runtime, backend=KernelBackend.of(config, torch.float32), cache_dtype=torch.float32)
        cache = runtime.make_cache(groups * len(sequences[0].block_table), 1)
        runner = ModelRunner(self._model, cache, runtime.backend)
        self._model.compute_logits(hidden_rows(runner, sequences, [[len(text)]]))
        self._bar.close()
        return self._moments

    def _measured(self, fused: FusedLinear, **options: Any) -> PackedLinear:
        sums = torch.zeros(fused.in_features)
        self._moments |= {linear.weight.source: sums for linear in fused.linears}  # type: ignore[attr-defined]
        self._packs.append(pack := _MeasuredLinear(fused, sums, **options))
        return pack

    def _compute(self, layer: nn.Module, *given: Any) -> Any:
        self._packs.clear()
        out = self._compile(layer).model(*given)
        for array in chain.from_iterable(pack.arrays() for pack in self._packs):
            array.untyped_storage().resize_(0)  # now: compiled modules refer to each other in circles
        self._bar.update()
        return out

    def _measure_head(self, head: nn.Linear, x: Hidden) -> Tensor:
        sums = self._moments[head.weight.source] = torch.zeros(head.in_features)  # type: ignore[attr-defined]
        for row in x:  # torch's sum has another order on other processors
            sums += row * row
        return x.new_zeros(()).expand(len(x), head.out_features)  # nobody reads the logits


class MeasuredCall(ctypes.Structure):
    kept: object  # what the fields point to
    _fields_ = fields((KernelCall, "call"), (c_void_p, "sums"))


class _MeasuredLinear(PackedLinear):
    """A linear layer that adds the squares of its inputs to `sums`."""

    def __init__(self, fused: FusedLinear, sums: Float[Tensor, " in"], **options: Any) -> None:
        super().__init__(fused, **options)
        self._sums, source = sums, Path(__file__).with_name("rounding.cpp")
        self._measure = native.load(source, structures=(MeasuredCall,)).measure

    def call(self, **slices: Any) -> KernelCall:
        arguments = MeasuredCall(inner := super().call(**slices), self._sums.data_ptr())
        arguments.kept = inner
        return KernelCall(self._measure, arguments)


class _Calls(Untraced):
    """Calls a function in place of a module, whose other attributes it has."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__ |= {name: value for name, value in vars(module).items() if not name.startswith("_")}
        self.forward = function


def _rows(table: Any, input_ids: Ids) -> Hidden:
    """Read the rows of an embedding from the checkpoint."""
    return torch.cat([table.read(slice(i, i + 1)) for i in input_ids.tolist()])
