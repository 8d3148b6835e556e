"""Tensor parallelism: divide the weights among ranks, and replace modules by those that join the ranks' results.

In: a family's model and a checkpoint's Weights. Out: the model of one rank, with smaller layers, and the Weights that fill it.

    column       a rank has some of a layer's outputs: whole heads of q, k and v, some of the MLP's inner activations
    row          a rank has the inputs that belong to these. Its product is a term of a sum over the ranks (AllReduced)
    vocabulary   a rank has an interval of the ids: their rows of the embedding, their logits

A layer has two sums over the ranks, after the attention and after the MLP. Rank 0 adds a row layer's bias before the
sum, and every rank adds the residual after it. The other parts of the model (norms, positions, a router) are the same on every
rank. The model files do not know this: their layers are built with fewer heads and a smaller inner size.

Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from nanoinfer.errors import UnsupportedError
from nanoinfer.execution.runtime import Runtime
from nanoinfer.features.adapters.lora import LowRankUpdate
from nanoinfer.features.distributed.communicator import Communicator
from nanoinfer.loading.weights import DerivedWeights, Source, TensorInfo, Weights
from nanoinfer.models.gemma3 import Gemma3ForCausalLM
from nanoinfer.models.gpt2 import GPT2LMHeadModel
from nanoinfer.models.gpt_oss import GptOssExperts, GptOssForCausalLM
from nanoinfer.models.layers import Untraced
from nanoinfer.models.llama import LlamaForCausalLM
from nanoinfer.models.qwen import QwenForCausalLM
from nanoinfer.models.qwen_moe import MixtureOfExperts, QwenMoeForCausalLM
from nanoinfer.models.registry import ModelConfig

if TYPE_CHECKING:
    from nanoinfer.fast.cuda.graphs import Capture

# The part that a rank has of a layer. qkv: a column layer for q, k and v at once. kv: a column layer with num_key_value_heads.
Split = Literal["column", "qkv", "kv", "row", "vocabulary"]

_GPT2: dict[str, Split] = {
    "attn.c_attn": "qkv", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row", "wte": "vocabulary",
    "lm_head": "vocabulary",
}  # fmt: skip
_QWEN: dict[str, Split] = {
    "q_proj": "column", "k_proj": "kv", "v_proj": "kv", "o_proj": "row", "gate_proj": "column", "up_proj": "column",
    "down_proj": "row", "embed_tokens": "vocabulary", "lm_head": "vocabulary",
}  # fmt: skip
# family -> the endings of the names of its layers and parameters, and the part of them that a rank has. Every rank has all of
# what is not named here.
SPLITS: dict[type[nn.Module], dict[str, Split]] = {
    GPT2LMHeadModel: _GPT2,
    LlamaForCausalLM: _QWEN,
    QwenForCausalLM: _QWEN,
    QwenMoeForCausalLM: _QWEN,  # each expert is split like any MLP
    Gemma3ForCausalLM: _QWEN,
    GptOssForCausalLM: _QWEN | {"sinks": "column"},  # a sink belongs to a head of q
}

# Inner sizes of MLPs in a family's config. They need not be multiples of the number of ranks.
_INNER_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def check_shards(model_class: type[nn.Module], config: ModelConfig, size: int) -> None:
    """Refuse a number of ranks into which a model cannot be split, and name the possible numbers."""
    if model_class not in SPLITS:
        names = ", ".join(family.__name__ for family in SPLITS)
        raise UnsupportedError(
            f"tensor_parallel_size={size} is not supported for {model_class.__name__}, only for {names}; leave it out"
        )
    if not _fits(config, size):
        allowed = [n for n in range(1, config.num_attention_heads + 1) if _fits(config, n)]
        raise UnsupportedError(
            f"tensor_parallel_size must be {' or '.join(map(str, allowed))} for this model, which has "
            f"{config.num_attention_heads} heads and {config.num_key_value_heads} of keys and values, got {size}"
        )


def _inner_sizes(config: ModelConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in _INNER_SIZES if getattr(config, name, None) is not None}


def _fits(config: ModelConfig, size: int) -> bool:
    num_kv_heads = config.num_key_value_heads
    return (
        config.num_attention_heads % size == 0
        and (num_kv_heads % size == 0 or size % num_kv_heads == 0)  # with fewer heads than ranks, ranks share a head
        and min(_inner_sizes(config).values()) >= size
        and config.vocab_size >= size * size  # so that every rank has ids
    )


class Shards:
    """A rank's view of a model that several ranks share."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.rank, self.size = communicator, communicator.rank, communicator.size
        self.gather, self.minimum = communicator.all_gather, communicator.minimum
        self.whole: Any = None  # the model that was split, on the meta device

    def split(self, model: Any, weights: Weights) -> tuple[nn.Module, Weights]:
        """Build this rank's model on the meta device, and select from the whole model's Weights those that fill it."""
        self.whole = model
        config, rank, size = model.config, self.rank, self.size
        slices = {name: _even(inner_size, rank, size) for name, inner_size in _inner_sizes(config).items()}
        slices["vocab_size"] = _vocabulary(config.vocab_size, rank, size)
        local = {name: part.stop - part.start for name, part in slices.items()}
        local["num_attention_heads"] = config.num_attention_heads // size
        if any(field.name == "num_key_value_heads" for field in dataclasses.fields(config)):  # GPT-2 has no such field
            local["num_key_value_heads"] = max(config.num_key_value_heads // size, 1)
        with torch.device("meta"):
            shard = type(model)(dataclasses.replace(config, **local))
        return shard, self.shard_of(weights, type(model), config)

    def shard_of(self, weights: Weights, model_class: type[nn.Module], config: ModelConfig) -> Weights:
        """Return this rank's part of the whole model's Weights."""
        return ShardedWeights(weights, model_class, config, self.rank, self.size)

    def inputs_of(self, source: Source, values: Tensor) -> Tensor:
        """Return, of values for each input of a matrix in the checkpoint, those of the inputs that this rank has."""
        return cast(ShardedWeights, source.files).inputs(source.name, values)

    def shard_of_update(self, layer: str, update: LowRankUpdate) -> LowRankUpdate:
        """Return this rank's part of an adapter's update of a layer: A's columns for a row layer, otherwise B's rows."""
        if (split := split_of(type(self.whole), layer)) is None:
            return update
        axis, whole = (1, update.a) if split == "row" else (0, update.b)
        slices = slices_of(split, whole.shape[axis], self.whole.config, self.rank, self.size)
        # A copy, so that the whole tensor can be freed.
        part = torch.cat([whole[:, kept] if axis else whole[kept] for kept in slices], dim=axis)
        return dataclasses.replace(update, a=part) if axis else dataclasses.replace(update, b=part)

    def join(self, model: Any, vocab_size: int) -> None:
        """Replace those layers of a rank's loaded model that compute a part of a result by modules that join the ranks'
        results.

        The model then has the whole model's forward and compute_logits. Its config has the whole vocabulary, but the rank's
        number of heads, which are those of its KV cache.
        """
        ids = _vocabulary(vocab_size, self.rank, self.size)
        model.config = dataclasses.replace(model.config, vocab_size=vocab_size)

        def joined(name: str, module: nn.Module) -> nn.Module | None:
            split = split_of(type(model), name)
            if split == "row" or isinstance(module, MixtureOfExperts | GptOssExperts):
                return AllReduced(module, self.communicator)
            if split == "vocabulary":
                if isinstance(module, nn.Embedding):
                    return VocabularyEmbedding(module, ids.start, self.communicator)
                return VocabularyHead(module, vocab_size, self.communicator)
            return None

        def replace_in(parent: nn.Module, prefix: str) -> None:
            for name, child in list(parent.named_children()):
                module = joined(prefix + name, child)
                if module is None:
                    replace_in(child, f"{prefix}{name}.")
                else:
                    setattr(parent, name, module)

        replace_in(model, "")

    def together(self, capture: "Capture") -> "Capture":
        """Return a capture that fails on all ranks if it fails on one: ranks that pad a step must all pad it."""

        def captured(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            result, error = None, None
            try:
                result = capture(run)
            except RuntimeError as reason:
                error = reason
            if not self.minimum(result is not None) or result is None:
                raise error or RuntimeError("another rank could not capture it")
            return result

        return captured

    def connect(self, runtime: Runtime) -> Runtime:
        """Make this rank's runtime agree with the others: it is batch independent only if every rank's runtime is."""
        return dataclasses.replace(runtime, is_batch_independent=bool(self.minimum(runtime.is_batch_independent)))


def split_of(model_class: type[nn.Module], layer: str) -> Split | None:
    """Return the part that a rank has of a layer. None: every rank has all of it."""
    return next((split for end, split in SPLITS[model_class].items() if f".{layer}".endswith(f".{end}")), None)


def _vocabulary(vocab_size: int, rank: int, size: int) -> slice:
    """Return the ids of a rank. The last rank may have fewer ids than the others."""
    num = -(-vocab_size // size)
    return slice(rank * num, min((rank + 1) * num, vocab_size))


def _even(total: int, rank: int, size: int) -> slice:
    return slice(rank * total // size, (rank + 1) * total // size)


def slices_of(split: Split, total: int, config: Any, rank: int, size: int) -> list[slice]:
    """Return a rank's slices of an axis of `total` numbers. config: the whole model's."""
    if split == "vocabulary":
        return [_vocabulary(total, rank, size)]
    if split == "qkv":
        third, part = total // 3, _even(total // 3, rank, size)
        return [slice(i * third + part.start, i * third + part.stop) for i in range(3)]
    if split == "kv" and (num_heads := config.num_key_value_heads) < size:
        return [_even(total, rank * num_heads // size, num_heads)]  # several ranks have the same head
    return [_even(total, rank, size)]


class ShardedWeights(DerivedWeights):
    """A rank's part of each tensor of `base`. Only this part is kept. If it consists of whole rows, only they are read."""

    def __init__(self, base: Weights, model_class: type[Any], config: ModelConfig, rank: int, size: int) -> None:
        self.base, self._rank, self._size = base, rank, size
        self._model_class, self._rules, self._config = model_class, model_class.weight_rules, config
        self.has_empty_biases = base.has_empty_biases
        super().__init__((name, self._info(name)) for name in base)

    def _info(self, name: str) -> TensorInfo:
        info = self.base[name]
        axis, slices = self._slices(name)
        if slices is None:
            return info
        shape = list(info.shape)
        shape[axis] = sum(part.stop - part.start for part in slices)
        is_view = info.is_mapped and axis == 0 and len(slices) == 1
        return TensorInfo(tuple(shape), info.dtype, is_mapped=is_view)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        axis, slices = self._slices(name)
        if slices is None:
            weight = self.base.read(name, rows)
            return torch.zeros_like(weight) if self._is_added_elsewhere(name) else weight
        if axis == 1:
            weight = self.base.read(name, rows)
            return torch.cat([weight[:, part] for part in slices], dim=1)
        if len(slices) > 1:
            return torch.cat([self.base.read(name, part) for part in slices])[rows]
        start, stop, _ = rows.indices(slices[0].stop - slices[0].start)
        return self.base.read(name, slice(slices[0].start + start, slices[0].start + stop))

    def inputs(self, name: str, values: Tensor) -> Tensor:
        axis, slices = self._slices(name)
        if slices is None or axis == name.endswith(self._rules.transpose):  # the outputs are split
            return values
        return torch.cat([values[part] for part in slices])

    def _split_of(self, name: str) -> Split | None:
        layer, _, leaf = name.removeprefix(self._rules.prefix).rpartition(".")
        return split_of(self._model_class, layer if leaf in ("weight", "bias") else f"{layer}.{leaf}")

    def _is_added_elsewhere(self, name: str) -> bool:
        """Whether a tensor is a bias that rank 0 alone adds to the sum."""
        return self._rank > 0 and self._split_of(name) == "row" and name.endswith(".bias")

    def _slices(self, name: str) -> tuple[int, list[slice] | None]:
        """Return the axis along which a tensor is split, and this rank's slices of it. None: the rank has all of it."""
        split, shape = self._split_of(name), self.base[name].shape
        if split is None or (split == "row" and len(shape) == 1):
            return 0, None
        axis = 1 if split == "row" else 0
        if len(shape) > 1 and name.endswith(self._rules.transpose):
            axis = 1 - axis
        return axis, slices_of(split, shape[axis], self._config, self._rank, self._size)


# ---- modules with the arguments and results of the whole module, and a rank's part of its weight. All ranks make the same
# calls, so the modules are untraced


class AllReduced(Untraced):
    """Returns the sum over the ranks of a module's results."""

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        super().__init__()
        self.module = module
        self.communicator = communicator

    def forward(self, x: Float[Tensor, "num_tokens in"]) -> Float[Tensor, "num_tokens out"]:
        return self.communicator.all_reduce(self.module(x))


class VocabularyEmbedding(Untraced):
    """An embedding whose rows are on several ranks. first_id: the first id whose row this rank has."""

    def __init__(self, embedding: nn.Embedding, first_id: int, communicator: Communicator) -> None:
        super().__init__()
        self.embedding, self.num_rows = embedding, embedding.num_embeddings
        self.first_id = first_id
        self.communicator = communicator

    def forward(self, input_ids: Int[Tensor, " num_tokens"]) -> Float[Tensor, "num_tokens hidden"]:
        rows = input_ids - self.first_id
        is_elsewhere = (rows < 0) | (rows >= self.num_rows)
        found = self.embedding(rows.masked_fill(is_elsewhere, 0))
        return self.communicator.all_reduce(found.masked_fill(is_elsewhere.unsqueeze(1), 0.0))


class VocabularyHead(Untraced):
    """An LM head whose outputs are on several ranks. Every rank gets all logits."""

    def __init__(self, head: nn.Module, vocab_size: int, communicator: Communicator) -> None:
        super().__init__()
        self.head = head
        self.vocab_size = vocab_size
        self.communicator = communicator

    def forward(self, hidden: Float[Tensor, "num_rows hidden"]) -> Float[Tensor, "num_rows vocab"]:
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size)
        logits = self.communicator.all_gather(self.local(hidden))
        return torch.cat(list(logits), dim=1)[:, : self.vocab_size]

    def local(self, hidden: Float[Tensor, "num_rows hidden"]) -> Float[Tensor, "num_rows padded"]:
        """Return the logits of this rank's ids, padded with -inf to the same number on every rank."""
        logits = self.head(hidden)
        padding = -(-self.vocab_size // self.communicator.size) - logits.shape[1]
        return F.pad(logits, (0, padding), value=float("-inf")) if padding else logits
