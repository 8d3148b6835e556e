"""The table of model families by the architecture's name in config.json, and the interface of every family.

A model has `forward(input_ids, positions, attend) -> hidden [num_tokens, hidden]`, `compute_logits(hidden) -> [.., vocab]`
and a `config` with the fields of ModelConfig. `register_model` adds a model of your own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from nanoinfer.attention.base import Attend
from nanoinfer.attention.cache_sizes import LayerSizes
from nanoinfer.errors import CheckpointError, InvalidTypeError, UnsupportedError, is_one_of, shown, takes
from nanoinfer.models.layers import Hidden, Ids

ConfigJson = dict[str, Any]  # config.json, whose values a family's from_hf checks


@dataclass(frozen=True, kw_only=True)
class WeightRules:
    """The differences between a family's checkpoints and its module tree."""

    prefix: str  # precedes the names in some checkpoints, and is removed
    embedding: str  # the name of the parameter that a tied head shares
    head: str = "lm_head.weight"  # the name of the LM head's parameter
    transpose: tuple[str, ...] = ()  # name endings of tensors stored as [in, out], which a linear layer has as [out, in]
    skip: tuple[str, ...] = ()  # name endings of tensors that are not weights
    ignored: tuple[str, ...] = ()  # name beginnings of weights of something else, such as a model that drafts tokens
    fused_experts: Literal["interleaved", "halves"] | None = None  # how a tensor has all experts of a layer


# architecture in config.json -> its model_type there, and "module:class", imported when it is first used
MODELS: dict[str, tuple[str, str]] = {
    "GPT2LMHeadModel": ("gpt2", "nanoinfer.models.gpt2:GPT2LMHeadModel"),
    "Gemma3ForCausalLM": ("gemma3_text", "nanoinfer.models.gemma3:Gemma3ForCausalLM"),
    "GptOssForCausalLM": ("gpt_oss", "nanoinfer.models.gpt_oss:GptOssForCausalLM"),
    "LlamaForCausalLM": ("llama", "nanoinfer.models.llama:LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "nanoinfer.models.llama:LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "nanoinfer.models.qwen:QwenForCausalLM"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "nanoinfer.models.qwen_moe:QwenMoeForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "nanoinfer.models.qwen:QwenForCausalLM"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "nanoinfer.models.qwen_moe:QwenMoeForCausalLM"),
    "Qwen3NextForCausalLM": ("qwen3_next", "nanoinfer.features.hybrid.qwen_next:Qwen3NextForCausalLM"),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", "nanoinfer.features.hybrid.qwen_next:Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", "nanoinfer.features.hybrid.qwen_next:Qwen3_5ForCausalLM"),
}
_registered: dict[str, type[nn.Module]] = {}


@runtime_checkable
class ModelConfig(LayerSizes, Protocol):
    """The fields that the engine reads of any family's config. The families' dataclasses have further fields."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


CONFIG_FIELDS = [name for protocol in (LayerSizes, ModelConfig) for name in vars(protocol) if name[0] != "_"]


@runtime_checkable
class Model(Protocol):
    """The interface of a model, as the engine uses it.

    Attributes:
        Config: a frozen dataclass with `from_hf(dict)` and `tie_word_embeddings`.
        weight_rules: how the names in its checkpoints differ from the names of its parameters.
        config: an instance of Config.

    A model, or a module of it, whose forward pass reads values back from the GPU sets `supports_cuda_graph = False`.
    """

    Config: ClassVar[type[ModelConfig]]
    weight_rules: ClassVar[WeightRules]
    config: Any

    def __call__(self, input_ids: Ids, positions: Ids, attend: Attend) -> Hidden: ...

    def compute_logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


# Fields that transformers reads for any family and no family here computes, with the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "is_causal": (True, None),
    "use_bidirectional_attention": (False, None),
    "per_layer_config": (None, {}),
}


def refuse_others(config: ConfigJson, **supported: tuple[object, ...]) -> None:
    """Refuse a field of config.json whose value would change the logits in an unsupported way. Raises: UnsupportedError.

    supported: the values that the family computes, by the field's name. The first applies to files without the field.
    """
    for name, values in (_NEUTRAL | supported).items():
        if not is_one_of(config.get(name, values[0]), values):
            raise UnsupportedError(f"{name} must be {values[0]}, got {shown(config[name])}; others are not supported")


def register_model(architecture: str, model_class: type[nn.Module]) -> None:
    """Use model_class for checkpoints whose config.json names this architecture. It takes precedence over a bundled class.

    Raises: InvalidTypeError if the class is no Model. The error names everything that is missing.
    """
    if not isinstance(architecture, str):
        raise InvalidTypeError(f"architecture must be its name in config.json, a string, got {shown(architecture)}")
    if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        raise InvalidTypeError(f"model_class must be a subclass of torch.nn.Module, got {shown(model_class)}")
    if missing := [*_missing(model_class)]:
        raise InvalidTypeError(
            f"{model_class.__name__} lacks {'; '.join(missing)}. notebooks/d5a_write_your_own_model.ipynb writes such a class"
        )
    _registered[architecture] = model_class


def _missing(model_class: Any) -> Iterator[str]:
    """Name what a user's class lacks of Model."""
    config = getattr(model_class, "Config", None)
    if not (isinstance(config, type) and is_dataclass(config)):
        yield f"Config, a dataclass with from_hf(dict), tie_word_embeddings, {', '.join(CONFIG_FIELDS)}"
    else:
        if not takes(getattr(config, "from_hf", None), {}):
            yield "Config.from_hf(dict), a class method"
        names = {field.name for field in fields(config)}
        yield from (f"Config.{name}" for name in CONFIG_FIELDS if name not in names and not hasattr(config, name))
        if "tie_word_embeddings" not in names:
            yield "Config.tie_word_embeddings, a field of the dataclass"
    if not isinstance(getattr(model_class, "weight_rules", None), WeightRules):
        yield "weight_rules, a WeightRules"
    if model_class.forward is nn.Module.forward or not takes(model_class.forward, "self", "input_ids", "positions", "attend"):
        yield "forward(input_ids, positions, attend) -> hidden"
    if not takes(getattr(model_class, "compute_logits", None), "self", "hidden"):
        yield "compute_logits(hidden) -> logits"


def is_registered(model_class: object) -> bool:
    """Whether a class is a user's, which may have read a good checkpoint wrongly."""
    return model_class in _registered.values()


def with_head(architecture: str) -> str:
    """Return the architecture that is this one with an LM head, as "Qwen3ForCausalLM" is "Qwen3Model", or else the same one."""
    names = (re.sub("(Text)?Model$", head, architecture) for head in ("ForCausalLM", "LMHeadModel"))
    return architecture if architecture in MODELS else next((name for name in names if name in MODELS), architecture)


def saved_without_head(config: ConfigJson) -> bool:
    """Whether a config.json is that of a model without its LM head, as AutoModel of transformers saves it."""
    return any(isinstance(name, str) and with_head(name) != name for name in config["architectures"])


def find_model(config: ConfigJson) -> type[Any]:
    """Return the class for a config.json.

    Raises:
        UnsupportedError: an architecture that is not supported.
        CheckpointError: no architecture, or the model_type of another.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError(f'config.json names no architecture; add "architectures": [one of {", ".join(MODELS)}]')
    for architecture in filter(lambda name: isinstance(name, str), architectures):
        if architecture in _registered:
            return _registered[architecture]
        if (complete := with_head(architecture)) in MODELS:
            model_type, place = MODELS[complete]
            if config.get("model_type", model_type) != model_type:
                raise CheckpointError(
                    f"model_type in config.json must be {model_type!r} for the architecture {architecture}, got "
                    f"{shown(config['model_type'])}; correct the one that is wrong"
                )
            model_class: type[nn.Module] = resolve_name(place)
            return model_class
    if isinstance(config.get("text_config"), dict):
        raise UnsupportedError(
            f"architectures {shown(architectures)} also read images or sound, which is not supported; use the text model "
            "alone, as transformers' AutoModelForCausalLM saves it"
        )
    raise UnsupportedError(
        f"architectures {shown(architectures)} are not supported; {', '.join([*MODELS, *_registered])} are. "
        "register_model adds a model of your own"
    )
