"""Choose the device and the dtype of a model, and refuse weights that the device's memory cannot hold.

In: the names in an EngineConfig, and a Checkpoint. Out: torch's device and dtype.
"""

import logging

import torch
from torch import nn

from nanoinfer.config import DTYPES
from nanoinfer.errors import InvalidValueError, OutOfMemoryError, UnsupportedError, shown
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.weights import dtype_of
from nanoinfer.system.process import available_cpu_memory

logger = logging.getLogger(__name__)

DEVICE_TYPES = ("cpu", "cuda")  # torch's names


def resolve_device(name: str) -> torch.device:
    """Return the device of that name, which must exist. "auto" is a GPU if there is any."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidValueError(f"device must be auto, cpu, cuda or cuda:N, got {shown(name)}") from error
    if device.type not in DEVICE_TYPES or (device.type == "cpu" and device.index):
        raise InvalidValueError(f"device must be auto, cpu, cuda or cuda:N, got {shown(name)}")
    if device.type != "cpu" and (device.index or 0) >= (num_gpus := torch.get_device_module(device).device_count()):
        raise InvalidValueError(f"device is {shown(name)}, but torch sees {num_gpus} GPUs; use 'cpu'")
    return device


def cpu_has_fast_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def gpu_has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bf16, which torch emulates before sm_80 (Ampere)."""
    capability: tuple[int, int] = torch.get_device_module(device).get_device_capability(device)
    return capability >= (8, 0)


def default_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which a checkpoint of a dtype runs: its own, unless the device is slow at it."""
    if device.type != "cpu":
        return torch.float16 if dtype is torch.bfloat16 and not gpu_has_bf16(device) else dtype
    return dtype if dtype is torch.bfloat16 and cpu_has_fast_bf16() else torch.float32


def resolve_dtype(dtype: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Return the dtype in which a checkpoint runs, for one of config.DTYPES."""
    if dtype not in DTYPES:
        raise InvalidValueError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(dtype)}")
    own = {"float64": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if DTYPES[dtype] != "auto":
        if DTYPES[dtype] == "bfloat16" and device.type != "cpu" and not gpu_has_bf16(device):
            raise UnsupportedError(
                f"dtype={dtype!r} requires a GPU of compute capability 8.0 or higher, got "
                f"{torch.get_device_module(device).get_device_name(device)}; use dtype='float16', or leave dtype out"
            )
        return own[DTYPES[dtype]]
    name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")  # the names of newer and older transformers
    resolved = own.get(str(name).removeprefix("torch.")) if name else dtype_of(checkpoint.open_weights())
    if resolved is None:
        raise UnsupportedError(
            f"the checkpoint's dtype is {shown(name)}; {', '.join(own)} are supported. Pass dtype= to choose one"
        )
    if (chosen := default_dtype(resolved, device)) is not resolved:
        text = "the checkpoint is %s, which this %s is slow at: using %s (dtype= chooses)"
        logger.info(text, resolved, "CPU" if device.type == "cpu" else "GPU", str(chosen).removeprefix("torch."))
    return chosen


def check_memory(model: nn.Module, dtype: torch.dtype, device: torch.device, num_processes: int = 1) -> None:
    """Refuse weights that exceed a device's free memory, before they are read.

    num_processes: the processes that load on this machine at the same time. Raises: OutOfMemoryError.
    """
    needed = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    text = f"the weights take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}"
    more = "" if device.type == "cpu" else ", or tensor_parallel_size= for several GPUs"
    check_bytes(needed, device, text, f"use quantization='int4' or a smaller model{more}", num_processes)


def check_bytes(needed: int, device: torch.device, text: str, hint: str, num_processes: int = 1) -> None:
    """Refuse what a device cannot hold. A CPU's system would kill the process while it is read."""
    if device.type == "cpu":
        available, where = available_cpu_memory() // num_processes, "of memory are available"
    else:
        available, where = torch.get_device_module(device).mem_get_info(device)[0], f"are free on {device}"
    if needed > available:
        raise OutOfMemoryError(f"{text}, and {available / 1e9:.1f} GB {where}; {hint}")
