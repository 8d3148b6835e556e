"""Read a GGUF file's header: its metadata, and where each tensor is. Everything that the file says is checked.

In: the path of a .gguf file, which may be malicious. Out: a GGUFFile, plain data. No weight is read here: gguf_weights.py does
that. gguf_families.py knows what metadata and tensors mean for each architecture.

The reader of the gguf package is not used, because it trusts every length.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from nanoinfer.errors import CheckpointError, UnsupportedError, WeightsError, shown

# A vocabulary of 256,000 tokens and its merges are 2**20 values, and less than 2**24 bytes.
MAX_METADATA_VALUES = 2**21
MAX_METADATA_BYTES = 2**26
MAX_TENSORS = 2**16

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type -> struct's code
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class BlockType:
    """The layout of weights: blocks of `num_weights`, each of `num_bytes`."""

    name: str
    num_weights: int
    num_bytes: int


# ggml's number of a type -> the type. gguf_weights.py unpacks the blocks.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 30: BlockType("BF16", 1, 2), 2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20), 6: BlockType("Q5_0", 32, 22), 7: BlockType("Q5_1", 32, 24), 8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144), 13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210),
    39: BlockType("MXFP4", 32, 17),
}  # fmt: skip
_OTHER_TYPES = {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
_OTHER_TYPES |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
_OTHER_TYPES |= {28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The place of a tensor."""

    shape: tuple[int, ...]  # slowest axis first, as in torch, which reverses the order of the file
    block_type: BlockType
    start: int  # bytes from the beginning of the file
    num_bytes: int  # its length in the file


@dataclass(frozen=True)
class GGUFFile:
    """A checked header."""

    path: Path
    metadata: dict[str, Any] = field(repr=False)  # key -> number, bool, string, or a list of them
    tensors: dict[str, GGUFTensor] = field(repr=False)  # by the file's names

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the architecture's metadata: get("block_count") reads llama.block_count in a file of Llama."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_gguf(path: Path) -> GGUFFile:
    """Read a header, and refuse whatever contradicts the file's size or is not supported."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(path, content)
    except (CheckpointError, UnsupportedError):
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} is truncated or corrupted ({error}); download it again") from error


@dataclass
class _Cursor:
    """Reads values in order. Raises: ValueError at the end of the file, and for lengths beyond it."""

    content: mmap.mmap
    position: int = 4  # after the magic number
    num_values: int = 0  # the number of metadata values so far

    def scalar(self, code: str) -> Any:
        [value] = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        return value

    def string(self) -> str:
        return self._take(self.scalar("Q")).decode()

    def _take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > min(len(self.content), MAX_METADATA_BYTES):
            raise ValueError(f"{num_bytes} bytes at {self.position}, beyond the end of the file or of 64 MiB of metadata")
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def value(self) -> Any:
        value_type = self.scalar("I")
        if value_type != _ARRAY:
            return self._values(value_type, 1)[0]
        return self._values(self.scalar("I"), self.scalar("Q"))

    def _values(self, value_type: int, count: int) -> list[Any]:
        self.num_values += count
        if self.num_values > MAX_METADATA_VALUES:
            raise ValueError(f"an array of {count} values, at most {MAX_METADATA_VALUES} are read")
        if value_type == _STRING:
            return [self.string() for _ in range(count)]
        if value_type not in _SCALARS:  # for example an array of arrays, which no known key has
            raise ValueError(f"a value of type {value_type}")
        dtype = np.dtype("<" + _SCALARS[value_type])  # numpy uses the same letters
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
        return values


def _read(path: Path, content: mmap.mmap) -> GGUFFile:
    if content[:4] != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {shown(content[:4])}; download it again")
    cursor = _Cursor(content)
    version = cursor.scalar("I")
    if version & 0xFFFF == 0:
        raise UnsupportedError(f"{path} is a big-endian GGUF file, which is not supported; take the little-endian one")
    if version not in (2, 3):
        raise UnsupportedError(f"{path} is version {version} of GGUF; 2 and 3 are supported. Convert the model again")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    if num_tensors > MAX_TENSORS or num_keys > MAX_TENSORS:
        raise CheckpointError(
            f"{path} claims {num_tensors} tensors and {num_keys} keys, at most {MAX_TENSORS} are read; download it again"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{path} has the key {shown(key)} twice; download it again")
        metadata[key] = cursor.value()
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedError(
            f"{path} is one of {shown(metadata['split.count'])} parts, which is not supported; "
            "merge them with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`"
        )
    return GGUFFile(path, metadata, _read_tensors(path, cursor, num_tensors, metadata.get("general.alignment", 32)))


def _read_tensors(path: Path, cursor: _Cursor, num_tensors: int, alignment: object) -> dict[str, GGUFTensor]:
    """Read the table of tensors. Every tensor must be inside the file, and overlap with no other."""
    if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise CheckpointError(f"general.alignment in {path} must be a power of two >= 8, got {shown(alignment)}")
    entries = []
    for _ in range(num_tensors):
        name, num_axes = cursor.string(), cursor.scalar("I")
        if not 1 <= num_axes <= 4:
            raise WeightsError(f"{shown(name)} in {path} has {num_axes} axes, 1 .. 4 are possible; download it again")
        shape = tuple(cursor.scalar("Q") for _ in range(num_axes))[::-1]
        entries.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, type_number, offset in entries:
        block_type = BLOCK_TYPES.get(type_number)
        if block_type is None:
            raise UnsupportedError(
                f"{shown(name)} in {path} has the type {_OTHER_TYPES.get(type_number, type_number)}, which is not supported; "
                f"take a file with {', '.join(known.name for known in BLOCK_TYPES.values())}, such as Q4_K_M or Q8_0"
            )
        num_bytes = math.prod(shape) // block_type.num_weights * block_type.num_bytes
        start = data_start + offset
        if 0 in shape or shape[-1] % block_type.num_weights or offset % alignment:
            raise WeightsError(
                f"{shown(name)} in {path}: {block_type.name} of shape {list(shape)} at byte {start} is not whole blocks at "
                f"multiples of {alignment}; download it again"
            )
        if start + num_bytes > len(cursor.content):
            raise WeightsError(
                f"{path} is truncated: it has {len(cursor.content)} bytes, and {shown(name)} ends at byte {start + num_bytes}; "
                "download it again"
            )
        if name in tensors:
            raise WeightsError(f"{shown(name)} is in {path} twice; download it again")
        tensors[name] = GGUFTensor(shape, block_type, start, num_bytes)
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
    if any(first.start + first.num_bytes > second.start for first, second in pairwise(in_order)):
        raise WeightsError(f"tensors in {path} overlap; download it again")  # otherwise a small file could claim a large model
    return tensors
