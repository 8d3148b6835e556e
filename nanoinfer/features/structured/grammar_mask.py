"""The ids that the grammars of a batch (structured_outputs) allow next, as a mask.

In: the sequences of a step's rows. Out: GrammarMask, for the stage keep_grammatical. The grammars themselves are in
sampling/grammar.py. Each row's mask takes some 30 us, and is computed while a GPU still runs the forward pass.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.system.transfer import on_device


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Row rows[i] of the logits may not draw the ids in forbidden[i]. errors: row -> the reason why it may draw no id."""

    rows: Int[Tensor, " some_rows"]
    forbidden: Bool[Tensor, "some_rows vocab"]
    errors: dict[int, str] = field(default_factory=dict)

    @classmethod
    def build(cls, sequences: list[Sequence], vocab_size: int, device: torch.device) -> "GrammarMask":
        """Ask the grammars which ids may follow. At least one sequence has a grammar."""
        grammars = {row: seq.grammar for row, seq in enumerate(sequences) if seq.grammar is not None}
        forbidden = np.empty((len(grammars), vocab_size), dtype=np.uint8)
        errors = {}
        for index, (row, grammar) in enumerate(grammars.items()):
            grammar.write_forbidden(forbidden[index], sequences[row].stop_ids)
            if error := grammar.error:
                errors[row] = error
        packed = torch.from_numpy(forbidden).view(torch.bool)
        return cls(on_device(torch.tensor(list(grammars)), device), on_device(packed, device), errors)
