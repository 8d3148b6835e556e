"""What a step costs: the bytes and operations of its parts, from the sizes in a model's config.json.

In: config.json, and how many tokens a step computes after how many. Out: StepParts, and on a Hardware the seconds of the step.

A part takes at least max(bytes / bandwidth, operations / rate), and a step at least the sum over its parts, because a part
needs the result of the part before it. What is measured besides, such as Python's work, is added.
Source: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model", https://doi.org/10.1145/1498765.1498785

Split over ranks (tensor parallel), each rank has its share of every part, and two all-reduces a layer are added.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nanoinfer.attention.cache_sizes import NumberType
from nanoinfer.errors import CheckpointError, InvalidValueError, UnsupportedError, shown
from nanoinfer.features.hybrid.sizes import HybridSizes, kv_groups, largest_of
from nanoinfer.features.int8_cache.sizes import stored_in
from nanoinfer.loading.checkpoint import DEFAULT_MODEL, locate, read_json
from nanoinfer_lab.simulate.hardware import Hardware

ConfigJson = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A dtype: its name in torch, and the bytes of a number."""

    name: str
    itemsize: int


FORMATS = {name: NumberFormat(name, size) for name, size in {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}.items()}


@dataclass(frozen=True, slots=True)
class StepPart:
    """The least work of a part of a step: bytes read or written once, multiplications and additions."""

    name: str
    num_bytes: int
    num_operations: int

    def seconds(self, bandwidth: float, rate: float, overlap: float = 1.0) -> float:
        """Return how long the part takes.

        Args:
            bandwidth: bytes per second.
            rate: operations per second.
            overlap: the share of the shorter of reading and computing that runs beside the longer. 1: the least time.
        """
        reading_s, computing_s = self.num_bytes / bandwidth, self.num_operations / rate
        return max(reading_s, computing_s) + (1 - overlap) * min(reading_s, computing_s)


@dataclass(slots=True)
class StepWork:
    """What a step computes."""

    num_tokens: int = 0  # the tokens that it computes
    num_rows: int = 0  # the tokens whose logits it computes
    num_seqs: int = 0  # the sequences in the step
    num_keys: int = 0  # the keys that it reads, summed over the layers
    num_pairs: int = 0  # the pairs of a token and a token that it sees, summed over the layers


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """How large a model is, and what it keeps."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    dtype: str = "float32"  # the dtype of the checkpoint
    attention_weights: int  # the weights of all attention projections, and of the projections of layers with states
    mlp_weights: int  # the weights of all MLPs that every token passes, of routers, and of shared experts
    expert_weights: int = 0  # the weights of all experts
    num_experts: int = 1  # the experts of a layer. 1: the model has none
    num_experts_per_tok: int = 1  # the experts that a token passes in a layer
    table_weights: int = 0  # the weights of embeddings, which a token looks up, and of a head that shares none of them
    cache: HybridSizes  # what the layers keep for each token and each sequence

    @classmethod
    def of(cls, config: ConfigJson) -> "ModelSizes":
        """Read config.json of a family that the engine runs (docs/supported.md).

        Raises: CheckpointError: a size is missing.
        """
        try:
            return _sizes_of(config)
        except UnsupportedError:
            raise
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"config.json does not have the sizes of a text model ({error!r}); give the one of a model of docs/supported.md"
            ) from error

    @classmethod
    def named(cls, model: str | None) -> "ModelSizes":
        """Read the sizes of a model.

        Args:
            model: a config.json, a folder that has one, or a hub name. None: the bundled tiny-qwen3.

        Raises:
            CheckpointError: there is no such file or model, or as `of`.
            UnsupportedError: a GGUF file is given, or as `of`.
        """
        name = DEFAULT_MODEL if model is None else model
        path = Path(name) if Path(name).is_file() else locate(name, with_weights=False) / "config.json"
        if path.suffix == ".gguf":
            raise UnsupportedError(f"sizes are read from a config.json, got {name}; give the config.json of its model")
        return cls.of(read_json(path))

    @cached_property
    def _layers_of(self) -> tuple[tuple[int | None, int], ...]:
        """Windows, each with the number of layers that have it."""
        layers_of: Counter[int | None] = Counter()
        for group in self.cache.groups:
            layers_of[group.window] += len(group.layers)
        return tuple(layers_of.items())

    @property
    def num_weights(self) -> int:
        return self.attention_weights + self.mlp_weights + self.expert_weights + self.table_weights

    def num_weight_bytes(self, dtype: NumberFormat, weight_bits: int | None = None) -> int:
        """Return the bytes of all weights. weight_bits: the bits of the linear layers' weights. None: those of dtype."""
        bits = weight_bits or 8 * dtype.itemsize
        return (self.num_weights - self.table_weights) * bits // 8 + self.table_weights * dtype.itemsize

    def add(self, work: StepWork, num_new: int, context: int) -> None:
        """Add a sequence's next tokens to the work of a step, without a row of logits.

        Args:
            num_new: how many new tokens. Attention is causal: a token sees itself and the tokens before it.
            context: how many tokens the last of them sees.
        """
        work.num_tokens += num_new
        work.num_seqs += 1
        for window, num_layers in self._layers_of:
            width = context if window is None else min(window, context)
            work.num_keys += min(context, width + num_new - 1) * num_layers
            work.num_pairs += (_seen(context, width) - _seen(context - num_new, width)) * num_layers

    def add_decodes(self, work: StepWork, contexts: ListLike[int]) -> None:
        """Add a token of each of several sequences, as add does with num_new = 1."""
        work.num_tokens += len(contexts)
        work.num_seqs += len(contexts)
        for window, num_layers in self._layers_of:
            num_keys = sum(contexts) if window is None else sum(min(window, context) for context in contexts)
            work.num_keys += num_keys * num_layers
            work.num_pairs += num_keys * num_layers

    def grow(self, work: StepWork, starts: ListLike[int], num_steps: int) -> None:
        """Change the work of a decode step into that of the next step of the same sequences.

        Args:
            starts: how many tokens each sequence had computed before the first of these steps.
            num_steps: how many of these steps there were.
        """
        for window, num_layers in self._layers_of:
            num_growing = len(starts) if window is None else sum(start + num_steps < window for start in starts)
            work.num_keys += num_growing * num_layers
            work.num_pairs += num_growing * num_layers

    def parts(
        self, work: StepWork, dtype: NumberType, *, weight_bits: int | None = None, cache_dtype: NumberType | None = None
    ) -> tuple[StepPart, ...]:
        """Return a step's parts.

        The bytes of states, which some layers have instead of keys and values, count as attention. Their operations do not
        count. Of a layer's experts, those are read that tokens choose if they choose at random.

        Args:
            dtype: the dtype of weights and activations.
            weight_bits: the bits of the linear layers' weights. None: those of dtype.
            cache_dtype: the dtype of keys and values. None: dtype.
        """
        size, bits = dtype.itemsize, weight_bits or 8 * dtype.itemsize
        head, tokens = self.vocab_size * self.hidden_size, work.num_tokens
        share = self.num_experts_per_tok / self.num_experts
        mlp_read = self.mlp_weights + int(self.expert_weights * (1 - (1 - share) ** tokens))
        mlp_used = self.mlp_weights + int(self.expert_weights * share)
        token_bytes = stored_in(self.cache, cache_dtype or dtype).bytes_per_token(cache_dtype or dtype)
        kept = work.num_keys * token_bytes // self.cache.num_attention_layers + 2 * work.num_seqs * self.cache.bytes_per_state
        return (
            StepPart("embedding", tokens * self.hidden_size * size, 0),
            StepPart("attention projections", self.attention_weights * bits // 8, 2 * tokens * self.attention_weights),
            StepPart("MLP", mlp_read * bits // 8, 2 * tokens * mlp_used),
            StepPart("attention", kept, 4 * work.num_pairs * self.num_attention_heads * self.cache.head_dim),
            StepPart("cache write", tokens * token_bytes, 0),
            StepPart("LM head", head * bits // 8 + work.num_rows * self.vocab_size * 4, 2 * work.num_rows * head),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """How long the steps of a model take on a machine."""

    sizes: ModelSizes
    hardware: Hardware
    dtype: NumberFormat
    weight_bits: int | None = None
    cache_dtype: NumberFormat | None = None
    num_ranks: int = 1  # the devices among which the model is split

    def __post_init__(self) -> None:
        if self.dtype.name not in self.hardware.rates:
            known = ", ".join(self.hardware.rates)
            raise InvalidValueError(
                f"dtype must be one whose rate {self.hardware.name} names, {known}, got {self.dtype.name!r}"
            )
        if self.num_ranks > 1 and not self.hardware.link_bandwidth:
            raise InvalidValueError(
                f"tensor_parallel_size must be 1, because {self.hardware.name} has no link to another, got {self.num_ranks}"
            )

    def device_s(self, work: StepWork) -> float:
        """Return the seconds in which the devices compute a step."""
        parts = self.sizes.parts(work, self.dtype, weight_bits=self.weight_bits, cache_dtype=self.cache_dtype)
        bandwidth, rate = self.hardware.bandwidth, self.hardware.rates[self.dtype.name]
        seconds = sum(part.seconds(bandwidth, rate, self.hardware.overlap) for part in parts) / self.num_ranks
        return seconds + self.communication_s(work.num_tokens) if self.num_ranks > 1 else seconds

    def communication_s(self, num_tokens: int) -> float:
        """Return the seconds in which the ranks exchange the hidden rows of a step's tokens."""
        num_bytes = num_tokens * self.sizes.hidden_size * self.dtype.itemsize
        sent = 2 * (self.num_ranks - 1) / self.num_ranks * num_bytes  # a ring: each rank sends its share twice
        return 2 * self.sizes.num_layers * (self.hardware.link_latency_s + sent / self.hardware.link_bandwidth)

    def host_s(self, num_seqs: int) -> float:
        """Return the seconds that a step of so many sequences takes besides: Python, sampling, the server."""
        return self.hardware.overheads.per_step_s + num_seqs * self.hardware.overheads.per_sequence_s


def work_of(sizes: ModelSizes, chunks: Iterable[tuple[int, int]]) -> StepWork:
    """Return the work of a step whose chunks each end with a row of logits. chunks: num_new and context, as in add."""
    work = StepWork()
    for num_new, context in chunks:
        sizes.add(work, num_new, context)
        work.num_rows += 1
    return work


def _seen(context: int, window: int) -> int:
    """Return how many pairs the first tokens of a sequence have: the sum of min(i, window) for i in 1 .. context."""
    inside = min(context, window)
    return inside * (inside + 1) // 2 + (context - inside) * window


# ---- the sizes in config.json

_OTHER_NAMES = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "num_local_experts": "num_experts",
}  # fmt: skip
_OF_STATES: ConfigJson = {"head_dim": 256, "full_attention_interval": 4}
# family (model_type) -> the values that its config.json may leave out
_DEFAULTS: dict[str, ConfigJson] = {
    "gpt2": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True, "head_dim": 256, "sliding_window_pattern": 6},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {},
    "qwen3_next": _OF_STATES,
    "qwen3_5_text": _OF_STATES,
    "qwen3_5_moe_text": _OF_STATES,
}


def _sizes_of(given: ConfigJson) -> ModelSizes:
    family = given["model_type"]
    if family not in _DEFAULTS:
        known = ", ".join(_DEFAULTS)
        raise UnsupportedError(
            f"model_type in config.json must be one of {known}, got {shown(family)}; others are not supported"
        )
    named = {_OTHER_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    config: ConfigJson = _DEFAULTS[family] | named
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or hidden // num_heads
    length, window = _max_length(config), config.get("sliding_window", 4096)
    slides = given.get("sliding_window", window) is not None and window < length
    kinds = _layer_kinds(config)
    windows = [window if slides and kind == "sliding_attention" else None for kind in kinds if kind != "linear_attention"]
    num_state_layers = kinds.count("linear_attention")
    state_weights, state_shapes = _states(config) if num_state_layers else (0, ())
    num_projected = 2 * num_heads + 2 * num_kv_heads + (num_heads if num_state_layers else 0)  # q, o, k, v, a gate of q
    num_sparse_layers = len(_sparse_layers(config))
    num_experts = config["num_experts"] if num_sparse_layers else 1
    dense_size = config.get("intermediate_size", 4 * hidden)
    mlp_weights = (2 if family == "gpt2" else 3) * hidden * dense_size * (len(kinds) - num_sparse_layers)
    if shared_size := config.get("shared_expert_intermediate_size"):
        mlp_weights += num_sparse_layers * hidden * (3 * shared_size + 1)  # and its gate
    table, groups = config["vocab_size"] * hidden, kv_groups(windows)
    return ModelSizes(
        hidden_size=hidden,
        vocab_size=config["vocab_size"],
        num_layers=len(kinds),
        num_attention_heads=num_heads,
        max_position_embeddings=length,
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        attention_weights=len(windows) * hidden * head_dim * num_projected + num_state_layers * state_weights,
        mlp_weights=mlp_weights + num_sparse_layers * num_experts * hidden,  # the routers
        expert_weights=num_sparse_layers * num_experts * 3 * hidden * config.get("moe_intermediate_size", dense_size),
        num_experts=num_experts,
        num_experts_per_tok=config["num_experts_per_tok"] if num_sparse_layers else 1,
        table_weights=table * (1 if config.get("tie_word_embeddings") else 2) + (length * hidden if family == "gpt2" else 0),
        cache=HybridSizes(
            largest_of(groups), num_kv_heads, head_dim, groups, family == "gpt_oss", num_state_layers, state_shapes
        ),
    )


def _max_length(config: ConfigJson) -> int:
    """Return the positions that a model knows. A checkpoint with YaRN may still name the length before the scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaled = 0
    if rope.get("rope_type", rope.get("type")) == "yarn":
        scaled = int(rope["factor"] * rope.get("original_max_position_embeddings", config["max_position_embeddings"]))
    length: int = max(config["max_position_embeddings"], scaled)
    return length


def _layer_kinds(config: ConfigJson) -> list[str]:
    """Return the kind of each layer: full_attention, sliding_attention or linear_attention (it keeps a state)."""
    family, layers = config["model_type"], range(config["num_hidden_layers"])
    if family in ("gpt2", "llama", "qwen2_moe", "qwen3_moe"):
        return ["full_attention"] * len(layers)
    if family == "mistral":
        return ["sliding_attention"] * len(layers)
    if kinds := config.get("layer_types"):
        return list(kinds)
    for interval, kind in (("sliding_window_pattern", "sliding_attention"), ("full_attention_interval", "linear_attention")):
        if interval in config:
            return [kind if (layer + 1) % config[interval] else "full_attention" for layer in layers]
    num_full = config.get("max_window_layers", 28) if config.get("use_sliding_window") else len(layers)
    return ["full_attention" if layer < num_full else "sliding_attention" for layer in layers]


def _sparse_layers(config: ConfigJson) -> list[int]:
    family, num_layers = config["model_type"], config["num_hidden_layers"]
    if "num_experts" not in config or family == "qwen3_5_text":
        return []
    if family in ("gpt_oss", "qwen3_5_moe_text"):
        return list(range(num_layers))
    step = config.get("decoder_sparse_step", 1)
    return [layer for layer in range(step - 1, num_layers, step) if layer not in config.get("mlp_only_layers", ())]


def _states(config: ConfigJson) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return the projections' weights of a layer with a state, and the shapes of a sequence's state in it."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    channels = 2 * num_keys * key_dim + num_values * value_dim  # q, k and v
    weights = config["hidden_size"] * (channels + 2 * num_values * value_dim + 2 * num_values)  # z and the output, b and a
    return weights, ((config["linear_conv_kernel_dim"] - 1, channels), (num_values, key_dim, value_dim))
