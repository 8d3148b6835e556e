"""A rank above 0: it loads its part of the model, and carries out rank 0's commands until rank 0 closes the connection.

In: a config, then commands. Out: its part of the collectives, and a report if it fails. It has a model runner with
a KV cache, but no scheduler or tokenizer. LLM starts it as `python -m nanoinfer.features.distributed.worker`. Under torchrun it
runs inside LLM() (launch.py).
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from nanoinfer.build import make_adapters, make_executor, make_runtime
from nanoinfer.config import EngineConfig
from nanoinfer.errors import NanoinferError, first_line
from nanoinfer.features.disk_cache.block_files import store_of
from nanoinfer.features.distributed.communicator import Communicator, RankLostError
from nanoinfer.features.distributed.runner import FAILED, LOST, READY, serve, unpack
from nanoinfer.features.distributed.sharding import Shards
from nanoinfer.load import load

logger = logging.getLogger(__name__)


def run(
    connection: Connection,
    rank: int,
    device: str,
    open_store: Callable[[], dist.Store],
    *,
    is_one_machine: bool,
    shared_memory: int | None = None,
) -> None:
    """Work until rank 0 closes the connection. shared_memory: an inherited file descriptor. None: the ranks share no memory."""
    with suppress(EOFError, OSError):  # rank 0 has ended
        try:
            of_rank_0, num_threads, matmul_precision = unpack(connection.recv_bytes(), torch.device(device))
            torch.set_num_threads(num_threads)
            torch.set_float32_matmul_precision(matmul_precision)
            logging.getLogger("nanoinfer").setLevel(logging.ERROR)  # rank 0 logs the same
            config: EngineConfig = replace(of_rank_0, device=device)
            store = open_store()  # by which the ranks find each other. A failure is reported to rank 0, too
            connection.send((READY, ""))
            size = config.tensor_parallel_size
            communicator = Communicator(store, rank, size, torch.device(device), is_one_machine=is_one_machine)
            if shared_memory is not None:
                communicator.share_memory(shared_memory, lambda: None)  # rank 0 watches the others, and ends this process
            shards = Shards(communicator)
            loaded, weights = load(config, shards)
            model = loaded.model
            adapters = make_adapters(model, config, shards)
            if config.cache.prefix_cache_dir is not None:
                store_of(model, config, shards)  # only rank 0 has the store
            runtime = make_runtime(model, config, shards, weights, adapters)
            executor = make_executor(runtime, config)
            with runtime.in_step():
                serve(connection, executor.runner, executor.device, communicator)
        except EOFError:
            pass
        except RankLostError as error:
            connection.send((LOST, first_line(error)))
        except BaseException as error:
            if not isinstance(error, NanoinferError):
                logger.exception("a rank has failed")  # on this process's standard error
            connection.send((FAILED, f"{type(error).__name__}: {first_line(error)}"))


def _end_with_rank_0() -> None:
    """End this process, whatever it is doing, when rank 0 closes the pipe or ends."""
    os.read(0, 1)  # blocks, since nothing is written. (sys.stdin has a lock, which a thread must not hold when Python ends)
    os._exit(0)


def main() -> None:
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    rank, device, store_port, descriptor, *inherited = sys.argv[1:]
    open_store, memory = partial(dist.TCPStore, "127.0.0.1", int(store_port)), int(inherited[0]) if inherited else None
    run(Connection(int(descriptor)), int(rank), device, open_store, is_one_machine=True, shared_memory=memory)


if __name__ == "__main__":
    main()
