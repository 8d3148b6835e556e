"""What a cache would hold while a load runs: if every step reads what it should, no text depends on the plans.

In: the plans that an executor receives. Out: an AssertionError as soon as a block table or a state's slot leads to other tokens
than those of its sequence. A token's keys and values depend on all tokens before it, so a slot holds a digest of these.

It is the memory of nanoinfer_lab/testing/machines.py for all that a load may have: tokens in flight, drafts, windows, states
and a store.
"""

from tests.golden.loads import Load, mixed, token_at


class Memory:
    def __init__(self, load: Load):
        self.size, self.windows, self.has_states = load.block_size, load.windows, bool(load.num_slots)
        self.blocks = [[None] * self.size for _ in range(load.num_blocks)]
        self.states = [None] * load.num_slots

    def compute(self, plan, tables_of, states_of) -> None:
        """Copy, write and read what a step of this plan would."""
        for source, target in plan.block_copies:
            self.blocks[target] = list(self.blocks[source])
        digests = {item.sequence: self._digests(item) for item in plan.scheduled}
        for item in plan.scheduled:
            start, of_tokens = item.sequence.num_computed_tokens, digests[item.sequence]
            for group, table in enumerate(tables_of(item.sequence)):
                for i in range(start, start + item.num_packed_tokens):
                    self.blocks[table[i // self.size]][i % self.size] = group, of_tokens[i]
        for item in plan.scheduled:
            self._check(item, digests[item.sequence], tables_of(item.sequence))
        if self.has_states:
            for item in plan.scheduled:
                start, (slot, _) = item.sequence.num_computed_tokens, states_of(item.sequence)
                assert (slot < 0) == (start == 0)
                assert slot < 0 or self.states[slot] == digests[item.sequence][start - 1], "another state"
            for item in plan.scheduled:
                for num_tokens, slot in states_of(item.sequence)[1].items():
                    self.states[slot] = digests[item.sequence][num_tokens - 1]

    def _check(self, item, of_tokens, tables) -> None:
        start = item.sequence.num_computed_tokens
        for group, (table, window) in enumerate(zip(tables, self.windows, strict=True)):
            for i in range(0 if window is None else max(start - window + 1, 0), start + item.num_packed_tokens):
                assert self.blocks[table[i // self.size]][i % self.size] == (group, of_tokens[i]), "other keys and values"

    def _digests(self, item) -> list[int]:
        """The digest of the tokens up to each of those that the step computes: known ones, those in flight, and drafts."""
        seq, digest, digests = item.sequence, 0, []
        in_flight = [token_at(seq.seed, len(seq.token_ids) + i) for i in range(seq.num_tokens - len(seq.token_ids))]
        first = mixed(*(seq.cache_salt or "").encode())
        for token_id in [first, *seq.token_ids, *in_flight, *item.draft_token_ids]:
            digest = mixed(digest, token_id)
            digests.append(digest)
        return digests[1:]
