"""What a sequence has in the cache of a model with windows or states, in addition to Sequence.block_table.

Its writer is the block manager (block_manager.py in this folder). The executor finds it in Sequence.extras.
"""

from dataclasses import dataclass, field
from typing import cast

from nanoinfer.scheduling.sequence import Sequence

NAME = "hybrid"  # the record's name in Sequence.extras
NO_BLOCK = -1  # in a table: there is no block
NO_SLOT = -1  # the state slot of a sequence without a computed token


@dataclass(slots=True)
class HybridTables:
    """The value of Sequence.extras["hybrid"]."""

    block_tables: list[list[int]] = field(default_factory=list)  # of the further KV groups. Sequence.block_table is the first's
    state_slot: int = NO_SLOT  # the slot with the sequence's state. NO_SLOT: no token has been computed
    # The slots that the next step writes, by the sequence's number of tokens after which it writes them.
    state_writes: dict[int, int] = field(default_factory=dict)


def tables_of(seq: Sequence) -> HybridTables:
    """Return the record of a sequence. It gets one at the first call, in extras of its own, because forks share theirs."""
    if NAME not in seq.extras:
        seq.extras = {**seq.extras, NAME: HybridTables()}
    return cast(HybridTables, seq.extras[NAME])
