"""Fill a model's parameters from safetensors files: every tensor is used once or skipped by name, every parameter filled once.

In: a model built on the "meta" device (shapes without memory) and the checkpoint's Weights. Out: the same model with its
weights. Parameters have the names of the checkpoint, except where the family's WeightRules say otherwise. WeightFiles are the
Weights of safetensors. formats/ has those of other formats, which are unpacked while they are read.

Files are memory-mapped. On a CPU, a matrix that has the model's dtype is not copied. It is a view of the file until fast/
packs it. An embedding stays a view, so do not change the file while the model is in use. Everything else is copied into
its parameter piece by piece, so loading takes little more memory than the parameters.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from nanoinfer.errors import WeightsError, first_line
from nanoinfer.loading.checkpoint import first_ten
from nanoinfer.models.registry import WeightRules

if TYPE_CHECKING:
    from nanoinfer.loading.quantization import QuantizedWeight

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 2**24  # the names and shapes of about 100,000 tensors

_PIECE = 2**22  # the number of elements that are read at a time

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
    has_integers: bool = False  # whether `integers` returns a matrix for any name

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return some rows of a tensor, on the CPU, in any float dtype."""
        raise NotImplementedError

    def integers(self, name: str) -> "QuantizedWeight | None":
        """Return a matrix as the integers in the file. None: it has no integers, or a QuantizedWeight cannot hold them."""
        return None


class WeightFiles(Weights):
    """The tensors of safetensors files. `read` returns views of the mapped files, not yet read from the disk."""

    def __init__(self, paths: list[Path]) -> None:
        self._read: dict[str, Callable[[str], Tensor]] = {}  # from the file that has the tensor
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
                raise WeightsError(f"{path} is cut short or damaged ({first_line(error)}); download it again") from error
            for name in file.keys():  # noqa: SIM118 (it is not a dict)
                if name in self:
                    raise WeightsError(f"{name} is in {path.name} and in another file of {path.parent}")
                header = file.get_slice(name)
                self._read[name] = file.get_tensor
                self[name] = TensorInfo(tuple(header.get_shape()), header.get_dtype(), is_mapped=True)
        if not self:
            raise WeightsError(f"{', '.join(path.name for path in paths)} holds no tensors; download it again")

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        return self._read[name](name)[rows]


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
    head, embedding = files.read(by_parameter[rules.head]), files.read(by_parameter[rules.embedding])
    tied = head.dtype is embedding.dtype and torch.equal(head, embedding)
    if not tied:
        logger.warning("config.json ties the LM head to the embedding, but the checkpoint has a different head: not tied")
    return tied


Places = dict[str, list[tuple[nn.Module, str]]]  # parameter -> the modules that hold it (two if tied), and its name there


def load_weights(model: nn.Module, files: Weights, rules: WeightRules, dtype: torch.dtype, device: torch.device) -> Places:
    """Fill every parameter of a model built on the meta device, or none if the tensors do not fit (match_tensors)."""
    targets = dict(model.named_parameters())  # a shared parameter is there once
    sources = match_tensors(targets, files, rules)
    _check_memory(targets, dtype, device)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    bar = progress_bar("loading weights", len(targets))
    for name, target in targets.items():
        bar.update()
        source = sources[name]
        info, is_transposed = files[source], source.endswith(rules.transpose)
        has_dtype = FLOAT_DTYPES.get(info.dtype) is dtype
        if info.is_mapped and has_dtype and len(info.shape) > 1 and not is_transposed and device.type == "cpu":
            weight = files.read(source)
        else:
            weight = torch.empty(target.shape, dtype=dtype, device=device)
            _copy(files, source, weight.T if is_transposed else weight)
        parameter = nn.Parameter(weight, requires_grad=False)
        if files.has_integers and not is_transposed and device.type == "cpu":
            from nanoinfer.loading.quantization import QuantizedParameter

            parameter = QuantizedParameter.of(weight, partial(files.integers, source))
        filled[target] = parameter
    bar.close()
    names: dict[nn.Parameter, str] = {target: name for name, target in targets.items()}
    places: Places = {name: [] for name in targets}
    for name, target in list(model.named_parameters(remove_duplicate=False)):  # a shared parameter is there once per module
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, leaf, filled[target])
        places[names[target]].append((module, leaf))
    return places


def progress_bar(description: str, total: int) -> tqdm:
    """Make a progress bar that appears in a terminal after two seconds."""
    return tqdm(total=total, desc=description, delay=2, leave=False, disable=None)


def _copy(files: Weights, name: str, out: Tensor) -> None:
    """Read a tensor into `out` piece by piece, so that unpacking and conversion take little memory."""
    num_rows = max(1, _PIECE * len(out) // max(1, out.numel()))
    for start in range(0, len(out), num_rows):
        rows = slice(start, start + num_rows)
        out[rows].copy_(files.read(name, rows))


def _check_memory(targets: dict[str, nn.Parameter], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that this machine cannot hold, because the system would kill the process while they are copied."""
    if device.type == "cpu" and os.name == "posix":
        needed = sum(target.numel() for target in targets.values()) * dtype.itemsize
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > total:
            raise WeightsError(
                f"the weights take {needed / 2**30:.1f} GiB in {dtype}, and this machine has {total / 2**30:.1f} GiB; "
                "use a smaller model or a smaller dtype"
            )


def match_tensors(targets: dict[str, nn.Parameter], files: Weights, rules: WeightRules) -> dict[str, str]:
    """Map each parameter's name to its tensor's name by the headers. Missing, unexpected and misshaped tensors are refused."""
    sources, problems = find_tensors(targets, files, rules)
    problems += [f"missing: {name}" for name in targets if name not in sources]
    if problems:
        raise WeightsError(
            "the weights do not fit config.json; are both of the same model? Download them again, or correct config.json:\n  "
            + first_ten(problems, "\n  ")
        )
    return sources


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
