"""A device that computes in the host's memory and is as strict as a GPU, so that the GPU's engine runs without one.

    with simulated_device.engine_may_use_it():
        llm = LLM(path, device="sim")

In: torch's operations and Triton's launches. Out: their results, and DeviceError where a GPU would fail or give another result.
It is torch's backend for the devices of others, renamed for the whole process, so `install` is for a process that ends with the
test.

A tensor of the device holds a tensor on the CPU, its memory. The device

    refuses operations whose tensors are on different devices, except copies and single numbers
    notes in `waits` each place where the host waits for it: a value that the host reads, a copy from memory that is not pinned
    lets a copy to pinned memory arrive when the host waits for an event after it, and not before
    fills new memory with NaN, or with a huge integer
    captures graphs (Graph), which replay what was launched, on the same memory, with the same numbers
    counts the bytes of its tensors, of Device.total_bytes
"""

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.interpreter import InterpretedFunction

from nanoinfer.attention import base
from nanoinfer.attention.triton import TritonBackend
from nanoinfer.fast.cuda.graphs import CUDACapture
from nanoinfer.loading import devices
from tests.helpers import triton_interpreter  # noqa: F401

NAME = "sim"

aten = torch.ops.aten
SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}  # how often torch calls them depends on references
# Operations whose result, or the size of their result, the host reads.
READS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount", "unique_dim", "_unique2"),
    *("unique_consecutive", "repeat_interleave.Tensor", "item"),
}


class DeviceError(AssertionError):
    """What a GPU cannot do, or would do with another result. No RuntimeError, so that nothing takes it for a lack of memory."""


class Memory:
    """The memory of a tensor and of its views."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage, self.num_resized, self.data_ptr = storage, 0, storage.data_ptr
        self._counted = [0]  # bytes
        self._count()
        weakref.finalize(self, lambda counted: device.take(-counted.pop()), self._counted)

    def nbytes(self) -> int:
        return self.storage.nbytes()

    def resize_(self, num_bytes: int) -> None:
        """As torch.UntypedStorage.resize_. The new memory is elsewhere."""
        self.storage.resize_(num_bytes)
        torch.empty(0, dtype=torch.uint8).set_(self.storage).fill_(255)  # NaN
        self.num_resized += 1
        self._count()

    def _count(self) -> None:
        device.take(self.nbytes() - self._counted[0])
        self._counted[0] = self.nbytes()


class SimulatedTensor(Tensor):
    """A tensor of the device. inner: the numbers, on the CPU. memory: shared with the views of the same storage."""

    inner: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> "SimulatedTensor":
        with torch.inference_mode(False):  # torch gives views of weights a version, which tensors of that mode do not have
            tensor = Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
                device=f"{NAME}:0",
            )  # fmt: skip
        tensor.inner, tensor.memory = inner, memory
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        parts = operation.decompose(*args, **kwargs)  # NotImplemented: the operation has kernels of its own
        return device.execute(operation, args, kwargs) if parts is NotImplemented else parts

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.memory

    def __repr__(self) -> str:
        return f"SimulatedTensor({self.inner!r})"


class Device:
    """The state of the device.

    Attributes:
        allocated, peak: the bytes of all tensors, and the most since `peak` was reset.
        waits: where the host waited for the device, with the line of the package, except for waits for an event.
        num_synchronized: how often the host waited for an event.
        launched: how often the host launched each operation and kernel, except in replays. Views launch nothing.
        on_the_way: copies to pinned memory that no event has shown to have arrived: the target, and its numbers.
        graph: the graph that is being captured, or whose replay is being compared.
    """

    total_bytes = 2**27

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self.waits: list[str] = []
        self.num_synchronized = 0
        self.launched: Counter[str] = Counter()
        self.on_the_way: list[tuple[Tensor, Tensor]] = []
        self.pinned: dict[int, weakref.ref[Tensor]] = {}
        self.graph: Graph | None = None

    def reset_counts(self) -> None:
        self.waits, self.num_synchronized, self.launched = [], 0, Counter()

    def take(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    # ---- operations

    def execute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch."""
        self._check(operation, args, kwargs)
        if self.graph is not None and operation not in SAME:
            return self.graph.launch(operation, args, kwargs)
        result = self.compute(operation, args, kwargs)
        given = {leaf.memory for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, SimulatedTensor)}
        is_view = not written_by(operation, args, kwargs) and all(
            leaf.memory in given for leaf in tree_flatten(result)[0] if isinstance(leaf, SimulatedTensor) and leaf.numel()
        )
        if not is_view and not operation.__name__.startswith(("empty", "new_empty")):
            self.launched[operation.__name__] += 1
        return result

    def launch(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a kernel of Triton, whose arguments may be tensors of the device only. kwargs: the grid and the options."""
        if any(isinstance(arg, Tensor) and not isinstance(arg, SimulatedTensor) for arg in args):
            raise DeviceError(f"{kernel.__name__} got a tensor of the CPU: {place()}")
        if self.graph is not None:
            self.graph.launch(kernel, args, kwargs)
        else:
            self.launched[kernel.__name__] += 1
            run_kernel(kernel, tree_map(inner_of, args), kwargs)

    def compute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the tensors inside."""
        if operation is aten.copy_.default:
            return self._copy(*args, **kwargs)
        result = on_inner(operation, tree_map(inner_of, args), tree_map(inner_of, kwargs))
        return result if is_for_host(kwargs) else self.wrap(result, args, kwargs)

    def wrap(self, result: Any, args: Any, kwargs: Any) -> Any:
        """Wrap what an operation returned: an argument itself, a view of one, or new memory."""
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, SimulatedTensor)]

        def wrapped(inner: Any) -> Any:
            if not isinstance(inner, Tensor):
                return inner
            same_memory = [tensor for tensor in given if tensor.memory.storage.data_ptr() == inner.untyped_storage().data_ptr()]
            for tensor in given:
                if tensor.inner is inner:
                    assert tensor.shape == inner.shape, "an operation has changed the size of its argument"
                    return tensor
            memory = same_memory[0].memory if same_memory and inner.nbytes else Memory(inner.untyped_storage())
            return SimulatedTensor(inner, memory)

        return tree_map(wrapped, result)

    def _check(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise DeviceError for tensors of different devices, and note where the host waits."""
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)]
        others = [tensor for tensor in tensors if not isinstance(tensor, SimulatedTensor) and tensor.ndim]
        if here and others and operation is not aten.copy_.default:
            shapes = [tuple(tensor.shape) for tensor in others]
            raise DeviceError(f"{operation} got tensors of the device and of the CPU, {shapes}: {place()}")
        name = operation.__name__.removesuffix(".default")
        masks = name.startswith(("index.", "index_put")) and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if masks or name in READS or name.partition(".")[0] in READS:
            self.wait(name)
        elif operation is aten.copy_.default and isinstance(args[0], SimulatedTensor) != isinstance(args[1], SimulatedTensor):
            host = args[1] if isinstance(args[0], SimulatedTensor) else args[0]
            is_queued = self.is_pinned(host) and (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if not is_queued and host.ndim:
                self.wait("a copy from or to memory that is not pinned")
        elif here and is_for_host(kwargs):
            self.wait("a copy to the CPU")

    def wait(self, what: str) -> None:
        """Note that the host waits for all earlier work of the device."""
        if self.graph is not None:
            raise DeviceError(f"the host waits while a graph is captured ({what}): {place()}")
        self.waits.append(f"{what}: {place()}")
        self.arrive(self.on_the_way)

    # ---- copies

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned[tensor.untyped_storage().data_ptr()] = weakref.ref(tensor)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        reference = self.pinned.get(tensor.untyped_storage().data_ptr())
        return reference is not None and reference() is not None

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, SimulatedTensor):
            target.inner.copy_(inner_of(source))
        elif non_blocking and self.is_pinned(target):
            poison(target)
            self.on_the_way.append((target, source.inner.clone()))
        else:
            target.copy_(inner_of(source))
        return target

    def arrive(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Finish copies to pinned memory."""
        with torch.inference_mode():  # as the package made the memory
            self._finish(copies)

    def _finish(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        for copy in list(copies):
            if any(copy is other for other in self.on_the_way):
                self.on_the_way = [other for other in self.on_the_way if other is not copy]
                copy[0].copy_(copy[1])


@dataclass(eq=False)
class Launched:
    """An operation or a kernel of a graph. outputs: what it returned, with its memory, which belongs to the graph."""

    function: Any
    args: Any
    kwargs: Any
    outputs: Any


@dataclass(frozen=True)
class Pointer:
    """A tensor among a graph's arguments: where its memory is and what it looks like. It does not keep the memory."""

    memory: "weakref.ref[Memory]"
    num_resized: int
    address: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: SimulatedTensor) -> "Pointer":
        inner = tensor.inner
        layout = (inner.storage_offset(), tuple(inner.shape), inner.stride())
        return cls(weakref.ref(tensor.memory), tensor.memory.num_resized, inner.data_ptr(), inner.dtype, *layout)

    def tensor(self) -> Tensor:
        memory = self.memory()
        if memory is None or memory.num_resized != self.num_resized:
            raise DeviceError(f"a graph reads memory that was freed after the capture: a tensor {self.shape} of {self.dtype}")
        return torch.empty(0, dtype=self.dtype).set_(memory.storage, self.offset, self.shape, self.stride)


@dataclass(eq=False)
class Graph:
    """As torch.cuda.CUDAGraph: what was launched during the capture, with its pointers and its numbers.

    A capture launches nothing. A replay first runs the captured function again, which must launch the same functions with the
    same pointers and numbers, or the graph would compute something else than the function. Nothing is computed meanwhile. Then
    it launches what was captured, and finds no tensor but those at the captured addresses.

    run: the captured function, which is compared. None: it is not known.
    """

    launched: list[Launched] = field(default_factory=list)
    own: set[Memory] = field(default_factory=set)  # the graph's pool
    run: Callable[[], Tensor] | None = None
    num_compared: int | None = None  # launches of a replay that were compared. None: a capture
    num_replays: int = 0

    def pool(self) -> "Graph":
        return self

    def launch(self, function: Any, args: Any, kwargs: Any) -> Any:
        pointers = tree_map(pointer_or_number, (args, kwargs))
        is_kernel = isinstance(function, InterpretedFunction)
        written = [] if is_kernel else written_by(function, args, kwargs)
        if self.num_compared is not None:
            outputs = self._compare(function, *pointers)
            return written[0] if written else tree_map(another_of, outputs)
        outputs = None
        if any(tensor.memory not in self.own for tensor in written):  # older than the graph
            outputs = written[0]
        elif not is_kernel:
            outputs = device.compute(function, args, kwargs)
            given = {leaf.memory for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, SimulatedTensor)}
            for output in tree_flatten(outputs)[0]:
                if isinstance(output, SimulatedTensor) and output.memory not in given:
                    self.own.add(output.memory)
        self.launched.append(Launched(function, *pointers, outputs))
        return outputs

    def replay(self) -> None:
        self.num_replays += 1
        if self.run is not None:
            self.num_compared = 0
            with capturing(self):
                self.run()
            if self.num_compared != len(self.launched):
                raise DeviceError(f"a graph has {len(self.launched)} launches, and its function {self.num_compared}")
        for launched in self.launched:
            args, kwargs = tree_map(
                lambda value: value.tensor() if isinstance(value, Pointer) else value, (launched.args, launched.kwargs)
            )
            if isinstance(launched.function, InterpretedFunction):
                run_kernel(launched.function, args, kwargs)
                continue
            results = on_inner(launched.function, args, kwargs)
            for output, result in zip(tree_flatten(launched.outputs)[0], tree_flatten(results)[0], strict=True):
                if isinstance(output, SimulatedTensor) and result.data_ptr() != output.inner.data_ptr():
                    output.inner.copy_(result)

    def _compare(self, function: Any, args: Any, kwargs: Any) -> Any:
        assert self.num_compared is not None
        if self.num_compared == len(self.launched):
            raise DeviceError(f"a graph has {len(self.launched)} launches, and its function more: {function} {place()}")
        captured = self.launched[self.num_compared]
        self.num_compared += 1
        if tree_map(comparable, (captured.function, captured.args, captured.kwargs)) != tree_map(
            comparable, (function, args, kwargs)
        ):
            raise DeviceError(
                f"a graph launches {captured.function} with {captured.args} {captured.kwargs}, and its function would now "
                f"launch {function} with {args} {kwargs}: {place()}"
            )
        return captured.outputs


def inner_of(value: Any) -> Any:
    return value.inner if isinstance(value, SimulatedTensor) else value


def is_for_host(kwargs: dict[str, Any]) -> bool:
    """Whether an operation makes a tensor of the CPU."""
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"


def another_of(value: Any) -> Any:
    """Another tensor object with the same memory, because torch lets an operation return a view once."""
    return SimulatedTensor(value.inner, value.memory) if isinstance(value, SimulatedTensor) else value


def pointer_or_number(value: Any) -> Any:
    """What a graph keeps of an argument. A single number on the CPU is read at once."""
    if isinstance(value, SimulatedTensor):
        return Pointer.of(value)
    return value.item() if isinstance(value, Tensor) else value


def comparable(value: Any) -> Any:
    """NaN as a text, because it does not equal itself."""
    return "NaN" if isinstance(value, float) and value != value else value


def written_by(operation: Any, args: Any, kwargs: Any) -> list[SimulatedTensor]:
    """The arguments into which an operation writes."""
    given = dict(zip((argument.name for argument in operation._schema.arguments), args, strict=False)) | kwargs
    arguments = [argument for argument in operation._schema.arguments if argument.name in given]
    return [given[one.name] for one in arguments if one.alias_info is not None and one.alias_info.is_write]


def on_inner(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on tensors of the CPU. New memory that it does not fill is poisoned."""
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if kwargs.get("device") is not None:
        kwargs["device"] = "cpu"
    result = operation(*args, **kwargs)
    if operation.__name__.startswith(("empty", "new_empty")):
        poison(result)
    return result


def poison(tensor: Tensor) -> None:
    """Fill memory that nothing has written yet."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


def run_kernel(kernel: Any, args: Any, kwargs: Any) -> None:
    """Run a kernel of Triton on tensors of the CPU, in Triton's interpreter."""
    interpret(kernel, *args, **kwargs)


ROOT = Path(__file__).parents[2]  # whose name may be nanoinfer, too


def place() -> str:
    """The innermost line of the package or of a test that is running."""
    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.name != Path(__file__).name and any(path.is_relative_to(ROOT / one) for one in ("nanoinfer", "tests")):
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        self._before, self._time = list(device.on_the_way), time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end._time - self._time)

    def synchronize(self) -> None:
        device.num_synchronized += 1
        device.arrive(self._before)


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        pass


@contextmanager
def capturing(graph: Graph) -> Iterator[None]:
    """Let a graph capture or compare what is launched. What was captured has no result until it is replayed."""
    device.graph = graph
    try:
        yield
    finally:
        device.graph = None
    if graph.num_compared is None:
        for output in tree_flatten([launched.outputs for launched in graph.launched])[0]:
            if isinstance(output, SimulatedTensor) and output.memory in graph.own:
                poison(output.inner)


def compared_capture(capture: CUDACapture, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """As CUDACapture.__call__, with a replay that is compared."""
    replay, out = capture_of_package(capture, run)
    replay.__self__.run = run
    return replay, out


capture_of_package = CUDACapture.__call__
interpret = InterpretedFunction.run
device = Device()
stream = Stream()


def _graph(graph: Graph, pool: object = None, stream: object = None, capture_error_mode: str = "global") -> Any:
    if capture_error_mode != "thread_local":
        raise DeviceError("another thread that uses the device would end the capture")
    return capturing(graph)


def _reset_peak(of: object = None) -> None:
    device.peak = device.allocated


MODULE = SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    current_device=lambda: 0,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    device_count=lambda: 1,
    get_device_capability=lambda of=None: (8, 0),
    set_device=lambda of: None,
    device=lambda of: ExitStack(),
    synchronize=lambda of=None: device.wait("synchronize"),
    empty_cache=lambda: None,
    mem_get_info=lambda of=None: (device.total_bytes - device.allocated, device.total_bytes),
    memory_allocated=lambda of=None: device.allocated,
    memory_reserved=lambda of=None: device.allocated,
    max_memory_allocated=lambda of=None: device.peak,
    reset_peak_memory_stats=_reset_peak,
    Event=Event,
    Stream=Stream,
    current_stream=lambda of=None: stream,
    stream=lambda of: ExitStack(),
    CUDAGraph=Graph,
    graph=_graph,
    is_current_stream_capturing=lambda: device.graph is not None,
)


def install() -> None:
    """Make the device known to torch, in this process and for good."""
    _setup_privateuseone_for_python_backend(NAME, MODULE)
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda operation, *args, **kwargs: device.execute(operation, args, kwargs), "PrivateUse1")
    # torch.tensor() copies with the key of tensor classes switched off, and finds no fallback for this operation. The others
    # would make an empty tensor, and change its size.
    direct = torch.library.Library("aten", "IMPL")
    for operation in (aten.copy_.default, aten.arange.default, aten.arange.start, aten.arange.start_step):
        run = partial(lambda operation, *args, **kwargs: device.execute(operation, args, kwargs), operation)
        direct.impl(operation._name.removeprefix("aten::"), run, "PrivateUse1")
    install.kept = library, direct

    empty = torch.empty

    def empty_or_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        if pin_memory:
            poison(tensor)
            device.pin(tensor)
        return tensor

    torch.empty = empty_or_pinned
    Tensor.pin_memory = lambda tensor: device.pin(tensor.clone())
    InterpretedFunction.run = lambda kernel, *args, grid, warmup, **kwargs: device.launch(
        kernel, args, {"grid": grid, "warmup": warmup, **kwargs}
    )


@contextmanager
def engine_may_use_it() -> Iterator[None]:
    """Let LLM(device="sim") use the device, with the backends of a GPU."""
    with (
        mock.patch.object(devices, "DEVICE_TYPES", (*devices.DEVICE_TYPES, NAME)),
        mock.patch.dict(base.PREFERRED, {NAME: base.PREFERRED["cuda"]}),
        mock.patch.object(CUDACapture, "__call__", compared_capture),
        mock.patch.object(TritonBackend, "unsupported_reason", return_value=None),  # triton_interpreter has bfloat16
    ):
        yield
