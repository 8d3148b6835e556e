"""The tasks around the model: stop strings, drafts, a grammar's mask, beams."""

import random
from collections.abc import Iterator
from functools import partial

import torch

from nanoinfer.engine.speculative.ngram import NGramIndex
from nanoinfer.engine.stopping import StopStrings
from nanoinfer.lab.learn.check import Case, Task, calling
from nanoinfer.lab.learn.sampling import batch_of
from nanoinfer.lab.learn.workbook import Function, Version
from nanoinfer.sampling.batch import StageEntries
from nanoinfer.sampling.grammar_mask import GrammarMask
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence

_STOPPING = "nanoinfer.engine.stopping"


def _text_cases(name: str) -> Iterator[Case]:
    """Yield cases whose text arrives in pieces: what is shown after each piece, and where the text stops."""

    def observe(version: Version, stops: list[str], pieces: list[str], include: bool, examine: list[bool]) -> object:
        text: StopStrings = type("Learners", (StopStrings,), {name: version})(stops, include_in_output=include)
        seen: dict[str, object] = {}
        for piece, is_examined in zip(pieces, examine, strict=True):
            stop = text.push(piece, examine=is_examined)
            seen[f"after piece {len(seen)} {piece!r}"] = (stop, text.release(everything=stop is not None), text.held)
            if stop is not None:
                break
        return seen

    for seed in range(400):
        rng = random.Random(seed)
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 1 + seed // 100))) for _ in range(rng.randint(1, 2))]
        pieces = ["".join(rng.choice("aab") for _ in range(rng.randint(0, 3))) for _ in range(1 + seed // 60)]
        include = seed % 3 == 0
        examine = [seed % 5 != 4 or number > 1 for number in range(len(pieces))]
        words = f"stop strings {stops}, pieces {pieces}, include_in_output={include}, examine={examine}"
        yield Case(words, partial(observe, stops=stops, pieces=pieces, include=include, examine=examine))


def _accept_cases() -> Iterator[Case]:
    seq = Sequence("r", [5], SamplingParams(), seed=0, max_num_tokens=99)
    for seed in range(120):
        rng = random.Random(seed)
        drafts = tuple(rng.randrange(2) for _ in range(seed // 20))
        sampled = [rng.randrange(2) for _ in range(len(drafts) + 1)]
        item = ScheduledSequence(seq, 1, drafts)
        yield Case(f"drafts {list(drafts)}, sampled {sampled}", calling(item, sampled))


def _ngram_cases() -> Iterator[Case]:
    """Yield cases that ask an index again as its sequence grows."""

    def observe(version: Version, sizes: range, lengths: list[int], tokens: list[int], limit: int) -> object:
        index = NGramIndex(sizes)
        return {f"of the first {n} tokens": version(index, tokens[:n], limit) for n in lengths}

    for seed in range(200):
        rng = random.Random(seed)
        tokens = [rng.randrange(1 + seed % 3) for _ in range(2 + seed // 20)]
        sizes = range(rng.randint(1, 2), rng.randint(3, 4))
        lengths = sorted(rng.sample(range(1, len(tokens) + 1), rng.randint(1, min(3, len(tokens)))))
        limit = rng.randint(1, 6)
        words = f"tokens {tokens}, n-grams of {list(sizes)}, at most {limit} drafts"
        yield Case(words, partial(observe, sizes=sizes, lengths=lengths, tokens=tokens, limit=limit))


def _mask_cases() -> Iterator[Case]:
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        num_rows, vocab = 1 + seed // 15, 2 + seed // 12
        logits = torch.randn(num_rows, vocab, generator=generator)
        rows = torch.randperm(num_rows, generator=generator)[: 1 + seed % num_rows].sort().values
        forbidden = torch.rand(len(rows), vocab, generator=generator) < 0.5
        words = f"logits [{num_rows}, {vocab}], rows {rows.tolist()}, forbidden {forbidden.int().tolist()}"
        entries = StageEntries(grammar=GrammarMask(rows, forbidden))
        yield Case(words, calling(logits, batch_of(num_rows, entries)))
    yield Case("no row has a grammar", calling(torch.ones(1, 2), batch_of(1)))


TASKS = [
    Task(
        "held_text",
        Function(_STOPPING, "StopStrings._num_held"),
        "08",
        "how much text must wait, because it may be the beginning of a stop string.\n\n"
        'self.text is the text so far, self._stops the stop strings. With "The E" and the stop "END", 1 character is held.',
        (
            "The longest suffix of the text that is a proper prefix of some stop string.",
            "A prefix of a stop string has at most len(stop) - 1 characters. Try long ones first: text.endswith(stop[:n]).",
        ),
        lambda: _text_cases("_num_held"),
    ),
    Task(
        "stop_string",
        Function(_STOPPING, "StopStrings.push"),
        "08",
        "append text, and cut it where a stop string is complete.\n\n"
        "self.text grows. self._stops are the strings, and self._include_in_output says whether the matched one stays.",
        (
            "Only a match that ends in the new piece counts. It may begin len(stop) - 1 characters before it.",
            "Of several matches, the match that ends first wins, and of those that end together the first in the list.",
            "With examine=False, or an empty piece, nothing is searched.",
        ),
        lambda: _text_cases("push"),
    ),
    Task(
        "accept_drafts",
        Function("nanoinfer.scheduling.step_plan", "ScheduledSequence.num_accepted"),
        "13",
        "how many guessed tokens were right.\n\n"
        "self.draft_token_ids are the guesses. The token sampled first is what the first guess should be.",
        ("Compare one by one, and stop at the first that is wrong: all after it were computed after a wrong token.",),
        _accept_cases,
    ),
    Task(
        "ngram_draft",
        Function("nanoinfer.engine.speculative.ngram", "NGramIndex.continuation"),
        "13",
        "guess that the text goes on as it did when its newest tokens last occurred.\n\n"
        "self._followers maps an n-gram to the index of the token behind it, self._sizes are the lengths, and\n"
        "self._num_indexed counts the tokens that have been entered by earlier calls.",
        (
            "Enter every new token: for each size, the n-gram before it leads to its index. Later ones replace earlier ones.",
            "Look the end of the text up, the longest n-gram first.",
            "If fewer than `limit` tokens follow, repeat them.",
        ),
        _ngram_cases,
    ),
    Task(
        "token_mask",
        Function("nanoinfer.sampling.stages", "keep_grammatical"),
        "16",
        "forbid the tokens that a grammar does not allow next.\n\n"
        "batch.entries.grammar is None, or has rows [some_rows] and forbidden [some_rows, vocab]: row rows[i] of the logits\n"
        "may not draw the ids in forbidden[i].",
        ("A forbidden id gets -inf.", "logits[rows] is a copy. What is changed there must be written back."),
        _mask_cases,
    ),
]
