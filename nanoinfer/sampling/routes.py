"""Routes: faster ways to the tokens that the sampler's stages choose.

In: the rows of a step before the LM head has been applied, so that a route may fuse the head with the choice of the token or
divide the vocabulary among ranks. Out: token ids, or None for a step that the route does not support. The core has no routes.
Those that exist are in fast/sampling/ and features/distributed/.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.sampling.batch import SamplingBatch
from nanoinfer.sampling.sampler import HeadRows, SampledTokens, Sampler, choose
from nanoinfer.sampling.stages import STAGES_BEFORE_TEMPERATURE, STAGES_FROM_TEMPERATURE


@runtime_checkable
class Route(Protocol):
    """Gives exactly the tokens of the stages from the temperature on and of the draw, in less time."""

    def try_sample(self, rows: HeadRows, batch: SamplingBatch) -> Int[Tensor, " num_rows"] | None:
        """Choose a token id per row. There is at least one row, and the stages before the temperature have been applied.

        Returns:
            The ids, -1 for a row whose largest logit is not finite. None: the route does not support the step.
        """
        ...

    def reserved_bytes(self, logits_bytes: int) -> int:
        """Return the bytes that the route keeps on the device if the logits of the largest step take logits_bytes."""
        return 0

    def prepare(self, rows: HeadRows) -> None:
        """Do what would otherwise delay the first steps. rows: as many as the largest step has, with any content."""
        return

    def capture_next(self) -> bool:
        """Capture a CUDA graph that earlier steps lacked. Returns False if there is none."""
        return False

    def drop_graphs(self) -> None:
        """Free the captured CUDA graphs."""
        return


class RoutedSampler(Sampler):
    """Chooses the tokens of a step by the first route that supports it. If none does, by the stages."""

    def __init__(self, routes: Sequence[Route]) -> None:
        """routes: in the order in which they are tried."""
        super().__init__()
        self.routes = tuple(routes)

    def __call__(self, rows: HeadRows, batch: SamplingBatch) -> SampledTokens:
        """Run the stages before the temperature if they may change a logit, then the first route that supports the step."""
        if not len(rows.hidden):
            return super().__call__(rows, batch)
        logits = is_finite = None
        if batch.changes_logits:
            is_finite = rows.logits.amax(dim=-1).isfinite() if batch.masks_logits else None
            logits = self.apply(STAGES_BEFORE_TEMPERATURE, rows.logits, batch)  # in place
        for route in self.routes:
            if (token_ids := route.try_sample(rows, batch)) is not None:
                break
        else:
            token_ids = choose(self.apply(STAGES_FROM_TEMPERATURE, rows.logits, batch), batch)
        if is_finite is not None:
            token_ids = torch.where(is_finite, token_ids, -1)
        return self.sampled(token_ids, batch, logits, is_finite)
