"""The settings of speculative decoding, as LLM(speculative_config=...) gives them in a dict."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Interval
from typing_extensions import Doc

from nanoinfer.arguments import declared, read_fields
from nanoinfer.config import BITS, EngineConfig, class_named
from nanoinfer.errors import InvalidTypeError, InvalidValueError, UnsupportedError, check_integer, is_one_of, shown

if TYPE_CHECKING:
    from nanoinfer.features.drafts.speculator import Proposer

MAX_ROWS = 256  # the limit of a step's rows, unless max_num_seqs is larger

_METHODS = "'ngram', 'draft_model', 'mtp', 'quantized', or a class or its name, such as 'my_module:MyProposer'"


@declared
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: which tokens are guessed, and how many. The tokens that are returned stay the same.

    Args: as declared below.
    """

    # fmt: off
    method: Annotated["str | type[Proposer]", Doc(
        '"ngram" repeats what followed the newest tokens when they occurred before. "draft_model" asks a smaller model. "mtp" '
        'asks the layer for multi-token prediction of checkpoints of Qwen3.5. "quantized" asks the model itself, with its '
        'weights rounded, by kernels. A class, or its name "my_module:MyProposer", is a Proposer '
        "(nanoinfer.features.drafts.speculator) of your own.")]
    num_speculative_tokens: Annotated[int, Interval(ge=1, le=64),
        Doc("The most tokens that are guessed per sequence and step.")] = 8
    adaptive: Annotated[bool,
        Doc("Guess only as many as pay, by the time that steps take and by the share of guesses that were right.")] = True
    prompt_lookup_min: Annotated[int, Ge(1), Doc('The fewest newest tokens that must have occurred before ("ngram").')] = 2
    prompt_lookup_max: Annotated[int, Doc('The most newest tokens that are looked up ("ngram").')] = 4
    model: Annotated[str | None,
        Doc('A folder, a hub name or a bundled model with the same vocabulary ("draft_model").')] = None
    bits: Annotated[int, Doc('The bits of a rounded weight, 4 or 8 ("quantized").')] = 4
    # fmt: on

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or "." in self.method or ":" in self.method:
            object.__setattr__(self, "method", proposer_class(self.method))
        elif self.method not in ("ngram", "draft_model", "mtp", "quantized"):
            raise InvalidValueError(f"speculative_config's method must be {_METHODS}, got {shown(self.method)}")
        if (self.method == "draft_model") != isinstance(self.model, str):
            hint = "pass a folder, a hub name or a bundled model" if self.method == "draft_model" else "leave it out"
            raise InvalidValueError(f"speculative_config's model, with method {self.method!r}, is {shown(self.model)}; {hint}")
        if not is_one_of(self.bits, (4, 8)):
            raise InvalidValueError(f"speculative_config's bits must be 4 or 8, got {shown(self.bits)}")
        read_fields(self)
        low = self.prompt_lookup_min
        check_integer("prompt_lookup_max", self.prompt_lookup_max, low, None, f">= prompt_lookup_min ({low})")

    @classmethod
    def of(cls, given: object) -> "SpeculativeConfig":
        """Check LLM's speculative_config, a dict."""
        if not isinstance(given, Mapping):
            raise InvalidTypeError(f"speculative_config must be a dict such as {{'method': 'ngram'}}, got {shown(given)}")
        if "method" not in given:
            raise InvalidValueError(f"speculative_config needs a method, {_METHODS}, got {shown(given)}")
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise InvalidTypeError(f"speculative_config has no {shown(unknown[0])}; known are {', '.join(known)}")
        return cls(**given)

    def check(self, config: EngineConfig) -> None:
        """Refuse what drafts cannot be combined with. Raises: UnsupportedError."""
        if config.async_scheduling:
            raise UnsupportedError("speculative_config needs every token before the next step; leave async_scheduling out")
        if config.stages is not None or config.logits_processors:
            of_user = "stages" if config.stages is not None else "logits_processors"
            raise UnsupportedError(f"speculative_config with {of_user} of your own is not supported; leave one of the two out")
        if config.quantization is not None and BITS[config.quantization] <= (self.bits_of_copy or 0):
            raise UnsupportedError(
                f"speculative_config with method 'quantized' drafts in {self.bits_of_copy} bits, which saves no time with "
                f"quantization={config.quantization!r}; leave one of the two out"
            )

    @property
    def bits_of_copy(self) -> int | None:
        """The bits of the weights of the model's rounded copy. None: the model has no copy."""
        return self.bits if self.method == "quantized" else None

    def max_num_rows(self, max_num_seqs: int) -> int:
        """Return the most rows of a step: one for each running sequence, and one for each draft."""
        return max(max_num_seqs, min(MAX_ROWS, max_num_seqs * (1 + self.num_speculative_tokens)))


def proposer_class(given: object) -> "type[Proposer]":
    """Check a method of speculative_config that is a class or its name. Returns the class."""
    cls = class_named("speculative_config's method", given) or type(None)
    try:
        for name in ("propose", "forget"):
            getattr(cls, name)
        signature(cls).bind("config")
    except (AttributeError, TypeError) as error:
        raise InvalidTypeError(
            "speculative_config's method must be a class with __init__(config), propose(sequences, limits) and forget(seq), "
            f"got {shown(given)} ({error}); derive it from nanoinfer.features.drafts.speculator.Proposer"
        ) from error
    return cls
