"""The states of layers that keep a state instead of keys and values: where they are, and how they advance.

In: the state slots of each sequence of a step, chosen by state_slots.py. Out: the `recur` of a model. It does not
know what a state means or to which sequence it belongs.

A state slot holds a sequence's state in all layers. A step reads the state from a state slot and writes it to the same or
another slot, so a state that a fork or the prefix cache shares stays as it is. State slot -1 holds zeros, the state before any
token.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, chain, zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from nanoinfer.attention.base import Attend
from nanoinfer.attention.dense import Keys, Queries
from nanoinfer.execution.forward_batch import ForwardBatch
from nanoinfer.features.hybrid.cache import States
from nanoinfer.features.hybrid.groups import positions_of, runs_of
from nanoinfer.system.transfer import integers_on_device

# (state, *rows) -> (outputs, state after the rows). Shapes: tensors of a state [num_seqs, ...], rows [num_seqs, num_tokens,
# ...]
Advance = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


class Recur(Attend, Protocol):
    """The Attend of a model some of whose layers keep a state for each sequence instead of keys and values.

    Its config has num_attention_layers, num_state_layers and state_shapes, the shapes of a state's tensors in one layer.
    Layers are counted among those of their kind. A state is in fp32, and consists of zeros before the first token.
    """

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        """Call `advance` for sequences with equally many new tokens, and keep their states.

        Args:
            layer: the index of the layer among those that keep a state.
            advance: advances the states by the rows of some tokens.
            rows: tensors [num_tokens, ...] with a row for each of this step's tokens.

        Returns:
            The outputs of `advance` for each token.
        """
        ...


class StateUpdate(NamedTuple):
    """The packed tokens start .. stop - 1 of a sequence, the state slot before them, and the slots that the step writes."""

    start: int
    stop: int
    read: int
    writes: dict[int, int]  # number of tokens -> the slot for the state after them, in rising order, up to all


def updates_of(batch: ForwardBatch) -> list[StateUpdate]:
    """Return the update of each sequence of a step. A sequence with drafts has several runs of packed tokens."""
    positions, updates, last = positions_of(batch.attention), list[StateUpdate](), None
    for tables, start, stop in runs_of(batch.extras):
        if tables is last:
            updates[-1] = updates[-1]._replace(stop=stop)
            continue
        writes = {num_tokens - positions[start]: slot for num_tokens, slot in tables.state_writes.items()}
        updates.append(StateUpdate(start, stop, tables.state_slot, writes))
        last = tables
    return updates


class Piece(NamedTuple):
    """Some packed tokens of one sequence, with the state slots from which its state is read and to which it is written."""

    start: int
    stop: int
    read: int
    write: int


class AttendWithStates:
    """One step's attention and recurrence (Recur). attend: the Attend of the layers with attention."""

    def __init__(self, attend: Attend, states: States, updates: Sequence[StateUpdate], *, is_single: bool) -> None:
        """is_single: whether the states advance by one token at a time, as where the attention has one query at a time."""
        self.attend, self.states = attend, states
        self.pieces = [_pieces(*rows, is_single=is_single) for rows in updates]  # of each sequence, in order

    @cached_property
    def _batches(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the batches in their order: indices of packed tokens [num_seqs, num_tokens], and the state slots [num_seqs]
        to read and to write.

        Of the i-th pieces of all sequences, those with a single token are computed together, and each longer piece alone.
        """
        batches = []
        for pieces in zip_longest(*self.pieces):
            singles = [piece for piece in pieces if piece is not None and piece.stop - piece.start == 1]
            batches += [singles] if singles else []
            batches += [[piece] for piece in pieces if piece is not None and piece.stop - piece.start > 1]
        lists: list[list[int]] = []
        for batch in batches:
            tokens = chain.from_iterable(range(piece.start, piece.stop) for piece in batch)
            lists += [[*tokens], [piece.read for piece in batch], [piece.write for piece in batch]]
        tensors = iter(integers_on_device(lists, self.states[0][0].device))
        return [(next(tensors).view(len(batch), -1), next(tensors), next(tensors)) for batch in batches]

    @cached_property
    def piece_tensors(self) -> tuple[Int[Tensor, " num_seqs_plus_1"], Int[Tensor, "num_pieces 4"]]:
        """Return, for kernels, the index of each sequence's first piece and the number of all, and the pieces as rows.

        A row is (start, stop, read, write), in which the last state slot stands for -1.
        """
        num_state_slots = len(self.states[0][0])
        first_pieces = [0, *accumulate(map(len, self.pieces))]
        pieces = [(piece.start, piece.stop, piece.read % num_state_slots, piece.write) for piece in chain(*self.pieces)]
        return torch.tensor(first_pieces), torch.tensor(pieces)

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys, **options: Any) -> Queries:
        return self.attend(layer, q, k, v, **options)

    def recur(self, layer: int, advance: Advance, *rows: Tensor) -> Tensor:
        """Advance the states of the step's sequences. See Recur."""
        tensors, out = self.states[layer], None
        for tokens, reads, writes in self._batches:
            computed, state = advance(tuple(tensor[reads] for tensor in tensors), *(x[tokens] for x in rows))
            for tensor, new in zip(tensors, state, strict=True):
                tensor[writes] = new
            if out is None:
                out = computed.new_empty(len(rows[0]), *computed.shape[2:])
            out[tokens] = computed
        assert out is not None, "a step has at least one token"
        return out


def _pieces(start: int, stop: int, read: int, writes: dict[int, int], *, is_single: bool) -> list[Piece]:
    """Cut a sequence's tokens after each token whose state is kept, or after every token.

    A piece that ends before such a token writes to that token's state slot, which is free until then.
    """
    ends = list(range(start + 1, stop + 1)) if is_single else [start + num for num in writes]
    pieces: list[Piece] = []
    for end in ends:
        write = next(state_slot for num, state_slot in writes.items() if start + num >= end)
        pieces.append(Piece(pieces[-1].stop if pieces else start, end, read, write))
        read = write
    return pieces
