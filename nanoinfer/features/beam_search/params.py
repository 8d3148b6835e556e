"""What LLM.beam_search takes and returns, with vLLM's names and fields."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Interval
from typing_extensions import Doc

from nanoinfer.arguments import Hint, declared, read_fields
from nanoinfer.errors import InvalidTypeError, out_of_range, shown
from nanoinfer.outputs import FinishReason, ShortRepr
from nanoinfer.sampling_params import CheckedParams


@declared
@dataclass(kw_only=True)
class BeamSearchParams(CheckedParams):
    """How LLM.beam_search finds the most likely answers to a prompt.

    Args: as declared below.

    Raises: InvalidValueError, InvalidTypeError.

    The results are those of transformers' generate(num_beams=...).
    """

    # fmt: off
    beam_width: Annotated[int, Ge(1),
        Doc("Number of beams kept at each step, and of answers returned. More than max_num_seqs run in groups.")]
    max_tokens: Annotated[int, Ge(1), Doc("Maximum length of an answer in tokens.")] = 16
    length_penalty: Annotated[float, Interval(ge=-10, le=10), Hint("0 compares plain sums"), Doc(
        "A beam's score is its summed log-probability / number of generated tokens ** length_penalty, EOS counted. Above 0 it "
        "favours long answers, since the sums are negative.")] = 1.0
    early_stopping: Annotated[bool | Literal["never"], Doc(
        "When a prompt is done. True: as soon as beam_width answers have ended. False: when no running beam would end with a "
        'better score at its present length. "never": when none could at any length up to max_tokens.')] = False
    ignore_eos: Annotated[bool, Doc("No answer ends before max_tokens.")] = False
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self)
        if not isinstance(self.early_stopping, bool | str):
            raise InvalidTypeError(f"early_stopping must be True, False or 'never', got {shown(self.early_stopping)}")
        if self.early_stopping not in (True, False, "never"):
            raise out_of_range("early_stopping", self.early_stopping, "True, False or 'never'")


@dataclass(frozen=True, slots=True, repr=False)
class BeamSearchSequence(ShortRepr):
    """An answer of a beam search.

    Attributes:
        text: the text of the generated ids. In vLLM it begins with the prompt.
        token_ids: the generated ids, EOS included.
        tokens: the prompt's ids and the generated ids, as in vLLM.
        score: cumulative_logprob / len(token_ids) ** length_penalty.
        cumulative_logprob: the sum of the log-probabilities of token_ids. vLLM's name for it is cum_logprob.
        finish_reason: "stop" (EOS) or "length".
    """

    text: str
    token_ids: list[int]
    tokens: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: FinishReason

    @property
    def cum_logprob(self) -> float:
        """The cumulative_logprob, under vLLM's name."""
        return self.cumulative_logprob


@dataclass(frozen=True, slots=True, repr=False)
class BeamSearchOutput(ShortRepr):
    """A prompt with its beam_width best answers, the best first.

    Attributes:
        error: why the prompt has no answers. None: the prompt was searched.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    error: str | None = None
