"""Which slot holds the state of which sequence, for models whose layers keep a state instead of keys and values.

In and out: as block_manager.py, whose methods these extend. The blocks stay as they are there, for the layers with attention.

A block holds keys and values of certain tokens, and a state sums up all tokens so far. So a prefix can be continued only where
its state was kept: a checkpoint, at the end of a block. A hit is the longest prefix of cached blocks that has one. A step keeps
at most one more state than it needs, at the last end of a block among its tokens. A state that a step leaves at the end of a
block becomes a checkpoint as it is.

    tokens       [ the cat sat on | the mat and it | was ]       block_size 4, a prompt of nine tokens in one step
    checkpoints                                    ^             after eight tokens, for another prompt that begins so
    slot                                                ^        after nine tokens, which the next step reads

Slots are counted like blocks. A sequence writes to the slot that it reads, unless it is a checkpoint or another sequence has it
as well, and then to another one. Drafts have a slot each, and that of the last accepted one stays. Checkpoints that no sequence
has are taken when no slot is empty, the least recently used first. If there is none, a sequence writes over its own checkpoint:
running needs one slot for each sequence, and two where forks part.

A slot that a step leaves is released by the next allocate of its sequence (_settle), not by the step. So no other sequence
writes to it while it is still being read.
"""

from collections import OrderedDict
from typing import Any

from nanoinfer.scheduling.block_manager import BlockManager
from nanoinfer.scheduling.sequence import Sequence

NO_SLOT = -1  # of a sequence without a computed token


def with_states(base: type[BlockManager], num_slots: int) -> type[BlockManager]:
    """Return a block manager that also has num_slots slots for states."""
    return type(base.__name__, (StateSlots, base), {"num_slots": num_slots})


class StateSlots(BlockManager):
    """Owns slots 0 .. num_slots - 1, and every Sequence.state_slot and Sequence.state_writes."""

    num_slots: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slot_refs = [0] * self.num_slots  # the number of sequences that have it
        self._empty_slots = list(range(self.num_slots))
        self._reusable_slots: OrderedDict[int, None] = OrderedDict()  # checkpoints alone, the least recently used first
        self._checkpoints: dict[int, int] = {}  # key of the last block -> slot
        self._kept: dict[int, int] = {}  # slot -> its key in _checkpoints

    @property
    def num_free_slots(self) -> int:
        """The number of slots that no sequence has, some of which hold checkpoints until they are taken."""
        return len(self._empty_slots) + len(self._reusable_slots)

    # ---- queries

    def match_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> list[tuple[int, int]]:
        """Return the longest chain of cached blocks whose end has a checkpoint."""
        matched = super().match_prefix(token_ids, cache_salt)
        while matched and matched[-1][0] not in self._checkpoints:
            matched.pop()
        return matched

    def can_start(self, num_tokens: int, prefix: list[tuple[int, int]], *, num_kept_free: int = 0) -> bool:
        return self.num_free_slots > 0 and super().can_start(num_tokens, prefix, num_kept_free=num_kept_free)

    def can_allocate(self, seq: Sequence, num_new_tokens: int) -> bool:
        num_missing = len(_drafts(seq, num_new_tokens))
        slot = seq.state_writes.get(seq.num_computed_tokens, seq.state_slot)
        if slot == seq.state_slot and seq.state_writes.keys() - {seq.num_computed_tokens}:
            pass  # allocate was called for this step
        elif slot == NO_SLOT or self._slot_refs[slot] > 1:
            num_missing += 1
        return num_missing <= self.num_free_slots and super().can_allocate(seq, num_new_tokens)

    # ---- changes

    def start(self, seq: Sequence, prefix: list[tuple[int, int]]) -> None:
        super().start(seq, prefix)
        if prefix:
            self._share(self._checkpoints[prefix[-1][0]], seq)

    def allocate(self, seq: Sequence, num_new_tokens: int) -> list[tuple[int, int]]:
        """Allocate blocks, and the slots that the step writes: after its known tokens, after each draft, and a checkpoint's."""
        copies = super().allocate(seq, num_new_tokens)
        self._settle(seq)
        start, drafts = seq.num_computed_tokens, _drafts(seq, num_new_tokens)
        end = start + num_new_tokens - len(drafts)
        of_drafts = {position: self._take_slot() for position in drafts}
        writes = {end: self._slot_to_write(seq)} | of_drafts
        boundary = end - end % self.block_size
        if start < boundary < end and self.enable_prefix_caching and seq.reader is None and self.num_free_slots:
            writes = {boundary: self._take_slot()} | writes
        seq.state_writes = writes
        return copies

    def cache_finished_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add blocks to the prefix cache, and the states at their ends."""
        super().cache_finished_blocks(seq, num_tokens)
        for position, slot in seq.state_writes.items():
            num_blocks, rest = divmod(position, self.block_size)
            if rest or position > num_tokens or num_blocks > len(seq.prefix_keys):
                continue
            key = seq.prefix_keys[num_blocks - 1]
            if key not in self._checkpoints:
                self._checkpoints[key], self._kept[slot] = slot, key
                before = self._checkpoints.get(seq.prefix_keys[num_blocks - 2], NO_SLOT)
                if position - self.block_size > len(seq.prompt_token_ids) and before in self._reusable_slots:
                    # While a text grows, its newest checkpoint is the useful one, so the one before it is taken first.
                    self._reusable_slots.move_to_end(before, last=False)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        super().fork(parent, child)
        self._settle(parent)
        self._share(parent.state_slot, child)

    def free(self, seq: Sequence) -> None:
        super().free(seq)
        for slot in dict.fromkeys((seq.state_slot, *seq.state_writes.values())):  # each once, in an order that is defined
            self._release(slot)
        seq.state_slot, seq.state_writes = NO_SLOT, {}

    def forget_cached(self, seq: Sequence) -> None:
        """Remove the sequence's blocks and states from the prefix cache."""
        for key in seq.prefix_keys:
            self._forget(key)
        super().forget_cached(seq)

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        for key in list(self._checkpoints):
            self._forget(key)

    def evict(self, block: int) -> None:
        key, _ = self._cached[self._content[block]]
        super().evict(block)
        self._forget(key)

    # ---- inside

    def _settle(self, seq: Sequence) -> None:
        """Keep the slot with the state after the sequence's computed tokens, and release the others of its last step."""
        current = seq.state_writes.pop(seq.num_computed_tokens, seq.state_slot)
        for slot in dict.fromkeys((seq.state_slot, *seq.state_writes.values())):
            self._release(NO_SLOT if slot == current else slot)
        seq.state_slot, seq.state_writes = current, {}

    def _slot_to_write(self, seq: Sequence) -> int:
        """Return the slot of the sequence's next state: its own, unless something else has it as well."""
        slot = seq.state_slot
        if slot == NO_SLOT or self._slot_refs[slot] > 1 or (slot in self._kept and self.num_free_slots):
            return self._take_slot()
        if slot in self._kept:
            self._forget(self._kept[slot])
        return slot

    def _share(self, slot: int, seq: Sequence) -> None:
        self._reusable_slots.pop(slot, None)
        self._slot_refs[slot] += 1
        seq.state_slot = slot

    def _take_slot(self) -> int:
        if not self._empty_slots:
            self._forget(self._kept[next(iter(self._reusable_slots))])
        slot = self._empty_slots.pop()
        self._slot_refs[slot] = 1
        return slot

    def _forget(self, key: int) -> None:
        """Drop a checkpoint, if there is one with this key."""
        if (slot := self._checkpoints.pop(key, NO_SLOT)) != NO_SLOT:
            del self._kept[slot]
            if slot in self._reusable_slots:
                del self._reusable_slots[slot]
                self._empty_slots.append(slot)

    def _release(self, slot: int) -> None:
        if slot == NO_SLOT:
            return
        self._slot_refs[slot] -= 1
        if not self._slot_refs[slot]:
            if slot in self._kept:
                self._reusable_slots[slot] = None
            else:
                self._empty_slots.append(slot)


def _drafts(seq: Sequence, num_new_tokens: int) -> range:
    """The numbers of tokens after each draft, of which a sequence has some if it gets more tokens than it knows."""
    end = seq.num_computed_tokens + num_new_tokens
    return range(min(end, seq.num_tokens) + 1, end + 1)
