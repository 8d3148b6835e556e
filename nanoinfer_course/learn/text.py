"""The cases of the tasks around the model: stop strings and drafts. They need no tensors."""

import random
from collections.abc import Iterator
from functools import partial

from nanoinfer.engine.stopping import StopStrings
from nanoinfer.features.drafts.ngram import NGramIndex
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduling.sequence import Sequence
from nanoinfer.scheduling.step_plan import ScheduledSequence
from nanoinfer_course.learn.check import Case, calling
from nanoinfer_course.learn.workbook import Version


def _stops(rng: random.Random, longest: int) -> list[str]:
    return ["".join(rng.choice("ab") for _ in range(rng.randint(1, longest))) for _ in range(rng.randint(1, 2))]


def _held_cases() -> Iterator[Case]:
    def observe(version: Version, text: str, stops: list[str]) -> object:
        strings = StopStrings(stops)
        strings.text = text
        return version(strings)

    for seed in range(300):
        rng = random.Random(seed)
        stops, text = _stops(rng, 1 + seed // 60), "".join(rng.choice("aab") for _ in range(rng.randint(0, 1 + seed // 40)))
        yield Case({"self._stops": stops, "self.text": text}, partial(observe, text=text, stops=stops))


def _stop_cases() -> Iterator[Case]:
    """Yield cases whose text arrives in pieces: what each call returns, and the text after it."""

    def observe(version: Version, stops: list[str], pieces: list[str], examine: list[bool]) -> object:
        text, seen = StopStrings(stops), {}
        for number, (piece, is_examined) in enumerate(zip(pieces, examine, strict=True), 1):
            stop = version(text, piece, examine=is_examined)
            seen[f"result of call {number}, and self.text after it"] = (stop, text.text)
            if stop is not None:
                break
        return seen

    for seed in range(400):
        rng = random.Random(seed)
        stops = _stops(rng, 1 + seed // 100)
        pieces = ["".join(rng.choice("aab") for _ in range(rng.randint(0, 3))) for _ in range(1 + seed // 60)]
        examine = [seed % 5 != 4 or number > 1 for number in range(len(pieces))]
        given = {"self._stops": stops, "piece of each call": pieces, "examine": examine}
        yield Case(given, partial(observe, stops=stops, pieces=pieces, examine=examine))


def _accept_cases() -> Iterator[Case]:
    seq = Sequence("r", [5], SamplingParams(), seed=0, max_num_tokens=99)
    for seed in range(120):
        rng = random.Random(seed)
        drafts = tuple(rng.randrange(2) for _ in range(seed // 20))
        sampled = [rng.randrange(2) for _ in range(len(drafts) + 1)]
        case = calling(self=ScheduledSequence(seq, 1, drafts), sampled_token_ids=sampled)
        yield Case({"self.draft_token_ids": drafts, "sampled_token_ids": sampled}, case.observe)


def _ngram_cases() -> Iterator[Case]:
    """Yield cases that ask an index again as its sequence grows."""

    def observe(version: Version, sizes: range, lengths: list[int], tokens: list[int], limit: int) -> object:
        index = NGramIndex(sizes)
        found: dict[str, object] = {f"of the first {n} tokens": version(index, tokens[:n], limit) for n in lengths}
        return found | {"self._num_indexed": index._num_indexed}

    for seed in range(200):
        rng = random.Random(seed)
        tokens = [rng.randrange(1 + seed % 3) for _ in range(2 + seed // 20)]
        sizes = range(rng.randint(1, 2), rng.randint(3, 4))
        lengths = sorted(rng.sample(range(1, len(tokens) + 1), rng.randint(1, min(3, len(tokens)))))
        limit = rng.randint(1, 6)
        given = {"self._sizes": sizes, "the tokens": tokens, "how many of them each call gets": lengths, "limit": limit}
        yield Case(given, partial(observe, sizes=sizes, lengths=lengths, tokens=tokens, limit=limit))


CASES = {
    "accept_drafts": _accept_cases,
    "held_text": _held_cases,
    "stop_string": _stop_cases,
    "ngram_draft": _ngram_cases,
}
