"""What may enter the engine: requests are checked before any work, and their words become ids, once.

In: token ids and SamplingParams. Out: Sequences, or the error that says what is wrong, which value, and what to do. It knows
the model's sizes and the tokenizer, and neither queue nor cache.
"""

import hashlib
from collections.abc import Sequence as Ids
from itertools import count

from nanoinfer.errors import InvalidPromptError, InvalidTypeError, InvalidValueError
from nanoinfer.models.registry import ModelConfig
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.tokenization.tokenizer import Tokenizer


class Admission:
    """max_model_len: the engine's, which may be less than the model's. seed: of requests without one of their own."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> None:
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self._seed = seed
        self._numbers = count()

    def admit(self, prompt_token_ids: list[int], params: SamplingParams) -> list[Sequence]:
        """The sequences of a request that `check` lets through: one for each of its n answers, with the next request id.

        Two requests never get the same seed unless they ask for it: without one of its own, a request's comes from the engine's
        and from its number.
        """
        number = next(self._numbers)
        seed = params.seed if params.seed is not None else _distinct_seed(self._seed, number)
        bad_words = self.bad_word_ids(params)
        num_prompt = len(prompt_token_ids)
        return [
            Sequence(
                request_id=str(number),
                prompt_token_ids=prompt_token_ids,
                params=params,
                seed=(seed + index) % 2**64,
                max_num_tokens=min(num_prompt + (params.max_tokens or self.max_model_len), self.max_model_len),
                eos_token_ids=self.eos_token_ids,
                bad_words=bad_words,
                index=index,
            )
            for index in range(params.n)
        ]

    def check(self, prompt_token_ids: Ids[int], params: SamplingParams) -> None:
        """Refuse what can be seen to be wrong before any work. Too long is not wrong: it becomes an error result.

        Raises: InvalidPromptError, InvalidTypeError, InvalidValueError.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidTypeError(f"sampling_params must be SamplingParams, got {params!r}")
        if not prompt_token_ids:
            raise InvalidPromptError("the prompt has no tokens; give at least one, such as the model's BOS")
        vocab_size = self.model_config.vocab_size
        for name, ids in (
            ("the prompt", prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", tuple(params.logit_bias or ())),
            *(("bad_words", word) for word in params.bad_words or () if not isinstance(word, str)),
        ):
            # max and min in C: a loop over a prompt of 100,000 ids would be felt
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                bad = next(i for i in ids if not 0 <= i < vocab_size)
                error = f"{name} has the token id {bad}; this model's ids are 0 .. {vocab_size - 1}"
                raise InvalidPromptError(error) if ids is prompt_token_ids else InvalidValueError(error)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise InvalidValueError(
                    f"{name} must be at most the vocabulary's {vocab_size}, got {getattr(params, name)}; use -1 for all"
                )
        self.bad_word_ids(params)  # raises for what cannot be one
        if params.detokenize and self.tokenizer is None:
            raise InvalidValueError(
                "this checkpoint has no tokenizer, so there can be no text; pass SamplingParams(detokenize=False), "
                "or LLM(tokenizer=...)"
            )

    def too_long(self, num_prompt_tokens: int) -> str:
        """What to say about a prompt that leaves no room for an answer."""
        error = f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {self.max_model_len}, answer included; "
        error += "shorten the prompt"
        if self.max_model_len < self.model_config.max_position_embeddings:
            most = self.model_config.max_position_embeddings
            error += f", or raise max_model_len (this model: up to {most}) and kv_cache_memory"
        return error

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """params.bad_words as ids. Some tokenizers have ids that the model lacks: what needs one cannot come out anyway."""
        words: list[tuple[int, ...]] = []
        for word in params.bad_words or ():
            if isinstance(word, str):
                if self.tokenizer is None:
                    raise InvalidValueError(f"bad_words has {word!r}, but there is no tokenizer; give lists of token ids")
                words += self.tokenizer.word_forms(word)
            else:
                words.append(tuple(word))
        return tuple(ids for ids in words if max(ids) < self.model_config.vocab_size)


def _distinct_seed(engine_seed: int, number: int) -> int:
    """64 bits that differ for every request of an engine, and for the same request of engines with other seeds."""
    digest = hashlib.blake2b(f"{engine_seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def checked_model_len(asked: int | None, model_len: int) -> int:
    """max_model_len, or the model's own. Raises: InvalidValueError if more is asked for than the model knows."""
    if asked is not None and asked > model_len:
        raise InvalidValueError(f"max_model_len must be <= {model_len}, the positions this model knows, got {asked}")
    return asked or model_len
