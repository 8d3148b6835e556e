"""A checkpoint's name -> a model ready to run on its device, and what belongs to it.

In: an EngineConfig. Out: the model with its weights, quantised, fused or packed as the device likes it; tokenizer; EOS ids.
"""

from dataclasses import dataclass

import torch

from nanoinfer import linear, models
from nanoinfer.checkpoint import Checkpoint, locate
from nanoinfer.config import EngineConfig
from nanoinfer.errors import CheckpointNotFoundError, UnsupportedError
from nanoinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """num_parameters: as the checkpoint has them; a layer that is packed or quantised is no parameter any more.

    has_independent_rows: whether the rows of its linear layers have the same bits in any batch, on this machine.
    tokenizer: None if there is none; then the model takes token ids.
    """

    checkpoint: Checkpoint
    model: models.Model
    num_parameters: int
    has_independent_rows: bool
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]


def load(config: EngineConfig) -> Loaded:
    """Raises: CheckpointNotFoundError, CheckpointError, WeightsError, UnsupportedError."""
    device = models.resolve_device(config.device)
    if config.quantization and device.type != "cpu":
        raise UnsupportedError(f"quantization='int8' runs on a CPU only, got device {str(device)!r}; leave it out")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels of our own are launched on the current one
    checkpoint = Checkpoint.open(config.model, config.revision)
    model = models.load(checkpoint, "bfloat16" if config.quantization else config.dtype, device)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    if device.type == "cuda" and not config.enforce_eager:
        models.fuse(model)
    has_independent_rows = False
    if device.type == "cpu":
        report = linear.quantize(model) if config.quantization else linear.pack(model)
        has_independent_rows = report.are_rows_independent
    tokenizer_path = locate(config.tokenizer, with_weights=False) if config.tokenizer is not None else checkpoint.path
    tokenizer = Tokenizer.load(tokenizer_path)
    if config.tokenizer is not None and tokenizer is None:
        raise CheckpointNotFoundError(f"{tokenizer_path} holds no tokenizer files, such as tokenizer.json")
    eos_token_ids = checkpoint.eos_token_ids
    if not eos_token_ids and tokenizer is not None and tokenizer.hf.eos_token_id is not None:
        eos_token_ids = frozenset([tokenizer.hf.eos_token_id])
    return Loaded(checkpoint, model, num_parameters, has_independent_rows, tokenizer, eos_token_ids)
