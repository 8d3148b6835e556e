"""Drafts of a user's own proposer, whose form is checked. Which tokens it guesses is its own affair."""

import logging

from nanoinfer.errors import InvalidTypeError, InvalidValueError, check_integer, shown
from nanoinfer.features.drafts.speculator import Proposer
from nanoinfer.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)


class CheckedProposer:
    """Calls a user's proposer, and checks what it returns. vocab_size: the model's number of token ids."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self.proposer = proposer
        self._name = type(proposer).__name__
        self._last_id = vocab_size - 1

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return the proposer's drafts as lists of plain ints. Raises: InvalidTypeError, InvalidValueError, its own errors."""
        drafts = self.proposer.propose([*sequences], [*limits])  # copies, because a proposer may change its lists
        if not isinstance(drafts, list | tuple) or len(drafts) != len(sequences):
            raise InvalidTypeError(
                f"{self._name}.propose must return a list with a draft for each of its {len(sequences)} sequences, got "
                f"{shown(drafts)}; return [] for a sequence without a guess"
            )
        return [self._checked(draft, limit) for draft, limit in zip(drafts, limits, strict=True)]

    def _checked(self, draft: object, limit: int) -> list[int]:
        if not isinstance(draft, list | tuple):
            raise InvalidTypeError(f"each draft that {self._name}.propose returns must be a list of ids, got {shown(draft)}")
        if len(draft) > limit:
            raise InvalidValueError(
                f"{self._name}.propose must return at most limits[i] ids for sequences[i], here {limit}, got {len(draft)}; "
                "return draft[:limit]"
            )
        for token_id in draft:
            name, last_id = f"each id that {self._name}.propose returns", self._last_id
            check_integer(name, token_id, 0, last_id, f"in 0 .. {last_id}; the model has no other ids")
        return [int(token_id) for token_id in draft]

    def forget(self, seq: Sequence) -> None:
        """Let the proposer drop what it keeps for a sequence. An error is logged, since the sequence has its answer."""
        try:
            self.proposer.forget(seq)
        except Exception:
            logger.exception("%s.forget failed; no answer depends on it, but it may keep memory", self._name)
