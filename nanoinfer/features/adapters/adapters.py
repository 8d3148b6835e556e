"""Keep the adapters that an engine knows, make those of a step active, and note which rows use which.

In: LoRARequests, from any thread, and the steps, from the engine's thread. Out: checked Adapters, and the AdapterMapping that
the linear layers read. An adapter that does not fit is refused when a request names it, so that it cannot make a step fail.

An adapter is kept in memory from the first request that names it. Before the forward pass of a step, AdapterRunner makes the
adapters of its rows active: each gets one of max_loras indices, that of the least recently used adapter. The layers read the
index of each row (layers.py), and nothing else changes in the step. `limits` keeps the scheduler from planning more adapters
than there are indices, and the digest in cache_salt separates their blocks.

With several ranks, rank 0 alone reads files. A step that makes an adapter active sends it to the others, which use the same
index. After a failure rank 0 sends adapters again. A rank keeps the part of A or of B that belongs to its part of a layer.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.engine.inputs import InputProcessor, PreparedRequest, RequestFeature, unread
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError, shown
from nanoinfer.execution.forward_batch import ExtraRuns, ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner, RunnerWrapper
from nanoinfer.execution.runtime import Runtime
from nanoinfer.features.adapters.layers import AdaptedLinear, AdapterMapping, shape_of
from nanoinfer.features.adapters.lora import LowRankUpdate, check_fit, read_adapter
from nanoinfer.features.adapters.request import LoRARequest
from nanoinfer.features.quantization.rounding import QuantizedLinear
from nanoinfer.system.process import available_cpu_memory

if TYPE_CHECKING:
    from nanoinfer.features.distributed.sharding import Shards


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that fits the model."""

    request: LoRARequest
    updates: dict[str, LowRankUpdate]  # by the path of a linear layer, in the model's dtype. On rank 0 they are on the CPU
    digest: str  # of everything in the adapter that changes an answer

    def added_to(self, prepared: PreparedRequest) -> PreparedRequest:
        """Return the request with this adapter, whose digest separates its cached prefixes from others."""
        salt = f"{self.digest}{prepared.cache_salt or ''}"
        return replace(prepared, extras={**prepared.extras, "adapter": self}, cache_salt=salt)


class Adapters(RequestFeature):
    """The adapters of one model, whose linear layers it changes in place, before fast/ compiles them.

    An LM head and the experts of a mixture cannot be adapted.

    shards: the ranks that share the model. None: this process has the whole model.
    Raises: InvalidValueError if max_loras active adapters take more memory than is free.
    """

    def __init__(self, model: Any, max_loras: int, max_rank: int, shards: "Shards | None" = None) -> None:
        self._rules, self._shards = model.weight_rules, shards
        self._mapping = AdapterMapping(max_loras, max_rank)
        self.limits = {"adapter": max_loras}
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self.layers: dict[str, AdaptedLinear] = {}  # by the path of a linear layer that can be adapted
        self._shapes = {  # the shapes of whole layers, also with several ranks
            path: shape_of(linear)
            for path, linear in (model if shards is None else shards.whole).named_modules()
            if isinstance(linear, nn.Linear | QuantizedLinear) and not self._has_few_rows(path)
        }
        # A row layer is inside an AllReduced, which the whole model lacks.
        modules = {path.replace(".module", ""): module for path, module in model.named_modules()}
        # The bytes of max_loras adapters. On a CPU they count the files' content (rank 0), a rank's part, and the kernels' copy
        # of it.
        is_cpu, reads = weight.device.type == "cpu", shards is None or shards.rank == 0
        shapes = list(self._shapes.values()) if is_cpu and reads else []
        for path in self._shapes:
            module = modules[path]
            assert isinstance(module, nn.Linear | QuantizedLinear)
            self.layers[path] = AdaptedLinear(module, self._mapping)
            shapes += [shape_of(module)] * (2 if is_cpu and shards is not None else 1)
        self.num_bytes = max_loras * max_rank * sum(map(sum, shapes)) * weight.dtype.itemsize
        free = available_cpu_memory() if is_cpu else torch.get_device_module(weight.device).mem_get_info(weight.device)[0]
        if self.num_bytes > free:
            raise InvalidValueError(
                f"max_loras={max_loras} adapters of max_lora_rank={max_rank} take {self.num_bytes} bytes, "
                f"but {free} are free on {weight.device}; lower max_loras or max_lora_rank"
            )
        self._known: dict[int, Adapter] = {}  # lora_int_id -> adapter
        self._indices: OrderedDict[str, int] = OrderedDict()  # digest -> adapter index, the least recently used first

    def prepare(self, prepared: PreparedRequest, options: dict[str, object]) -> PreparedRequest:
        request = options.pop("lora_request", None)
        return prepared if request is None else self.get(request).added_to(prepared)

    def get(self, request: object) -> Adapter:
        """Return the adapter of a request. It is read and checked if its id is new.

        Raises:
            InvalidTypeError, InvalidValueError: not a LoRARequest, an id that another adapter has, or a rank that is too high.
            UnsupportedError, CheckpointError, CheckpointNotFoundError, WeightsError: as LLM(lora=...) does.
        """
        if not isinstance(request, LoRARequest):
            raise InvalidTypeError(f"lora_request must be a LoRARequest (nanoinfer.lora.request), got {shown(request)}")
        adapter = self._known.get(request.lora_int_id)
        if adapter is None:  # reading takes long, so no lock is held. If two threads read the same adapter, the first counts
            adapter = self._known.setdefault(request.lora_int_id, self._read(request))
        if adapter.request != request:
            raise InvalidValueError(
                f"lora_int_id {request.lora_int_id} is {adapter.request}, got {request}; give each adapter an id of its own, "
                "or remove the first adapter"
            )
        return adapter

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter. Running requests keep using it. Returns whether the id was known."""
        return self._known.pop(lora_int_id, None) is not None

    def _has_few_rows(self, path: str) -> bool:
        """Whether a linear layer is the LM head or an expert's, which compute only some of the rows."""
        return f"{path}.weight" == self._rules.head or ".experts." in path

    def _read(self, request: LoRARequest) -> Adapter:
        updates, digest = {}, hashlib.sha256()
        for module, update in sorted(read_adapter(request.lora_path).items()):
            path = module.removeprefix(self._rules.prefix)
            if self._has_few_rows(path):
                raise UnsupportedError(
                    f"the adapter {shown(request.lora_path)} changes {shown(module)}, which an adapter of a request cannot: "
                    "the head and experts are the same for all; use LLM(lora=path)"
                )
            check_fit(request.lora_path, module, update, self._shapes.get(path))
            if len(update.a) > self._mapping.max_rank:
                raise InvalidValueError(
                    f"the adapter {shown(request.lora_path)} has the rank {len(update.a)}, and max_lora_rank is "
                    f"{self._mapping.max_rank}; load the model with max_lora_rank={len(update.a)}"
                )
            a, b = (matrix.to(self._dtype, copy=True) for matrix in (update.a, update.b))  # copied, because the file may change
            updates[path] = update = replace(update, a=a, b=b)
            digest.update(f"{path} {update.scale} {a.shape}".encode())
            for matrix in (a, b):
                digest.update(matrix.contiguous().view(torch.uint8).numpy().data)
        return Adapter(request, updates, digest.hexdigest())

    def join(self, runtime: Runtime) -> Runtime:
        """Return the model's runtime with a runner that makes adapters active."""
        hint = f", lower max_loras or max_lora_rank (the adapters take {self.num_bytes} bytes)"
        wrap = partial(AdapterRunner, adapters=self)
        has_memory = any(layer.add is not None for layer in self.layers.values())  # of kernels on a GPU
        reserved = 0 if has_memory else self.num_bytes
        return replace(runtime, reserved_bytes=reserved, reserved_hint=hint, wrappers=(*runtime.wrappers, wrap))

    def begin_step(self, runs: ExtraRuns, num_rows: int) -> ExtraRuns:
        """Make the adapters of a step active, and note its rows.

        Returns: the runs for the other ranks, with only the digest of an adapter that is already active.
        """
        indices, for_others = [-1] * num_rows, []
        used = {digest_of(extras) for extras, _, _ in runs if "adapter" in extras}
        for extras, start, stop in runs:
            if (adapter := extras.get("adapter")) is None:
                for_others.append((extras, start, stop))
                continue
            digest = digest_of(extras)
            for_others.append(({**extras, "adapter": digest if digest in self._indices else adapter}, start, stop))
            if isinstance(adapter, Adapter) and digest not in self._indices:
                try:
                    self._activate(adapter, used)
                except BaseException:
                    self._indices.clear()  # the other ranks do not get this step, so later steps send them all adapters again
                    raise
            self._indices.move_to_end(digest)
            indices[start:stop] = [self._indices[digest]] * (stop - start)
        self._mapping.set(indices, self._device)
        return tuple(for_others)

    def _activate(self, adapter: Adapter, used: set[str]) -> None:
        if len(self._indices) == self._mapping.max_loras:
            del self._indices[next(other for other in self._indices if other not in used)]
        index = min(set(range(self._mapping.max_loras)) - set(self._indices.values()))
        for path, layer in self.layers.items():
            update = adapter.updates.get(path)
            if update is not None and self._shards is not None:
                update = self._shards.shard_of_update(path, update)
            if update is not None:
                update = replace(update, a=update.a.to(self._device), b=update.b.to(self._device))
            layer.put(index, update)
        self._indices[adapter.digest] = index


def digest_of(extras: Mapping[str, object]) -> str:
    adapter = extras["adapter"]
    return adapter.digest if isinstance(adapter, Adapter) else str(adapter)


def adapter_of(inputs: InputProcessor, lora_request: LoRARequest) -> Adapter:
    """Return the adapter of a request. Raises: InvalidValueError without enable_lora, the errors of Adapters.get."""
    for feature in inputs.features:
        if isinstance(feature, Adapters):
            return feature.get(lora_request)
    raise unread("lora_request", lora_request)


def remove_adapter(inputs: InputProcessor, lora_int_id: int) -> bool:
    """Forget an adapter. Running requests keep using it. Returns whether the id was known."""
    return any(feature.remove(lora_int_id) for feature in inputs.features if isinstance(feature, Adapters))


class AdapterRunner(RunnerWrapper):
    """Makes the adapters of a step active, and passes the rows that use them to the layers."""

    def __init__(self, inner: ModelRunner, adapters: Adapters) -> None:
        super().__init__(inner)
        self.adapters = adapters

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        for_others = self.adapters.begin_step(batch.extras, len(batch.input_ids))
        return self.inner.forward(replace(batch, extras=for_others))
