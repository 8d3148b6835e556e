"""A rank above 0: loads its part of the model, and does what rank 0 tells it to, until rank 0 closes the connection.

In: Settings, then commands. Out: nothing but its part of the collectives, and a report if it fails. It has a model runner with
a KV cache, and no scheduler or tokenizer. LLM starts it as `python -m nanoinfer.distributed.worker`. Under torchrun it
runs inside LLM(), see launch.py.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from nanoinfer.config import EngineConfig
from nanoinfer.distributed.communicator import ProcessGroupCommunicator, RankLostError
from nanoinfer.distributed.runner import serve
from nanoinfer.distributed.sharding import Shards
from nanoinfer.distributed.workers import FAILED, LOST, READY
from nanoinfer.engine.factory import make_executor, make_parts
from nanoinfer.errors import NanoinferError, first_line
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_configured

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """What rank 0 tells a worker first."""

    rank: int
    size: int
    config: EngineConfig  # of the engine, with this rank's device
    store_port: int  # of the store on this machine, by which the ranks find each other. 0: torchrun has one
    has_shared_memory: bool  # whether this process has inherited a descriptor for it
    num_threads: int
    matmul_precision: str  # torch's, which must be the same on all ranks


def run(connection: Connection, open_store: Callable[[Settings], dist.Store], device: str | None = None) -> None:
    """Be a worker until rank 0 closes the connection. device: of this rank, where rank 0 does not know it."""
    with suppress(EOFError, OSError):  # rank 0 has ended
        try:
            _run(connection, open_store, device)
        except EOFError:
            pass
        except RankLostError as error:
            connection.send((LOST, first_line(error)))
        except BaseException as error:
            if not isinstance(error, NanoinferError):
                logger.exception("a rank has failed")  # on this process's standard error
            connection.send((FAILED, f"{type(error).__name__}: {first_line(error)}"))


def _run(connection: Connection, open_store: Callable[[Settings], dist.Store], device: str | None) -> None:
    settings: Settings = connection.recv()
    torch.set_num_threads(settings.num_threads)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    logging.getLogger("nanoinfer").setLevel(logging.ERROR)  # rank 0 logs the same
    config = replace(settings.config, device=device or settings.config.device)
    connection.send((READY, ""))
    communicator = ProcessGroupCommunicator(
        open_store(settings), settings.rank, settings.size, torch.device(config.device), is_one_machine=settings.store_port > 0
    )
    if settings.has_shared_memory:
        communicator.share_memory(int(sys.argv[2]), lambda: None)  # rank 0 looks after the others, and ends this process
    shards = Shards(communicator)
    model, _ = load_configured(Checkpoint.open(config.model), config, shards)
    executor = make_executor(make_parts(model, config, shards), config, shards=shards)
    serve(connection, executor.runner, executor.device)


def _end_with_rank_0() -> None:
    """End this process, whatever it is doing, when rank 0 closes the pipe or ends."""
    os.read(0, 1)  # nothing is ever written. (sys.stdin has a lock, which a thread may not hold when Python ends)
    os._exit(0)


def main() -> None:
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    run(Connection(int(sys.argv[1])), lambda settings: dist.TCPStore("127.0.0.1", settings.store_port, is_master=False))


if __name__ == "__main__":
    main()
