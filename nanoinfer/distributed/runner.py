"""What rank 0 does together with the workers: it sends them each call, and all ranks make it.

In: on rank 0, a ForwardBatch, or rows for the LM head. Out: hidden rows, logits or tokens, on every rank. A step's batch is a
few kilobytes of integers.
"""

from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.distributed import split_sampling
from nanoinfer.distributed.communicator import ProcessGroupCommunicator
from nanoinfer.distributed.sharding import Shards, VocabularyHead
from nanoinfer.distributed.workers import Workers
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.execution.parts import Parts
from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.routes import HeadRows, Route
from nanoinfer.system.transfer import on_device

FORWARD, LOGITS, SAMPLE = "forward", "logits", "sample"


class LeadingShards(Shards):
    """Rank 0's Shards: what its engine calls runs on the workers as well."""

    def __init__(self, communicator: ProcessGroupCommunicator, workers: Workers) -> None:
        super().__init__(communicator)
        self.communicator: ProcessGroupCommunicator = communicator
        self.workers = workers

    def connect(self, parts: Parts) -> Parts:
        routes = parts.routes
        if routes:  # without enforce_eager
            model: Any = parts.model
            routes = (SplitSampling(model.lm_head, self.workers), *routes)
        return replace(super().connect(parts), routes=routes, runner_class=partial(LeadingRunner, workers=self.workers))


@dataclass(eq=False)
class LeadingRunner(ModelRunner):
    """Rank 0's runner."""

    workers: Workers = field(kw_only=True)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        with self.workers.together(FORWARD, pack(batch)):
            return super().forward(batch)

    def head_rows(self, hidden: Float[Tensor, "num_tokens hidden"], rows: Int[Tensor, " num_rows"] | slice) -> HeadRows:
        """Select rows. The workers have the batch's logits_indices, and are sent a slice."""

        def head(selected: Tensor) -> Tensor:
            with self.workers.together(LOGITS, rows if isinstance(rows, slice) else None):
                return self.model.compute_logits(selected)

        return HeadRows(hidden[rows], head)


@dataclass(eq=False)
class SplitSampling(Route):
    """The route by which all ranks sample together, each from the logits of its own ids (split_sampling.py)."""

    head: VocabularyHead
    workers: Workers

    def try_sample(self, rows: HeadRows, batch: SamplingBatch) -> Int[Tensor, " num_rows"] | None:
        if not rows.is_raw:
            return None
        few = SamplingBatch(columns=batch.columns, groups=batch.groups, u=batch.u)
        with self.workers.together(SAMPLE, pack(few)):
            return split_sampling.sample(rows.hidden, few, self.head)


@torch.inference_mode()
def serve(connection: Connection, runner: ModelRunner, device: torch.device) -> None:
    """Make rank 0's calls on a worker. Raises: EOFError when rank 0 closes the connection."""
    model: Any = runner.model
    batch: Any = None
    hidden = torch.empty(0)
    while True:
        command, argument = connection.recv()
        if command == FORWARD:
            batch = unpack(argument, device)
            hidden = runner.forward(batch)
        elif command == LOGITS:
            model.compute_logits(hidden[batch.logits_indices if argument is None else argument])
        elif command == SAMPLE:
            split_sampling.sample(hidden[batch.logits_indices], unpack(argument, device), model.lm_head)


def pack(value: Any) -> Any:
    """Make a command's argument fit to be sent: arrays in place of tensors, whose memory torch would share."""
    if isinstance(value, Tensor):
        return value.cpu().numpy()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), {field.name: pack(getattr(value, field.name)) for field in fields(value)}
    return value


def unpack(packed: Any, device: torch.device) -> Any:
    """What pack() was given, with its tensors on this rank's device."""
    if isinstance(packed, np.ndarray):
        return on_device(torch.from_numpy(packed), device)
    if isinstance(packed, tuple) and packed and is_dataclass(packed[0]):
        dataclass, values = packed
        return dataclass(**{name: unpack(value, device) for name, value in values.items()})
    return packed
