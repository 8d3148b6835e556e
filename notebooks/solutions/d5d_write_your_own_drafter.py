"""Solutions of notebook d5d."""

import random
from collections import Counter

from definitions import definitions

from nanoinfer.features.drafts.ngram import NGramProposer
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.tokenization.tokenizer import Tokenizer
from nanoinfer_lab import stories

notebook = definitions("d5d_write_your_own_drafter")
LongerMemory = notebook.LongerMemory
NUM_ROUNDS = 3


def accepted(method):
    """How many drafts are accepted, and their share in each round."""
    _, metrics, shares = notebook.write_stories(method, NUM_ROUNDS)
    rounds = " ".join(f"{share:.2f}" for share in shares)
    print(f"{method.__name__:16} {metrics.num_accepted_tokens:3} of {metrics.num_draft_tokens} accepted, by round {rounds}")
    return metrics.num_accepted_tokens, shares


# Exercise 1: alone
class Alone(LongerMemory):
    def __init__(self, config):
        super().__init__(config)
        self.tables = {}  # sequence -> its followers

    def propose(self, sequences, limits):
        drafts = []
        for seq, limit in zip(sequences, limits, strict=True):
            self.followers = self.tables.setdefault(seq, {})
            drafts += super().propose([seq], [limit])
        return drafts

    def forget(self, seq):
        super().forget(seq)
        self.tables.pop(seq, None)


num_ngrams, _ = accepted(NGramProposer)
num_alone, _ = accepted(Alone)
num_shared, shared = accepted(LongerMemory)
# It is the sharing. Alone, the table is right in about as few drafts as n-grams. It accepts more only because it also looks up
# a single token, and so makes ten times as many.
assert num_ngrams < num_alone < 0.2 * num_shared


# Exercise 2: the most frequent follower
class MostFrequent(LongerMemory):
    def __init__(self, config):
        super().__init__(config)
        self.counts = {}

    def read(self, seq):
        for i in range(self.num_read.get(seq, 1), len(seq.token_ids)):
            for context in self.contexts(seq.token_ids, i):
                counter = self.counts.setdefault(context, Counter())
                counter[seq.token_ids[i]] += 1
                self.followers[context] = counter.most_common(1)[0][0]
        self.num_read[seq] = len(seq.token_ids)


num_frequent, _ = accepted(MostFrequent)
# A token is drawn with its probability, and the most frequent follower is the likeliest as far as the table knows. The last one
# is a single draw.
assert num_frequent > num_shared


# Exercise 3: read before the first request
class WellRead(LongerMemory):
    def __init__(self, config):
        super().__init__(config)
        tokenizer = Tokenizer.load(Checkpoint.open("tiny-qwen3").path)
        for i in range(500):
            ids = tokenizer.encode(stories.write(random.Random(i)))
            for k in range(1, len(ids)):
                self.followers.update(dict.fromkeys(self.contexts(ids, k), ids[k]))


_, well_read = accepted(WellRead)
# From the first round on more than twice as many are right. The engine's own stories are far fewer, so their table is still
# behind in the last round.
assert well_read[0] > 2 * shared[0]
assert well_read[-1] > shared[-1]
