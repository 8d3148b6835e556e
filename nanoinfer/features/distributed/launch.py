"""Start the ranks of LLM(tensor_parallel_size=N), or join those that torchrun has started.

In: an EngineConfig. Out, on rank 0: LeadingShards, connected. Ranks above 0 work in this call until rank 0 ends, and exit.

    LLM() alone       rank 0 is this process. It starts the others on this machine, and connects to each by a socket
    under torchrun    every process runs the same script up to LLM(). torchrun's store has their addresses
"""

import json
import os
import secrets
import socket
import sys
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener

import torch
import torch.distributed as dist

from nanoinfer.config import EngineConfig
from nanoinfer.errors import InvalidValueError, UnsupportedError
from nanoinfer.features.distributed import worker
from nanoinfer.features.distributed.communicator import Communicator, create_shared_memory
from nanoinfer.features.distributed.runner import LeadingShards, Workers
from nanoinfer.features.distributed.sharding import check_shards
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.config_json import read_config
from nanoinfer.loading.devices import resolve_device, resolve_dtype
from nanoinfer.system.helper_process import start_python
from nanoinfer.system.process import log_once

_ADDRESS_KEY = "nanoinfer/address"  # key in torchrun's store -> the address of rank 0
_has_joined = False  # whether this process has joined torchrun's ranks


def start(config: EngineConfig) -> tuple[EngineConfig, LeadingShards]:
    """Start or join the ranks, and connect them. Nothing is loaded yet.

    Returns the engine's config with this rank's device, and the shards of rank 0. Ranks above 0 do not return.
    """
    if not dist.is_available() or os.name != "posix":
        raise UnsupportedError(
            f"tensor_parallel_size={config.tensor_parallel_size} requires Linux or macOS, and a torch with torch.distributed; "
            "leave it out"
        )
    is_under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])) if is_under_torchrun else 0
    devices = _devices(config, local_rank, 1 if is_under_torchrun else config.tensor_parallel_size)
    workers, store, of_workers, memory = _join(config, devices[0]) if is_under_torchrun else _spawn(config, devices)
    size, device = config.tensor_parallel_size, torch.device(devices[0])
    with workers.watched():
        workers.send((of_workers, torch.get_num_threads(), torch.get_float32_matmul_precision()))
        workers.wait_until_ready()
        communicator = Communicator(store, 0, size, device, is_one_machine=not is_under_torchrun)
        if memory is not None:
            communicator.share_memory(memory, workers.check)
            os.close(memory)
    return replace(config, device=devices[0]), LeadingShards(communicator, workers)


def _devices(config: EngineConfig, first: int, num: int) -> list[str]:
    """Return the devices of this machine's ranks from `first` on."""
    if resolve_device(config.device).type == "cpu":
        return ["cpu"] * num
    if config.device not in ("auto", "cuda"):
        raise UnsupportedError(
            f"device={config.device!r} names one GPU, and tensor_parallel_size={config.tensor_parallel_size} uses several; "
            "use device='cuda', and CUDA_VISIBLE_DEVICES to choose them"
        )
    if first + num > torch.cuda.device_count():
        raise InvalidValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but torch sees {torch.cuda.device_count()} GPUs; "
            "each rank requires its own"
        )
    return [f"cuda:{index}" for index in range(first, first + num)]


def _spawn(config: EngineConfig, devices: list[str]) -> tuple[Workers, dist.Store, EngineConfig, int | None]:
    """Start ranks 1, 2 and so on as child processes. The last result is the ranks' shared memory, or None."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_workers = _config_of_workers(config, devices[0])
    memory = create_shared_memory(len(devices)) if devices[0] == "cpu" else None
    inherited = [] if memory is None else [memory]
    connections, processes = [], []
    for rank, device in enumerate(devices[1:], start=1):
        ours, theirs = Pipe()
        descriptors = [theirs.fileno(), *inherited]
        processes.append(start_python("-m", worker.__name__, rank, device, store.port, *descriptors, pass_fds=descriptors))
        theirs.close()
        connections.append(ours)
    return Workers(connections, processes), store, of_workers, memory


def _join(config: EngineConfig, device: str) -> tuple[Workers, dist.Store, EngineConfig, None]:
    """Join torchrun's ranks. Rank 0 listens at an address that it writes to the store. Other ranks exit with status 0."""
    global _has_joined
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != config.tensor_parallel_size:
        raise InvalidValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but torchrun has started {size} processes (WORLD_SIZE); "
            "make the two numbers equal"
        )
    if _has_joined:
        raise UnsupportedError(
            "under torchrun a script may make one LLM with tensor_parallel_size: the other ranks serve the first LLM; "
            "start this script without torchrun, or one job per LLM"
        )
    _has_joined = True
    store, _, _ = next(dist.rendezvous("env://"))
    store = dist.PrefixStore("nanoinfer", store)
    if rank:
        address = json.loads(store.get(_ADDRESS_KEY))
        connection = Client((address["host"], address["port"]), authkey=bytes.fromhex(address["key"]))
        connection.send(rank)
        worker.run(connection, rank, device, lambda: store, is_one_machine=False)
        sys.exit(0)
    of_workers = _config_of_workers(config, device)
    host, key = os.environ["MASTER_ADDR"], secrets.token_bytes(32)
    connections: dict[int, Connection] = {}
    with Listener((host, 0), backlog=size, authkey=key) as listener:
        address = {"host": host, "port": listener.address[1], "key": key.hex()}
        store.set(_ADDRESS_KEY, json.dumps(address))
        while len(connections) < size - 1:
            connection = listener.accept()
            with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:  # TCP sends small messages at once
                duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections[connection.recv()] = connection
    return Workers([connections[rank] for rank in range(1, size)], []), store, of_workers, None


def _config_of_workers(config: EngineConfig, device: str) -> EngineConfig:
    """Return the workers' config, after checks that need no weights. The model's files are found, and downloaded if needed.

    torch's threads are divided among the ranks, unless OMP_NUM_THREADS says how many a rank has.
    """
    checkpoint = Checkpoint.open(config.model, config.revision)
    check_shards(*read_config(checkpoint), config.tensor_parallel_size)
    dtype = resolve_dtype("bfloat16" if config.quantization else config.dtype, checkpoint, torch.device(device))
    size = config.tensor_parallel_size
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))
        log_once(f"torch computes in {torch.get_num_threads()} threads, as does each of {size} ranks")
    return replace(
        config,
        model=str(checkpoint.path),
        revision=None,
        tokenizer=None,
        skip_tokenizer_init=True,
        calibration=None,  # rank 0 reads the text
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        tracer=None,
        stages=None,
        logits_processors=(),
        scheduler=replace(config.scheduler, scheduler_cls=None),
        cache=replace(config.cache, block_manager_cls=None),
        speculative=config.speculative and replace(config.speculative, method="ngram", model=None),  # for the number of rows
    )
