"""CUDA tensors without CUDA or data, by torch's FakeTensorMode: tensors on different devices are refused, and waits are noted.

    with fake_cuda() as gpu:
        llm = LLM(path, device="cuda:0")
        llm.generate(...)
    gpu.waits           # ["sampler.read", ...]: where the host read a value of the device, or copied memory that is not pinned

An integer that the host reads is gpu.token_id, other numbers are 0. An operation whose result's shape depends on values is
refused. Triton's kernels do not run, but their tensors must be on the device. The device needs an index ("cuda:0"), because
torch without CUDA has no current device.
"""

import ctypes
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nanoinfer

PACKAGE = str(Path(nanoinfer.__file__).parent)
CUDA_INDEX, META_INDEX = 1, 14  # of c10::DeviceType
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)


class Waits(TorchDispatchMode):
    """Runs above FakeTensorMode, and notes each place where the host waits for the device."""

    def __init__(self):
        super().__init__()
        self.waits, self.token_id = [], 1
        self.pinned = []  # tensors whose copies do not wait. They are kept, so that no other gets the id of one

    def note(self):
        frame = sys._getframe(1)
        while not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        self.waits.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, first = kwargs or {}, args[0] if args else None
        if func in COPIES:
            source, device = (args[1], first.device) if func is aten.copy_.default else (first, kwargs.get("device"))
            if device is not None and source.device.type != torch.device(device).type:
                # From the device, only the sampler's copy to pinned memory is queued. The host reads it later.
                is_queued = source.is_cuda if func is aten.copy_.default else any(source is x for x in self.pinned)
                if source.numel() and not is_queued:
                    self.note()
                if func is aten.copy_.default:
                    return first
                return torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=device)
        is_on_device = any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs)))
        if not is_on_device and torch.device(kwargs.get("device") or "cpu").type != "cuda" and not kwargs.get("pin_memory"):
            with unset_fake_temporarily():  # tensors on the CPU have data
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.note()
            return first.dtype.is_floating_point * 0.0
        if func in (aten.index.Tensor, aten.index_put_.default) and first.is_cuda:
            for index in args[1]:
                if index is not None and not index.is_cuda:
                    self.note()
        if func.namespace == "aten" and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:  # it consists of other operations, as item and to do
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def tolist(self, tensor):
        if tensor.numel():
            self.note()
        value = False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else self.token_id

        def nested(shape):
            return [nested(shape[1:]) for _ in range(shape[0])] if shape else value

        return nested(tuple(tensor.shape))

    def pin(self, tensor):
        self.pinned.append(tensor.clone())
        return self.pinned[-1]


class Stream(nullcontext):
    """Also an event, a graph and the other contexts of torch.cuda."""

    def __init__(self, *args, **options):
        super().__init__()

    def nothing(self, *args):
        return 0

    record = synchronize = wait_stream = wait_event = query = pool = replay = nothing


def moved(module, device):
    """nn.Module.to for a device, which torch refuses to do with a FakeTensor that something else refers to."""
    device, by_id = torch.device(device), {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is not None and id(x) not in by_id:
                    new = torch.empty(x.shape, dtype=x.dtype, device=device)
                    by_id[id(x)] = x, nn.Parameter(new, requires_grad=False) if isinstance(x, nn.Parameter) else new
                if x is not None:
                    tensors[name] = by_id[id(x)][1]
    return module


def run_no_kernel(self, *args, grid, warmup, **kwargs):
    assert all(x.is_cuda for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), self.__name__


@contextmanager
def fake_cuda():
    """A GPU with 16 GiB, whose tensors have no data."""
    guards = (ctypes.c_void_p * 20).in_dll(
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "_ZN3c104impl26device_guard_impl_registryE"
    )
    gpu, guard_before = Waits(), guards[CUDA_INDEX]
    names = dict.fromkeys(("Event", "Stream", "CUDAGraph", "current_stream", "stream", "graph", "device"), Stream)
    nothing = ("set_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats")
    names |= dict.fromkeys((*nothing, "empty_cache", "synchronize"), lambda *args: 0)
    names |= {"device_count": lambda: 1, "mem_get_info": lambda *args: (2**34, 2**34)}
    with ExitStack() as stack:
        for name, double in names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, double))
        stack.enter_context(mock.patch.object(nn.Module, "to", moved))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor: gpu.pin(tensor)))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", lambda tensor: gpu.tolist(tensor)))
        from triton.runtime.interpreter import InterpretedFunction

        stack.enter_context(mock.patch.object(InterpretedFunction, "run", run_no_kernel))
        if guard_before is None:  # torch without CUDA cannot index a tensor of the device. Meta's guard does nothing
            guards[CUDA_INDEX] = guards[META_INDEX]
            stack.callback(guards.__setitem__, CUDA_INDEX, None)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu)
        yield gpu
