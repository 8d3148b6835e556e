"""The model runner of several ranks: rank 0 sends each call to the workers, and all ranks make it together.

In: on rank 0, a ForwardBatch. Out: hidden rows, logits or tokens, on every rank. A step's batch is a few kilobytes of integers.
"""

from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.devices.transfer import on_device
from nanoinfer.distributed import split_sampling
from nanoinfer.distributed.workers import Workers
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.execution.model_runner import ModelRunner
from nanoinfer.models.parallel_layers import VocabularyHead
from nanoinfer.sampling.batch import SamplingBatch

FORWARD, LOGITS, SAMPLE = "forward", "logits", "sample"


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
        with self._workers.together(LOGITS, pack(rows)):
            return super().compute_logits(hidden, rows)

    def sample(
        self, hidden: Float[Tensor, "num_tokens hidden"], rows: Int[Tensor, " num_rows"], batch: SamplingBatch
    ) -> Int[Tensor, " num_rows"] | None:
        """The sampler's tokens, drawn by all ranks, if no row needs more than its largest logits and a sum of weights."""
        if batch.changes_logits or batch.groups.logprobs or not len(rows):
            return None
        few = SamplingBatch(columns=batch.columns, groups=batch.groups, u=batch.u)
        with self._workers.together(SAMPLE, pack(rows), pack(few)):
            return sample_together(self, hidden, rows, batch)


def sample_together(
    runner: ModelRunner, hidden: Float[Tensor, "num_tokens hidden"], rows: Int[Tensor, " num_rows"], batch: SamplingBatch
) -> Int[Tensor, " num_rows"]:
    """One rank's part of LeadingRunner.sample."""
    model: Any = runner.model
    head: VocabularyHead = model.lm_head
    return split_sampling.sample(head.local(hidden[rows]).float(), batch, head.vocab_size, head.communicator)


@torch.inference_mode()
def serve(connection: Connection, runner: ModelRunner, device: torch.device) -> None:
    """Make rank 0's calls on a worker. Raises: EOFError when rank 0 closes the connection."""
    hidden = torch.empty(0)
    while True:
        command, *packed = connection.recv()
        arguments = [unpack(argument, device) for argument in packed]
        if command == FORWARD:
            hidden = runner.forward(*arguments)
        elif command == LOGITS:
            runner.compute_logits(hidden, *arguments)
        elif command == SAMPLE:
            sample_together(runner, hidden, *arguments)


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
