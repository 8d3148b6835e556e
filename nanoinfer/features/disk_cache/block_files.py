"""Files with the contents of cache blocks, so that a restarted engine finds the prefixes of its predecessor.

In: a runner, whose cache holds the blocks and states, and ids from stored_blocks.py. Out: a file per block or state, named by
the key and the number of the cache group:

    "nanokv2\\n" | key, 32 bytes | group | SHA-256 of all the rest, 32 bytes | keys and values as in the cache, or a state

A thread writes them (system/disk_cache.py), and the engine waits for it only in close(). A file is read as a whole, and
accepted only if its length, key and checksum are right. It is not mapped, because a mapped file ends this process by SIGBUS if
another process truncates it, or its disk is gone. Nothing is unpickled.

With several ranks, rank 0 writes the files, each with the parts of all ranks. So a block is found on all ranks or on none.
"""

import hashlib
import inspect
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoinfer.attention.kv_cache import KVCache
from nanoinfer.config import EngineConfig
from nanoinfer.errors import EngineDeadError, InvalidValueError, UnsupportedError, first_line, starting_threads
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.local_executor import LocalExecutor
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.features.disk_cache.stored_blocks import Entry
from nanoinfer.features.hybrid.block_manager import HybridBlockManager
from nanoinfer.features.hybrid.cache import HybridCache, states_of
from nanoinfer.features.hybrid.tables import tables_of
from nanoinfer.features.quantization.rounding import QuantizedLinear
from nanoinfer.features.training.loaded_weights import Shards
from nanoinfer.features.training.stored import pieces_of
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence, StepPlan
from nanoinfer.system.disk_cache import DiskCache, opened, private_folder, stamp
from nanoinfer.system.worker_threads import ThreadPool

logger = logging.getLogger(__name__)

MAGIC = b"nanokv2\n"
HEADER_BYTES = len(MAGIC) + 65
PATTERN = "[0-9a-f]" * 66 + ".kv"  # of the names
WAITING_BYTES = 2**28  # the most bytes of copied blocks that wait to be written. Further blocks are not kept


class BlockFiles:
    """A BlockStore whose blocks are files in a folder."""

    def __init__(self, runner: ModelRunner, folder: str, max_bytes: int, fingerprint: bytes, max_tokens_per_step: int) -> None:
        """max_bytes: the most bytes of all files in the folder. Raises: InvalidValueError if the folder cannot be used."""
        self.fingerprint, self.max_tokens_per_step = fingerprint, max_tokens_per_step
        self.counts = {"external_prefix_cache_hits": 0, "prefix_cache_read_bytes": 0, "prefix_cache_written_bytes": 0}
        self._runner = runner
        num_ranks = 1 if (shards := runner.weights.shards) is None else shards.size
        by_group = tensors_of(runner.cache)
        self._num_bytes = [HEADER_BYTES + num_ranks * sum(tensor[0].nbytes for tensor in tensors) for tensors in by_group]
        self._max_bytes = max_bytes
        if max_bytes < max(self._num_bytes):
            what = "a block" if states_of(runner.cache) is None else "a block or a state"
            raise InvalidValueError(
                f"prefix_cache_size must be at least {max(self._num_bytes)} bytes, which {what} takes, got {max_bytes}"
            )
        self._folder = private_folder(folder, "prefix_cache_dir")
        self._files = DiskCache(self._folder, max_bytes, PATTERN)
        self._pid, self._is_closed, self._last_error = os.getpid(), False, ""
        self._waiting: queue.Queue[Entry | None] = queue.Queue(max(2, WAITING_BYTES // max(self._num_bytes)))
        self._copies: dict[Entry, Callable[[], Tensor]] = {}  # entries that wait or are being written
        self._thread = threading.Thread(target=self._write_all, name="nanoinfer block files", daemon=True)
        with starting_threads():
            self._thread.start()

    @property
    def is_open(self) -> bool:
        return not self._is_closed and os.getpid() == self._pid  # a forked process has no thread that writes

    # ---- called by the engine

    def max_entries(self, group: int) -> int:
        return self._max_bytes // self._num_bytes[group]

    def has(self, entry: Entry) -> bool:
        return entry in self._copies or self._has(entry)

    def find(self, entry: Entry) -> Tensor | None:
        path, num_bytes = self._path(entry), self._num_bytes[entry[1]]
        if (copy := self._copies.get(entry)) is not None:
            return copy()
        try:
            with opened(path) as file:
                data = np.fromfile(file, np.uint8, num_bytes + 1)
            if len(data) != num_bytes:
                raise ValueError(f"it has not {num_bytes} bytes")
            content = torch.from_numpy(data[HEADER_BYTES:])
            if data[:HEADER_BYTES].tobytes() != header(entry, content):
                raise ValueError("its key or its checksum is wrong")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("the block file %s is corrupted, and is removed: %s", path, first_line(error))
            self.discard(entry)
            return None
        self.counts["prefix_cache_read_bytes"] += num_bytes
        return content

    def fill(self, group: int, block: int, content: Tensor) -> None:
        self._runner.on_all_ranks(write_block, group, block, content)

    def touch(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            with suppress(OSError):
                stamp(self._path(entry))

    def keep(self, entry: Entry, block: int, *, wait: bool = False) -> None:
        if self._has(entry):
            self.touch((entry,))
        elif (wait or not self._waiting.full()) and entry not in self._copies:
            with suppress(EngineDeadError):  # if a rank has ended, the next step raises
                self._copies[entry] = self._copy_of(entry[1], block)
                self._waiting.put(entry)

    def discard(self, entry: Entry) -> None:
        self._copies.pop(entry, None)
        with suppress(OSError):
            self._path(entry).unlink()

    def close(self) -> None:
        if self.is_open:
            self._is_closed = True
            self._waiting.put(None)
            self._thread.join()
            del self._runner  # frees the memory of the cache, and the other ranks

    def _copy_of(self, group: int, block: int) -> Callable[[], Tensor]:
        """Begin to copy a block or a state to the CPU. Returns a function that waits for the copy and returns it."""
        content = self._runner.on_all_ranks(read_block, group, block)
        if content.device.type == "cpu":
            return lambda: content
        copy = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True).copy_(content, non_blocking=True)
        gpu = torch.get_device_module(content.device)
        copied = gpu.Event()
        copied.record(gpu.current_stream(content.device))

        def wait() -> Tensor:
            copied.synchronize()
            return copy

        return wait

    def _has(self, entry: Entry) -> bool:
        with suppress(OSError):
            return self._path(entry).stat().st_size == self._num_bytes[entry[1]]  # a machine that lost power leaves wrong sizes
        return False

    def _path(self, entry: Entry) -> Path:
        return self._folder / f"{name_of(entry).hex()}.kv"

    # ---- in the thread

    def _write_all(self) -> None:
        self._try(self._files.shrink)  # a process that was killed may have left too much
        while (entry := self._waiting.get()) is not None:
            if (copy := self._copies.get(entry)) is not None:
                self._try(self._write, entry, copy)
                if self._copies.pop(entry, None) is None:
                    self.discard(entry)  # another process may have removed the file
        self._files.close()

    def _try(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function while no other process writes. If it fails, log each reason once, and go on."""
        try:
            with self._files.locked():
                function(*arguments)
        except Exception as error:
            if (reason := f"{type(error).__name__}: {first_line(error)}") != self._last_error:
                logger.warning("blocks cannot be kept in %s: %s", self._folder, reason)
            self._last_error = reason

    def _write(self, entry: Entry, copy: Callable[[], Tensor]) -> None:
        content = copy()
        if not self._has(entry):  # another process may have been faster
            self._files.write(self._path(entry), [header(entry, content), content.numpy().data])
            self.counts["prefix_cache_written_bytes"] += self._num_bytes[entry[1]]


def name_of(entry: Entry) -> bytes:
    key, group = entry
    return key + bytes([group])


def header(entry: Entry, content: Tensor) -> bytes:
    """Return the first bytes of an entry's file."""
    start = MAGIC + name_of(entry)
    return start + _sha256(content, start)


# ---- blocks and states as bytes, on all ranks


def tensors_of(cache: KVCache) -> list[list[Tensor]]:
    """Return, for each cache group, the tensors whose first axis counts its blocks, or its state slots."""
    states = states_of(cache)
    num_groups = cache.num_groups if isinstance(cache, HybridCache) else 1
    return [cache.pages] * num_groups + ([] if states is None else [states.tensors])


def read_block(runner: ModelRunner, group: int, block: int) -> Tensor:
    """Copy the bytes of a block or a state: first those of rank 0, then those of rank 1, and so on."""
    content = torch.cat([tensor[block].reshape(-1).view(torch.uint8) for tensor in tensors_of(runner.cache)[group]])
    return content if (shards := runner.weights.shards) is None else shards.gather(content).flatten()


def write_block(runner: ModelRunner, group: int, block: int, content: Tensor) -> None:
    """Write this rank's share of what read_block returned."""
    if (shards := runner.weights.shards) is not None:
        content = content.view(shards.size, -1)[shards.rank]
    for tensor in tensors_of(runner.cache)[group]:
        page = tensor[block]
        page.copy_(content[: page.nbytes].view(page.dtype).view(page.shape))
        content = content[page.nbytes :]


# ---- the fingerprint: all that decides the bits of a block


def store_of(model: Any, config: EngineConfig, shards: Shards | None = None) -> Callable[[LocalExecutor], BlockFiles]:
    """Return a function that makes a store, given the engine's executor. All ranks call it, and rank 0 has the store.

    Call it before the model's modules are replaced, because it reads their weights.

    Raises:
        InvalidValueError, UnsupportedError: for what the files do not support, now or when the function is called.
    """
    if sys.platform == "win32":
        raise UnsupportedError("prefix_cache_dir needs the file locks of Linux or macOS; leave it out")
    names, weights = zip(*model.named_parameters(), strict=True)
    rounded = [module.weight for module in model.modules() if isinstance(module, QuantizedLinear)]  # they are not parameters
    integers = [tensor for weight in rounded for tensor in (weight.integers, weight.scales, weight.zeros)]
    with ThreadPool() as pool:
        digests = [*pool.map(_sha256, [*weights, *integers])]
    # Every file of this package counts, and the file of a user's model, because authors forget to count versions up.
    files = [path for path in sorted(Path(__file__).parents[2].rglob("*")) if path.suffix in (".py", ".cpp", ".h")]
    with suppress(OSError, TypeError):  # a class defined in a notebook has no file
        files.append(Path(inspect.getfile(type(model))))
    digests += [hashlib.sha256(path.read_bytes()).digest() for path in files]
    what = (names, type(model), model.config, config.enforce_eager, config.quantization, config.scheduler.chunk_grid)
    identity = hashlib.sha256(b"".join([repr(what).encode(), *digests])).digest()
    if shards is not None:
        identity = shards.gather(torch.tensor([*identity], device=weights[0].device)).cpu().numpy().tobytes()
    return partial(_make_store, config=config, identity=identity)


@torch.inference_mode()
def _make_store(executor: LocalExecutor, config: EngineConfig, identity: bytes) -> BlockFiles:
    info, runner = executor.info, executor.runner
    # The keys and values of a fixed prompt, whose bits change with the processor, compiler, library or kernel.
    num, is_invariant = min(info.block_size, info.max_model_len), config.scheduler.batch_invariant
    seq = Sequence("probe", [i % info.vocab_size for i in range(num)], SamplingParams(), seed=0, max_num_tokens=num)
    manager = HybridBlockManager(info.num_blocks, info.block_size, windows=info.windows, num_state_slots=info.num_state_slots)
    manager.allocate(seq, num)
    plan = StepPlan((ScheduledSequence(seq, num),))
    runner.forward(ForwardBatch.build(plan, info.block_size, executor.device))
    pages, places = runner.cache.pages, [table[0] for table in manager.tables(seq)]
    places += [] if states_of(runner.cache) is None else [tables_of(seq).state_writes[num]]
    probed = [runner.on_all_ranks(read_block, group, place) for group, place in enumerate(places)]
    threads = None if executor.batch_independent else torch.get_num_threads()
    what = (info.device, info.attention_backend, pages[0].shape[1:], pages[0].dtype, is_invariant, threads, torch.__version__)
    digest = hashlib.sha256(b"".join([repr(what).encode(), identity, *map(_sha256, probed)])).digest()
    folder = config.cache.prefix_cache_dir
    assert folder is not None
    return BlockFiles(runner, folder, config.cache.prefix_cache_size, digest, config.scheduler.max_num_batched_tokens)


def _sha256(tensor: Tensor, start: bytes = b"") -> bytes:
    """Return the digest of `start` followed by a tensor's bytes."""
    digest = hashlib.sha256(start)
    for piece in pieces_of(tensor):
        digest.update(piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
