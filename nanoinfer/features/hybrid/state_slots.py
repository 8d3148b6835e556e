"""Assign state slots to sequences, for models whose layers keep a state instead of keys and values.

A HybridBlockManager calls it with the sequences to which it gives blocks for the layers with attention.

A block holds keys and values of certain tokens, and a state sums up all tokens so far. So a prefix can be continued only where
its state was kept: a checkpoint, at the end of a block. A hit is the longest cached prefix that ends at a checkpoint. A step
keeps at most one more state than it needs, at the last end of a block among its tokens. If a step's last token ends a block,
its state becomes a checkpoint as it is.

    tokens       [ the cat sat on | the mat and it | was ]       block_size 4, a prompt of nine tokens in one step
    checkpoints                                    ^             after eight tokens, for another prompt that begins so
    slot                                                ^        after nine tokens, which the next step reads

State slots (short: slots) are counted like blocks. A sequence writes to the slot that it reads, unless this is a checkpoint or
shared with another sequence: then it takes a new slot. Each draft has a slot, and the last accepted draft's stays. Checkpoints
that no sequence has are taken when no slot is empty, the least recently used first. If there is none, a sequence overwrites its
own checkpoint: running needs a slot for each sequence, and two where forks part.

A slot that a step leaves is released by the next allocate of its sequence (_settle), not by the step. So no other sequence
writes to it while it is still being read.
"""

from collections.abc import Callable

from nanoinfer.features.hybrid.prefix_index import HybridIndex
from nanoinfer.features.hybrid.tables import NO_SLOT, HybridTables, tables_of
from nanoinfer.scheduling.sequence import Sequence

WINDOW = 2  # the window of the states' group: a query reaches only the token before it, so a prefix needs only its end


class StateSlots:
    """Owns the last cache group of a prefix index, and the state slots in the HybridTables of each sequence."""

    def __init__(self, index: HybridIndex) -> None:
        self._index, self._number = index, len(index.groups) - 1
        self.pool, self._ids = index.groups[-1].pool, index.groups[-1].ids
        self.before_drop: Callable[[bytes], object] = lambda key: None  # called before a checkpoint leaves the memory

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        num_missing, record = len(_unknown(seq, num_new_tokens)), tables_of(seq)
        slot = record.state_writes.get(seq.num_computed_tokens, record.state_slot)
        if slot == record.state_slot and record.state_writes.keys() - {seq.num_computed_tokens}:
            pass  # allocate has already been called for this step
        elif slot == NO_SLOT or self.pool.ref_counts[slot] > 1:
            num_missing += 1
        return num_missing <= self.pool.num_free

    # ---- changes

    def share(self, slot: int, seq: Sequence) -> None:
        """Let a sequence begin with the state in this slot."""
        self.pool.hold([slot])
        tables_of(seq).state_slot = slot

    def allocate(self, seq: Sequence, num_new_tokens: int, *, keeps: bool) -> None:
        """Take the slots that a step writes: after its known tokens, after each further one, for a checkpoint if `keeps`."""
        record = self._settle(seq)
        start, unknown = seq.num_computed_tokens, _unknown(seq, num_new_tokens)
        end = start + num_new_tokens - len(unknown)
        of_unknown = {position: self.take() for position in unknown}
        writes = {end: self._slot_to_write(record.state_slot)} | of_unknown
        boundary = end - end % self._index.block_size
        if start < boundary < end and keeps and self.pool.num_free:
            writes = {boundary: self.take()} | writes
        record.state_writes = writes

    def cache_finished(self, seq: Sequence, num_tokens: int) -> None:
        """Add the states at the ends of the sequence's cached blocks to the prefix index."""
        for position, slot in tables_of(seq).state_writes.items():
            num_blocks, rest = divmod(position, self._index.block_size)
            if rest or position > num_tokens or num_blocks > len(seq.prefix_keys):
                continue
            block = self._index.further(seq.prefix_keys[: num_blocks - 1], seq.token_ids, position, seq.cache_salt)
            if self._index.enter([*block], [slot], self._number):
                before = self._ids.get(seq.prefix_keys[num_blocks - 2], NO_SLOT)
                if position - self._index.block_size > len(seq.prompt_token_ids) and before in self.pool.reusable:
                    # While a text grows, only its newest checkpoint is useful, so the previous checkpoint is reused first.
                    self.pool.reusable.move_to_end(before, last=False)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.share(self._settle(parent).state_slot, child)

    def free(self, seq: Sequence) -> None:
        self._release(tables_of(seq), NO_SLOT)

    def forget(self, key: bytes) -> None:
        """Drop the checkpoint with this key, if it exists."""
        if key in self._ids:
            self._index.remove_from(self._number, key)

    def take(self) -> int:
        """Take a free slot. If none is empty, drop the least recently used checkpoint."""
        if not self.pool.empty:
            key = self._index.keys[self.pool.contents[next(iter(self.pool.reusable))]]
            self.before_drop(key)
            self.forget(key)
        return self.pool.take()

    # ---- inside

    def _settle(self, seq: Sequence) -> HybridTables:
        """Keep the slot with the state after the sequence's computed tokens, and release the other slots of its last step."""
        record = tables_of(seq)
        self._release(record, record.state_writes.get(seq.num_computed_tokens, record.state_slot))
        return record

    def _release(self, record: HybridTables, kept: int) -> None:
        slots = dict.fromkeys((record.state_slot, *record.state_writes.values()))  # each slot once, in a defined order
        self.pool.drop([slot for slot in slots if slot not in (kept, NO_SLOT)])
        record.state_slot, record.state_writes = kept, {}

    def _slot_to_write(self, slot: int) -> int:
        """Return the slot for a sequence's next state: its own, unless a checkpoint or another sequence shares it."""
        if slot == NO_SLOT or self.pool.ref_counts[slot] > 1 or (self.pool.contents[slot] and self.pool.num_free):
            return self.take()
        if self.pool.contents[slot]:
            self.forget(self._index.keys[self.pool.contents[slot]])
        return slot


def _unknown(seq: Sequence, num_new_tokens: int) -> range:
    """Return, for each new token that is not known yet, such as a draft, the sequence's number of tokens with it."""
    end = seq.num_computed_tokens + num_new_tokens
    return range(min(end, seq.num_tokens) + 1, end + 1)
