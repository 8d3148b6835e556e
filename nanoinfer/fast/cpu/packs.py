"""Linear layers as their kernels read them, which are kept in a file for the next start.

In: a model whose weights are in the checkpoint, and the layers that accelerate.py lays out. Out: the arrays of these layers,
mapped from the file that an earlier start has written, or such a file.

There is a file for each checkpoint, dtype, layout and rank, in the folder "packed" next to the kernels' libraries. It can
be deleted at any time. system/disk_cache.py writes it, and limits the bytes of all files:

    SHA-256 of the index | the index, a line of JSON padded with spaces | arrays, each at a multiple of ALIGNMENT bytes

The index has a digest of all that the bytes depend on, so the file of another version of the checkpoint or of the code is
replaced. It also has a checksum of the arrays, which is computed at each start. This reads the file into memory, which the
first step would otherwise do, and takes 0.15 s per GB if the system has the file's pages (2 cores of an AMD EPYC, Zen 4).

The file is mapped privately. All processes share its pages, and update_weights changes this process's copies of them.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from nanoinfer.errors import InvalidValueError, first_line
from nanoinfer.fast.cpu import native
from nanoinfer.fast.cpu.linear import PackedLinear
from nanoinfer.fast.cpu.program import has_tiles
from nanoinfer.fast.cpu.threads import one_torch_thread
from nanoinfer.features.quantization.rounding import Moments
from nanoinfer.features.training.stored import Identity, StoredParameter
from nanoinfer.system.disk_cache import DiskCache, opened, private_folder, stamp

logger = logging.getLogger(__name__)

PATTERN = "[0-9a-f]" * 32 + ".*"  # of the names
MAX_BYTES = 2**34  # of all files
MIN_BYTES = 2**26  # of a model's arrays. Fewer are packed in less than 0.3 s
ALIGNMENT = 64  # of a weight, as the kernels expect it

_INDEX = {"checkpoint": list, "made_from": str, "checksum": str, "arrays": dict}  # the index's keys

Arrays = Mapping[str, Sequence[UInt8[Tensor, " bytes"]]]  # the paths of the layers that are packed together -> their arrays


class Packs(dict[tuple[tuple[nn.Linear, ...], str | None], PackedLinear]):
    """The linear layers that a kernel computes together, and their activation -> the pack.

    Args:
        model: the model whose layers are packed. None: nothing is kept.
        quantization: how all weights are rounded. None: they stay as they are.
        screened: the layer that becomes a ScreenedLinear. None: no layer.
        moments: how much each input counts when a layer's weights are rounded to 4 bits (quantized.py).
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        quantization: str | None = None,
        screened: nn.Linear | None = None,
        moments: Moments | None = None,
    ) -> None:
        self.screened, self.moments = screened, (quantization == "int4" and moments) or {}
        self._paths = {} if model is None else {module: path for path, module in model.named_modules()}
        weights = [module.weight for module in self._paths if type(module) is nn.Linear]
        stored = [weight for weight in weights if isinstance(weight, StoredParameter)]
        identity = stored[0].identity if stored and len(stored) == len(weights) else None
        self._file = None
        if identity is not None and KeptArrays.are_possible:
            layout = stored[0].dtype, quantization, screened is not None
            digest = _digest(*(values.numpy().tobytes() for values in self.moments.values()))
            self._file = KeptArrays(identity, "weights", layout, digest)

    def kept(self, linears: tuple[nn.Linear, ...]) -> Sequence[UInt8[Tensor, " bytes"]]:
        """Return the arrays of layers that an earlier start has packed together. Empty: they are not kept."""
        return () if self._file is None else self._file.arrays.get(self._name(linears), ())

    def keep(self) -> None:
        """Write all packs for the next start, unless they are kept already. If that fails, it is logged."""
        if self._file is not None:
            flat = {key: [array.detach().flatten().view(torch.uint8) for array in pack.arrays()] for key, pack in self.items()}
            arrays = {self._name(linears): some for (linears, _), some in flat.items()}
            if not arrays.keys() <= self._file.arrays.keys() and sum(x.nbytes for x in chain(*arrays.values())) >= MIN_BYTES:
                self._file.keep(arrays)

    def _name(self, linears: tuple[nn.Linear, ...]) -> str:
        return " ".join(self._paths.get(linear, "") for linear in linears)


class KeptArrays:
    """Arrays that were computed from a checkpoint, in a file for the next start.

    Args:
        identity: the checkpoint's.
        kind, layout: what tells these arrays from others of the checkpoint.
        made_from: what else decides their bytes. A file that was made from something else is replaced.
    """

    are_possible = sys.platform != "win32"

    def __init__(self, identity: Identity, kind: str, layout: tuple[object, ...], made_from: bytes) -> None:
        self._checkpoint, part, version = identity
        self._made_from, self._kind = _made_from(version, made_from), kind
        name = hashlib.sha256(repr((self._checkpoint, part, *layout)).encode()).hexdigest()[:32]
        self._path = native.cache_folder() / "packed" / f"{name}.{kind}"
        self.arrays: Arrays = {}  # those of the file
        with suppress(OSError, InvalidValueError):  # there is no file, or it cannot be believed
            private_folder(self._path.parent, "the folder of packed weights")
            self.arrays = self._read(self._path)

    def check_folder(self, num_bytes: int = 1) -> None:
        """Raises: OSError, InvalidValueError if the folder cannot receive a file of this size."""
        folder = private_folder(self._path.parent, "the folder of packed weights")
        if not os.access(folder, os.W_OK):
            raise OSError("it is read-only")
        if num_bytes > (limit := min(MAX_BYTES, shutil.disk_usage(folder).free // 2)):
            raise OSError(f"{num_bytes / 1e9:.1f} GB are more than {limit / 1e9:.1f} GB, half of the free space or the limit")

    def keep(self, arrays: Arrays) -> None:
        """Write the file. If that fails, it is logged."""
        num_bytes = sum(array.nbytes for array in chain(*arrays.values()))
        try:
            self.check_folder(num_bytes)
            self._write(self._path, arrays)
        except (OSError, InvalidValueError) as error:
            hint = "each start packs them again, unless NANOINFER_CACHE is a folder with space that only you can write"
            logger.warning("packed %s cannot be kept in %s: %s; %s", self._kind, self._path.parent, first_line(error), hint)
            return
        logger.info("packed %s are kept in %s for the next start (%.1f GB)", self._kind, self._path, num_bytes / 1e9)

    def _read(self, path: Path) -> Arrays:
        """Map the arrays of a file. A file of another version has none, and a corrupted file is removed."""
        try:
            index, start = _read_index(path)
            if index["made_from"] != self._made_from:
                return {}
            content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
            arrays: dict[str, list[Tensor]] = {}
            for name, sizes in index["arrays"].items():
                arrays[name] = []
                for size in sizes:
                    arrays[name].append(content[start : start + size])
                    start += size + -size % ALIGNMENT
            if start != len(content) or _checksum(arrays) != index["checksum"]:
                raise ValueError("its length or its checksum is wrong")
        except (ValueError, TypeError, RuntimeError) as error:
            logger.warning("the packed %s in %s are corrupted, and are packed again: %s", self._kind, path, first_line(error))
            path.unlink()
            return {}
        with suppress(OSError):  # the folder may be read-only
            stamp(path)
        return arrays

    def _write(self, path: Path, arrays: Arrays) -> None:
        index: dict[str, Any] = {"checkpoint": self._checkpoint, "made_from": self._made_from, "checksum": _checksum(arrays)}
        index["arrays"] = {name: [array.nbytes for array in some] for name, some in arrays.items()}
        text = json.dumps(index).encode()
        text += b" " * (-(len(text) + 66) % ALIGNMENT) + b"\n"
        head = _digest(text) + b"\n" + text
        parts: list[bytes | memoryview] = [head]
        for array in chain(*arrays.values()):
            parts += [array.numpy().data, bytes(-array.nbytes % ALIGNMENT)]
        with closing(DiskCache(path.parent, MAX_BYTES, PATTERN)) as files, files.locked():
            for other in path.parent.glob(PATTERN):
                with suppress(OSError, ValueError, TypeError):
                    if not all(map(os.path.exists, _read_index(other)[0]["checkpoint"])):
                        other.unlink()  # the model was removed
            with suppress(OSError), opened(path) as file:
                if file.read(len(head)) == head:
                    return  # another process was faster
            files.write(path, parts)


def _read_index(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's index, and where its arrays begin. Raises: ValueError if it is corrupted."""
    with opened(path) as file:
        digest, text = file.readline(65), file.readline()
        if digest != _digest(text) + b"\n":
            raise ValueError("its index is corrupted")
        index = json.loads(text)
        if not isinstance(index, dict) or not all(isinstance(index.get(key), kind) for key, kind in _INDEX.items()):
            raise ValueError(f"its index must have {', '.join(_INDEX)}")
        return index, file.tell()


def _digest(*contents: bytes) -> bytes:
    return hashlib.sha256(b"\0".join(contents)).hexdigest().encode()


def _made_from(version: str, more: bytes) -> str:
    """Return a digest of all that decides the bytes of packed arrays. version: the checkpoint's. more: what else decides."""
    here = Path(__file__).parent
    package = here.parents[1]
    paths = [path for name in ("formats", "quantization") for path in (package / "features" / name).glob("*.py")]
    paths += [*(package / "loading").rglob("*.py"), package / "features" / "distributed" / "sharding.py"]
    paths += [package / "features" / "training" / "stored.py", *here.glob("*.py"), *here.glob("*.cpp"), *here.glob("*.h")]
    what = version, native.find_target(), has_tiles(), torch.__version__, torch.backends.cpu.get_cpu_capability()
    return _digest(repr(what).encode(), more, *(path.read_bytes() for path in sorted(paths))).decode()


def _checksum(arrays: Arrays) -> str:
    """Return a digest of the sums of all pages of 4,096 bytes, as integers of 8 bytes."""
    digest = hashlib.sha256()
    with one_torch_thread():  # memory limits it, and two threads would wait for each other at each array
        for array in chain(*arrays.values()):
            words = array.view(torch.int64)
            end = len(words) // 512 * 512
            digest.update(torch.cat((words[:end].view(-1, 512).sum(1), words[end:])).numpy().data)
    return digest.hexdigest()
