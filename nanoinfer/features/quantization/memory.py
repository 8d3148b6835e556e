"""Compare a model's weights with a CPU's memory, before they are read, and read the text by which they are rounded.

In: a model whose weights are in the checkpoint (fast/stored.py), and an EngineConfig. Out: an error, or a hint in the log.
"""

import logging

import torch
from torch import nn

from nanoinfer.config import EngineConfig
from nanoinfer.errors import InvalidValueError, first_line, shown
from nanoinfer.features.quantization.rounding import num_linear_bytes, num_weight_bytes
from nanoinfer.loading.devices import compare_memory
from nanoinfer.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_CALIBRATION_TOKENS = 2048


def compare(model: nn.Module, dtype: torch.dtype, config: EngineConfig, num_stored_bits: float, num_ranks: int) -> None:
    """Refuse weights that this machine cannot hold, and log what `quantization` would save for a quantised file.

    num_stored_bits: those of a weight in the files, on average. num_ranks: the processes that load at the same time.
    """
    needed = sum(weight.numel() for weight in model.parameters()) * dtype.itemsize
    runs_in = config.quantization or str(dtype).removeprefix("torch.")
    if config.quantization:
        needed = num_weight_bytes(model, config.quantization)
    elif num_stored_bits < 12:
        int8, int4 = (num_weight_bytes(model, name) for name in ("int8", "int4"))
        if needed - int4 >= 10**8:
            text = "%.1f bits per weight run in %s and take %.1f GB; quantization='int8' takes %.1f GB, 'int4' %.1f GB"
            logger.warning(text, num_stored_bits, runs_in, needed / 1e9, int8 / 1e9, int4 / 1e9)
    hint = "use " + ("a smaller model" if runs_in == "int4" else "quantization='int4' or a smaller model")
    text = f"the weights take {needed / 1e9:.1f} GB in {runs_in}"
    if config.bits_of_copy:
        needed += (copy := num_linear_bytes(model, config.bits_of_copy))
        text += f", and their copy in {config.bits_of_copy} bits, which drafts, {copy / 1e9:.1f} GB"
        hint = f"leave out speculative_config, or {hint}"
    compare_memory(needed, text, hint, num_ranks)


def read_calibration(path: str, tokenizer: Tokenizer | None) -> list[int]:
    """Return the first tokens of a text. Raises: InvalidValueError if there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            if tokenizer and (ids := tokenizer.encode(file.read(32 * MAX_CALIBRATION_TOKENS))):
                return ids[:MAX_CALIBRATION_TOKENS]
        reason = "it has no tokens"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)  # without the path
    raise InvalidValueError(f"calibration must be a text file in UTF-8, got {shown(path)}: {reason}; leave it out")
