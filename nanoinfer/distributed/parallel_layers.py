"""Tensor parallelism: the modules that join the results of several ranks.

In: a module whose weight is one rank's part (sharding.py). Out: a module with the arguments and the result of the whole one.
"""

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn


@runtime_checkable
class Communicator(Protocol):
    """The connection of a rank with the others. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...  # in [0, size)
    @property
    def size(self) -> int: ...

    def all_gather(self, x: Shaped[Tensor, "..."]) -> Shaped[Tensor, "ranks ..."]:
        """The tensors of all ranks, which have the same shape and dtype."""
        ...

    def all_reduce(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The sum over the ranks. Every rank gets the same bits, and an element's bits do not depend on its place."""
        ...

    def minimum(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        ...


class AllReduced(nn.Module):
    """The sum over the ranks of a module's results."""

    runs_untraced = True  # all ranks make the same calls

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        super().__init__()
        self.module: Any = module
        self.communicator = communicator

    def forward(self, x: Float[Tensor, "num_tokens in"]) -> Float[Tensor, "num_tokens out"]:
        return self.communicator.all_reduce(self.module(x))


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are on several ranks. first_id: of this rank's."""

    runs_untraced = True

    def __init__(self, embedding: nn.Embedding, first_id: int, communicator: Communicator) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.first_id = first_id
        self.communicator = communicator

    def forward(self, input_ids: Int[Tensor, " num_tokens"]) -> Float[Tensor, "num_tokens hidden"]:
        rows = input_ids - self.first_id
        is_elsewhere = (rows < 0) | (rows >= len(self.weight))
        found = F.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self.communicator.all_reduce(found.masked_fill(is_elsewhere.unsqueeze(1), 0.0))


class VocabularyHead(nn.Module):
    """An LM head whose outputs are on several ranks. Every rank gets all logits."""

    runs_untraced = True

    def __init__(self, head: nn.Module, vocab_size: int, communicator: Communicator) -> None:
        super().__init__()
        self.head = head
        self.vocab_size = vocab_size
        self.communicator = communicator

    def forward(self, hidden: Float[Tensor, "num_rows hidden"]) -> Float[Tensor, "num_rows vocab"]:
        if not len(hidden):
            return hidden.new_empty(0, self.vocab_size)
        parts = self.communicator.all_gather(self.local(hidden))
        return torch.cat(list(parts), dim=1)[:, : self.vocab_size]

    def local(self, hidden: Float[Tensor, "num_rows hidden"]) -> Float[Tensor, "num_rows padded"]:
        """The logits of this rank's ids. They are padded with -inf to the same number on every rank."""
        logits = self.head(hidden)
        padding = -(-self.vocab_size // self.communicator.size) - logits.shape[1]
        return F.pad(logits, (0, padding), value=float("-inf")) if padding else logits
