"""Attention over the newest tokens only, for layers of qwen.py: some layers of Qwen2 and Qwen3 with use_sliding_window, all of
Mistral, and the sliding layers of Gemma 3 and gpt-oss.

Source: https://arxiv.org/abs/2310.06825 (Mistral).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanoinfer.attention.base import Attend
from nanoinfer.errors import CheckpointError, UnsupportedError, shown
from nanoinfer.models.qwen import QwenAttention, QwenConfig, shared_fields
from nanoinfer.models.registry import ConfigJson


def layer_windows(config: ConfigJson, length: int, kinds: Sequence[str] | None) -> tuple[int | None, ...]:
    """Return the window of each layer. None: full attention. (): no layer needs a window.

    length: the most tokens of a text, to which YaRN may stretch the model. kinds: the kind of each layer. None: as layer_types
    of config.json says, or for older Qwen2 max_window_layers, the first layer that slides. Raises: the errors of from_hf.
    """
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window", 4096)
    if kinds is None:
        kinds, slides = config.get("layer_types"), config.get("use_sliding_window", False)
        if not kinds:
            if not slides or window is None:
                return ()
            num_full = config.get("max_window_layers", 28)
            kinds = ["full_attention" if layer < num_full else "sliding_attention" for layer in range(num_layers)]
        elif not slides and "sliding_attention" in kinds:
            raise CheckpointError(f"use_sliding_window must be true, because some layers slide, got {shown(slides)}")
    if all(kind == "full_attention" for kind in kinds):
        return ()
    if len(kinds) != num_layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise UnsupportedError(
            f"layer_types must name full_attention or sliding_attention (sliding-window attention) for each of {num_layers} "
            f"layers, got {shown(kinds)}; other kinds are not supported"
        )
    if type(window) is not int or window < 1:
        raise CheckpointError(f"sliding_window must be a number >= 1, because some layers slide, got {shown(window)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds) if window < length else ()


def windowed_fields(config: ConfigJson, kinds: Sequence[str] | None) -> dict[str, Any]:
    """Return shared_fields, and the windows of layers of these kinds. Raises: the errors of from_hf."""
    fields = shared_fields(config)
    return fields | {"layer_windows": layer_windows(config, fields["max_position_embeddings"], kinds)}


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(QwenConfig):
    layer_windows: tuple[int | None, ...] = ()  # the window of each layer. (): all layers have full attention

    def make_attention(self, layer: int) -> QwenAttention:
        return WindowedAttention(self, layer)


class WindowedAttention(QwenAttention):
    def __init__(self, config: WindowedConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.window = config.layer_windows[layer] if config.layer_windows else None

    def attention(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.layer, q, k, v) if self.window is None else attend(self.layer, q, k, v, window=self.window)
