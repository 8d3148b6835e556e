"""Routes: faster ways to the tokens that the sampler's stages choose.

In: the rows of a step before the LM head has been applied, so that a route may fuse the head with the choice of the token or
divide the vocabulary among ranks. Out: token ids, or None for a step that the route does not support. The core has no routes.
Those that exist are in fast/sampling/ and distributed/.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from nanoinfer.sampling.batch import SamplingBatch


class HeadRows:
    """The hidden rows of a step that choose a token, with the LM head. The logits are computed when they are first read.

    Attributes:
        hidden: the output of the model's last layer.
        head: maps `hidden` to logits, in the model's dtype.
    """

    def __init__(
        self,
        hidden: Float[Tensor, "num_rows hidden"],
        head: Callable[[Tensor], Tensor],
        processed_logits: Float[Tensor, "num_rows vocab"] | None = None,
    ) -> None:
        """processed_logits: the logits in fp32 after the stages before the temperature. None: the model's own logits."""
        self.hidden, self.head = hidden, head
        self._logits = processed_logits

    @property
    def is_raw(self) -> bool:
        """Whether only the choice needs the logits. False once they were read, or stages have been applied to them."""
        return self._logits is None

    @property
    def logits(self) -> Float[Tensor, "num_rows vocab"]:
        """The logits in fp32."""
        if self._logits is None:
            self._logits = self.head(self.hidden).float().contiguous()  # copies expanded logits, which cannot be written
        return self._logits


@runtime_checkable
class Route(Protocol):
    """Gives exactly the tokens of the plain list of stages, in less time."""

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
