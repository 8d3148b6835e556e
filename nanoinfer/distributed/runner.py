"""The model runner of several ranks: rank 0 sends each call to the workers, and all ranks make it together.

In: on rank 0, a ForwardBatch. Out: hidden rows, and on rank 0 logits. A step's batch is a few kilobytes of integers.
"""

from dataclasses import fields
from multiprocessing.connection import Connection
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.attention.base import AttentionMetadata
from nanoinfer.devices.transfer import on_device
from nanoinfer.distributed.workers import Workers
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner

FORWARD, LOGITS = "forward", "logits"


class LeadingRunner(ModelRunner):
    """Rank 0's runner. Every call runs on the workers as well."""

    def __init__(self, runner: ModelRunner, workers: Workers) -> None:
        super().__init__(runner.model, runner.cache, runner.backend, runner.graphs)
        self._workers = workers

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "num_tokens hidden"]:
        with self._workers.together(FORWARD, pack(batch)):
            return super().forward(batch)

    def compute_logits(
        self, hidden: Float[Tensor, "num_tokens hidden"], rows: Int[Tensor, " num_rows"] | slice
    ) -> Float[Tensor, "num_rows vocab"]:
        with self._workers.together(LOGITS, rows if isinstance(rows, slice) else rows.cpu().numpy()):
            return super().compute_logits(hidden, rows)


@torch.inference_mode()
def serve(connection: Connection, runner: ModelRunner, device: torch.device) -> None:
    """Make rank 0's calls on a worker. Raises: EOFError when rank 0 closes the connection."""
    hidden = torch.empty(0)
    while True:
        command, argument = connection.recv()
        if command == FORWARD:
            hidden = runner.forward(unpack(argument, device))
        elif command == LOGITS:
            rows = argument if isinstance(argument, slice) else on_device(torch.from_numpy(argument), device)
            runner.compute_logits(hidden, rows)


def pack(batch: ForwardBatch) -> dict[str, Any]:
    """The fields of a batch and of its attention metadata, with arrays in place of tensors."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "attention"}
    values |= {field.name: getattr(batch.attention, field.name) for field in fields(batch.attention)}
    return {name: value.cpu().numpy() if isinstance(value, Tensor) else value for name, value in values.items()}


def unpack(packed: dict[str, Any], device: torch.device) -> ForwardBatch:
    """The batch that pack() was given, on this rank's device."""
    values: dict[str, Any] = {
        name: on_device(torch.from_numpy(value), device) if hasattr(value, "dtype") else value for name, value in packed.items()
    }
    attention = AttentionMetadata(**{field.name: values.pop(field.name) for field in fields(AttentionMetadata)})
    return ForwardBatch(attention=attention, **values)
