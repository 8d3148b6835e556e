"""safetensors files -> a model's parameters: every tensor used once or skipped by name, every parameter filled once.

In: a model built on the "meta" device (shapes without memory) and the checkpoint's Weights. Out: the same model with its
weights. Parameters have the names of the checkpoint. Each family's WeightRules declares the exceptions. WeightFiles are the
Weights of safetensors. formats/ has those of other files, which are unpacked while they are read.

Files are memory-mapped. On a CPU a matrix that has the model's dtype is not copied: it is a view of the file, until optimize.py
packs it from there. An embedding stays one: do not change the file while the model is in use. Everything else is copied into
its parameter piece by piece. So loading takes the memory of the parameters and little more.
"""

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from nanoinfer.errors import WeightsError, first_line
from nanoinfer.models.checkpoint import first_ten

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 2**24  # the names and shapes of some 100,000 tensors

_PIECE = 2**22  # elements that are read at a time

# as safetensors spells them
_FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class WeightRules:
    """How a family's checkpoints differ from its module tree.

    Attributes:
        prefix: comes before the names in some checkpoints, and is removed.
        embedding: the parameter that a tied head shares.
        head: the parameter of the LM head.
        transpose: endings of tensors stored as [in, out]. A linear layer has [out, in].
        skip: endings of tensors that are not weights.
    """

    prefix: str
    embedding: str
    head: str = "lm_head.weight"
    transpose: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read.

    Attributes:
        dtype: spelled as in safetensors: F32, BF16, I8.
        is_mapped: whether `read` returns a view of the mapped file, which takes no memory.
    """

    shape: tuple[int, ...]
    dtype: str
    is_mapped: bool = False


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight = scales * (integers - zeros), for each output and group of inputs.

    Attributes:
        bits: 8 or 4. Integers are in 0 .. 2**bits - 1.
        zeros: the integers that stand for 0. In 4 bits a GPTQ checkpoint may have 16.
    """

    bits: int
    integers: UInt8[Tensor, "out in"]
    scales: Float[Tensor, "out groups"]
    zeros: UInt8[Tensor, "out groups"]

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return self.integers.shape[1] // self.scales.shape[1]

    def widened(self) -> Float[Tensor, "out in"]:
        """The weight in float32."""
        shifted = self.integers.unflatten(1, (-1, self.group)).float() - self.zeros.unsqueeze(2)
        return (shifted * self.scales.unsqueeze(2)).flatten(1)


class QuantizedParameter(nn.Parameter):
    """A matrix that the checkpoint has as integers. The tensor is their value, rounded to the model's dtype.

    Attributes:
        read_integers: reads them from the file. None: they do not have the form of a QuantizedWeight.
    """

    read_integers: Callable[[], QuantizedWeight | None]


def side_by_side(weights: list[Tensor]) -> nn.Parameter:
    """Join matrices [out, in] with the same inputs into one. It is a QuantizedParameter if all of them are."""
    joined = torch.cat(weights)
    readers = [weight.read_integers for weight in weights if isinstance(weight, QuantizedParameter)]
    if len(readers) < len(weights):
        return nn.Parameter(joined, requires_grad=False)

    def read_integers() -> QuantizedWeight | None:
        parts = [part for read in readers if (part := read()) is not None]
        if len(parts) < len(readers) or len({part.group for part in parts}) > 1:
            return None
        integers, scales, zeros = (
            torch.cat([getattr(part, name) for part in parts]) for name in ("integers", "scales", "zeros")
        )
        return QuantizedWeight(parts[0].bits, integers, scales, zeros)

    parameter = QuantizedParameter(joined, requires_grad=False)
    parameter.read_integers = read_integers
    return parameter


class Weights(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint by name. A subclass says where they are.

    Attributes:
        has_empty_biases: whether layers without a bias may have one of zeros.
        has_integers: whether `integers` returns some.
    """

    has_empty_biases: bool = False
    has_integers: bool = False

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return some rows of a tensor, on the CPU, in any float dtype."""
        raise NotImplementedError

    def integers(self, name: str) -> QuantizedWeight | None:
        """Return a matrix as the integers in the file. None: it has none, or they do not have the form of a QuantizedWeight."""
        return None

    @cached_property
    def num_elements(self) -> int:
        return sum(math.prod(info.shape) for info in self.values())


class WeightFiles(Weights):
    """The tensors of safetensors files. What is read is a view of the mapped file, not yet read from the disk.

    Raises:
        WeightsError: a damaged file, no tensors, or a name that is in two files.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._files: dict[str, Any] = {}
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
                if name in self._files:
                    raise WeightsError(f"{name} is in {path.name} and in another file of {path.parent}")
                self._files[name] = file
        if not self._files:
            raise WeightsError(f"{', '.join(path.name for path in paths)} holds no tensors; download it again")

    def __getitem__(self, name: str) -> TensorInfo:
        header = self._files[name].get_slice(name)
        return TensorInfo(tuple(header.get_shape()), header.get_dtype(), is_mapped=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        return self._files[name].get_tensor(name)[rows]


def dtype_of(files: Weights) -> torch.dtype:
    """The dtype of most of the checkpoint's tensors, for a config.json without one."""
    names = [info.dtype for info in files.values()]
    dtype = _FLOAT_DTYPES.get(max(set(names), key=names.count), torch.float32)
    return torch.float32 if dtype is torch.float64 else dtype


def head_is_tied(config_says: bool, files: Weights, rules: WeightRules) -> bool:
    """Whether the LM head shares the embedding: as the config says, unless the checkpoint has a head that differs from it."""
    by_parameter = {_parameter_name(name, rules): name for name in files}
    if not config_says or rules.head not in by_parameter or rules.embedding not in by_parameter:
        return config_says
    head, embedding = files.read(by_parameter[rules.head]), files.read(by_parameter[rules.embedding])
    tied = head.dtype is embedding.dtype and torch.equal(head, embedding)
    if not tied:
        logger.warning("config.json ties the LM head to the embedding, but the checkpoint has a different head: not tied")
    return tied


def load_weights(model: nn.Module, files: Weights, rules: WeightRules, dtype: torch.dtype, device: torch.device) -> None:
    """Fill every parameter of a model built on the meta device.

    Raises:
        WeightsError: names missing, unexpected and misshaped tensors. Nothing has been loaded then.
    """
    targets = dict(model.named_parameters())  # a shared parameter once
    sources = match_tensors(targets, files, rules)
    _check_memory(targets, dtype, device)
    owners = _owners(model)
    bar = progress_bar("loading weights", len(targets))
    for name, target in targets.items():
        bar.update()
        source = sources[name]
        info, is_transposed = files[source], source.endswith(rules.transpose)
        # On a CPU matrices stay in the file. Linear layers are packed from there, and rows of an embedding are looked up.
        has_dtype = _FLOAT_DTYPES.get(info.dtype) is dtype
        if info.is_mapped and has_dtype and len(info.shape) > 1 and not is_transposed and device.type == "cpu":
            weight = files.read(source)
        else:
            weight = torch.empty(target.shape, dtype=dtype, device=device)
            _copy(files, source, weight.T if is_transposed else weight)
        parameter = nn.Parameter(weight, requires_grad=False)
        if files.has_integers and not is_transposed and device.type == "cpu":
            parameter = QuantizedParameter(weight, requires_grad=False)
            parameter.read_integers = partial(files.integers, source)
        for module, leaf in owners[target]:
            setattr(module, leaf, parameter)
    bar.close()


def progress_bar(description: str, total: int) -> tqdm:
    """A bar that appears in a terminal after two seconds."""
    return tqdm(total=total, desc=description, delay=2, leave=False, disable=None)


def _copy(files: Weights, name: str, out: Tensor) -> None:
    """Read a tensor into `out`, piece by piece, so that what is unpacked or converted takes little memory."""
    num_rows = max(1, _PIECE * len(out) // max(1, out.numel()))
    for start in range(0, len(out), num_rows):
        rows = slice(start, start + num_rows)
        out[rows].copy_(files.read(name, rows))


def _check_memory(targets: dict[str, nn.Parameter], dtype: torch.dtype, device: torch.device) -> None:
    """Refuse weights that this machine cannot hold. The system would end the process while they are copied."""
    if device.type == "cpu" and hasattr(os, "sysconf"):
        needed = sum(target.numel() for target in targets.values()) * dtype.itemsize
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > total:
            raise WeightsError(
                f"the weights take {needed / 2**30:.1f} GiB in {dtype}, and this machine has {total / 2**30:.1f} GiB; "
                "use a smaller model or a smaller dtype"
            )


def _owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, and its name in each. A shared parameter has several."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[parameter].append((module, leaf))
    return owners


def _parameter_name(tensor_name: str, rules: WeightRules) -> str:
    return tensor_name.removeprefix(rules.prefix)


def match_tensors(targets: dict[str, nn.Parameter], files: Weights, rules: WeightRules) -> dict[str, str]:
    """Return a map from a parameter's name to its tensor's name. It reads headers only.

    Raises:
        WeightsError: names missing, unexpected and misshaped tensors.
    """
    sources: dict[str, str] = {}
    problems: list[str] = []
    for tensor_name in files:
        name = _parameter_name(tensor_name, rules)
        if name.endswith(rules.skip):
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
        shape = list(files[tensor_name].shape)
        expected = list(targets[name].shape)
        if tensor_name.endswith(rules.transpose):
            expected = expected[::-1]
        if shape != expected:
            problems.append(f"misshaped: {tensor_name} has shape {shape}, the config requires {expected}")
        if files[tensor_name].dtype not in _FLOAT_DTYPES:
            problems.append(f"not a float: {tensor_name} is {files[tensor_name].dtype}, and config.json names no quantisation")
    problems += [f"missing: {name}" for name in targets if name not in sources]
    if problems:
        raise WeightsError(
            "the weights do not fit config.json; are both of the same model? Download them again, or correct config.json:\n  "
            + first_ten(problems, "\n  ")
        )
    return sources
