"""Fill a model's parameters from safetensors files: every tensor is used once or skipped by name, every parameter filled once.

In: a model built on the "meta" device (shapes without memory) and the checkpoint's Weights. Out: the same model with its
weights. Parameters have the names of the checkpoint, except where the family's WeightRules say otherwise. WeightFiles are the
Weights of safetensors. Those of other formats are unpacked while they are read (features/formats).

`find_sources` compares the headers, and `fill` reads the tensors. What has a layout of its own for the kernels is read from the
checkpoint piece by piece instead (features/training/stored.py).

Files are memory-mapped. On a CPU, a filled matrix that has the model's dtype is a view of the file, so do not change the file
while the model is in use. Everything else is copied piece by piece, and the file's pages are given back, so loading takes
little more memory than the model.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanoinfer.errors import WeightsError, first_line, first_ten
from nanoinfer.models.registry import WeightRules, is_registered
from nanoinfer.system.pages import release_pages
from nanoinfer.system.progress import progress_bar

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 2**24  # the names and shapes of about 100,000 tensors

_PIECE = 2**20  # the number of elements that are read at a time, which stay in the processor's cache

# "module:class" of the Weights that divide tensors of all experts: (weights, layout), imported when it is first used
FUSED_EXPERTS = "nanoinfer.features.formats.experts:ExpertWeights"

# the names of safetensors
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header of a tensor, known before the tensor is read."""

    shape: tuple[int, ...]
    dtype: str  # as in safetensors: F32, BF16, I8
    is_mapped: bool = False  # whether `read` returns a view of the mapped file, which takes no memory


class Weights(dict[str, TensorInfo]):
    """The tensors of a checkpoint by name. A subclass fills the dict, and reads the tensors."""

    has_empty_biases: bool = False  # whether layers without a bias may have a bias of zeros

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return some rows of a tensor, on the CPU, in any float dtype."""
        raise NotImplementedError

    def release(self) -> None:
        """Give the pages of the files that were read back to the system. They are read again when they are used."""

    def pieces(self, name: str) -> Iterator[slice]:
        """Yield the rows of a tensor that are read together, and give the pages of the files back at the end."""
        shape = self[name].shape
        size = _PIECE * (16 if self[name].is_mapped else 1)  # views take no memory
        num_rows = max(1, size * shape[0] // max(1, math.prod(shape)))
        for start in range(0, shape[0], num_rows):
            yield slice(start, min(start + num_rows, shape[0]))
        self.release()


class DerivedWeights(Weights):
    """Tensors that are computed from those of `base`."""

    base: Weights

    def release(self) -> None:
        self.base.release()


class WeightFiles(Weights):
    """The tensors of safetensors files. `read` returns views of the mapped files, not yet read from the disk.

    Args:
        paths: the files.
        weight_map: the index: tensor -> the name of the file from which it is read if several files have it. None: no index.
    """

    def __init__(self, paths: list[Path], weight_map: dict[str, str] | None = None) -> None:
        index, found_in = weight_map or {}, dict[str, str]()
        self._read: dict[str, Callable[[str], Tensor]] = {}  # from the file that has the tensor
        self._views: list[Tensor] = []  # what was read since the last release
        for path in paths:
            try:
                with path.open("rb") as start:
                    num_header_bytes = int.from_bytes(start.read(8), "little")
                if num_header_bytes > MAX_HEADER_BYTES:
                    raise SafetensorError(f"a header of {num_header_bytes} bytes, at most {MAX_HEADER_BYTES} are read")
                file = safe_open(path, framework="pt")
            except PermissionError as error:
                raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is truncated or corrupted ({first_line(error)}); download it again") from error
            for name in file.keys():  # noqa: SIM118 (it is not a dict)
                if name in self and index.get(name) == found_in[name]:
                    continue
                if name in self and index.get(name) != path.name:
                    raise WeightsError(
                        f"{name} is in {path.name} and in {found_in[name]} of {path.parent}, and no index gives it to either; "
                        "remove the file that is out of date, or download the checkpoint again"
                    )
                found_in[name] = path.name
                header = file.get_slice(name)
                self._read[name] = file.get_tensor
                self[name] = TensorInfo(tuple(header.get_shape()), header.get_dtype(), is_mapped=True)
        if not self:
            raise WeightsError(f"{', '.join(path.name for path in paths)} holds no tensors; download it again")

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        self._views.append(self._read[name](name)[rows])
        return self._views[-1]

    def release(self) -> None:
        for view in self._views:
            if view.is_contiguous():
                release_pages(view)
        self._views.clear()


def divided(weights: Weights, rules: WeightRules) -> Weights:
    """Return the same tensors, after dividing those that hold several parameters in checkpoints of this family."""
    if rules.fused_experts is None:
        return weights
    found: Weights = resolve_name(FUSED_EXPERTS)(weights, rules.fused_experts)
    return found


def dtype_of(files: Weights) -> torch.dtype:
    """Return the dtype of most of the checkpoint's tensors, for a config.json without a dtype."""
    names = [info.dtype for info in files.values()]
    dtype = FLOAT_DTYPES.get(max(set(names), key=names.count), torch.float32)
    return torch.float32 if dtype is torch.float64 else dtype


def head_is_tied(config_says: bool, files: Weights, rules: WeightRules) -> bool:
    """Return whether the LM head shares the embedding: as the config says, unless the checkpoint's head differs from it."""
    by_parameter = {name.removeprefix(rules.prefix): name for name in files}
    if not config_says or rules.head not in by_parameter or rules.embedding not in by_parameter:
        return config_says
    head, embedding = by_parameter[rules.head], by_parameter[rules.embedding]
    tied = (files[head].shape, files[head].dtype) == (files[embedding].shape, files[embedding].dtype) and all(
        torch.equal(files.read(head, rows), files.read(embedding, rows)) for rows in files.pieces(head)
    )
    if not tied:
        logger.warning("config.json ties the LM head to the embedding, but the checkpoint has a different head: not tied")
    return tied


@dataclass(frozen=True, slots=True)
class Source:
    """The tensor of a checkpoint that fills a parameter."""

    files: Weights
    name: str
    dtype: torch.dtype  # the parameter's
    is_transposed: bool  # whether the tensor has the parameter's axes in the other order. It is then read whole

    def pieces(self) -> Iterator[slice]:
        """Yield the rows that are read together, and give the pages of the files back at the end."""
        yield from [slice(None)] if self.is_transposed else self.files.pieces(self.name)
        self.files.release()

    def read(self, rows: slice) -> Tensor:
        """Return rows of the parameter."""
        values = self.files.read(self.name, rows)
        return (values.T if self.is_transposed else values).to(self.dtype)

    def load(self, device: torch.device) -> nn.Parameter:
        """Return the parameter: a matrix of the dtype is a view of the mapped file on a CPU, everything else a copy."""
        info, has_dtype = self.files[self.name], FLOAT_DTYPES.get(self.files[self.name].dtype) is self.dtype
        if info.is_mapped and has_dtype and len(info.shape) > 1 and not self.is_transposed and device.type == "cpu":
            return nn.Parameter(self.files.read(self.name), requires_grad=False)
        shape = info.shape[::-1] if self.is_transposed else info.shape
        weight = torch.empty(shape, dtype=self.dtype, device=device)
        for rows in self.pieces():
            weight[rows] = self.read(rows)
        return nn.Parameter(weight, requires_grad=False)


Sources = dict[nn.Parameter, Source]  # those of the parameters on the meta device


def places_of(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return the modules that hold each parameter, and its name there. A tied parameter has two modules."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        module, _, leaf = path.rpartition(".")
        places.setdefault(parameter, []).append((model.get_submodule(module), leaf))
    return places


def fill(model: nn.Module, sources: Sources, device: torch.device) -> None:
    """Read the parameters of a model that have a source. The others stay as they are."""
    places = places_of(model)
    with progress_bar("loading weights", len(places)) as bar:
        for parameter, owners in places.items():
            bar.update()
            if parameter in sources:
                filled = sources[parameter].load(device)
                for module, leaf in owners:
                    setattr(module, leaf, filled)


def find_sources(model: nn.Module, files: Weights, dtype: torch.dtype) -> Sources:
    """Find the tensor of each parameter by the headers. Raises: WeightsError for missing, unexpected and misshaped tensors."""
    targets, rules = dict(model.named_parameters()), cast(WeightRules, model.weight_rules)  # a tied parameter is there once
    names, problems = find_tensors(targets, files, rules)
    problems += [f"missing: {name}" for name in targets if name not in names]
    if problems:
        raise WeightsError(f"{_explain(model, files)}: {first_ten(problems, '; ')}")
    return {
        target: Source(files, names[path], dtype, names[path].endswith(rules.transpose)) for path, target in targets.items()
    }


def _explain(model: nn.Module, files: Weights) -> str:
    """Say why the weights may not fit, and what to do."""
    for inner, how in (("_orig_mod", "compiled (torch.compile)"), ("module", "wrapped (DataParallel)")):
        if any(f".{inner}." in f".{name}" for name in files):
            hint = f"save the model inside it: model.{inner}.save_pretrained(folder)"
            return f"the names of the weights have '{inner}.', because a {how} model was saved; {hint}"
    if is_registered(type(model)):
        name = type(model).__name__
        return f"the weights do not fit {name}; compare its parameters and weight_rules with the tensors' names and shapes"
    return "the weights do not fit config.json; are both of the same model? Download them again, or correct config.json"


def find_tensors(targets: dict[str, nn.Parameter], files: Weights, rules: WeightRules) -> tuple[dict[str, str], list[str]]:
    """Map the parameters that have a tensor to its name. Also returns the problems of the other tensors."""
    sources: dict[str, str] = {}
    problems: list[str] = []
    for tensor_name in files:
        name = tensor_name.removeprefix(rules.prefix)
        if name.endswith(rules.skip) or name.startswith(rules.ignored):
            continue
        if name == rules.head and name not in targets and rules.embedding in targets:
            continue  # tied: head_is_tied has checked that it equals the embedding
        if name not in targets and files.has_empty_biases and name.endswith(".bias") and not files.read(tensor_name).any():
            continue
        if name not in targets:
            problems.append(f"unexpected: {tensor_name}")
            continue
        if name in sources:
            problems.append(f"twice: {tensor_name} and {sources[name]}")
            continue
        sources[name] = tensor_name
        shape, expected = list(files[tensor_name].shape), list(targets[name].shape)
        if tensor_name.endswith(rules.transpose):
            expected.reverse()
        if shape != expected:
            problems.append(f"misshaped: {tensor_name} has shape {shape}, the config requires {expected}")
        if files[tensor_name].dtype not in FLOAT_DTYPES:
            problems.append(f"not a float: {tensor_name} is {files[tensor_name].dtype}, and config.json names no quantisation")
    return sources, problems
