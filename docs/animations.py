"""Draw the animations of the site's first page from recorded runs: attention, paging, continuous batching, drafts.

`python docs/animations.py` writes them to docs/pictures/. Each is an SVG whose parts appear and vanish by its own style sheet,
in the colours of the notebooks. Seeds are fixed, so the pictures are the same in every run.
"""

import sys
from collections.abc import Iterable, Iterator
from html import escape
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.attention.dense import DenseAttention, Keys, Queries
from nanoinfer.features.tracing import (
    BatchBuilt,
    BlocksAllocated,
    BlocksFreed,
    BlocksShared,
    RequestAdded,
    StepScheduled,
    StepTimed,
    TokenAppended,
    TokensDrafted,
)
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.tokenization.tokenizer import Tokenizer
from nanoinfer_lab.cli.demos import DEMOS

sys.path.insert(0, str(Path(__file__).parents[1] / "notebooks"))
from drawing import BLUE, COLOURS, GREEN, GREY, ORANGE, PURPLE, RED, TINT
from gallery import record_demo

FOLDER = Path(__file__).with_name("pictures")
WIDTH, CHAR = 410, 6.6  # pixels: of a picture, and of a character
NUM_PAUSE = 4  # frames at the end
T = TypeVar("T")
FILLS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)


class Movie:
    """A picture with frames. A part is seen from the frame `first` to the one before `end`. None: to the end.

    What the last frame shows stays for a pause.
    """

    def __init__(self, height: int, num_frames: int, alt: str, *, seconds: float = 0.6) -> None:
        self.height, self.num_frames, self.alt, self.seconds = height, num_frames + NUM_PAUSE, alt, seconds
        self._parts: list[str] = []
        self._spans: set[tuple[int, int]] = set()

    def add(self, element: str, first: int = 0, end: int | None = None) -> None:
        span = first, self.num_frames if end is None or end >= self.num_frames - NUM_PAUSE else end
        self._spans.add(span)
        self._parts.append(element.replace(" ", f' class="f{span[0]}-{span[1]}" ', 1))

    def box(
        self, x: float, y: float, width: float, fill: str, first: int = 0, end: int | None = None, height: int = 16
    ) -> None:
        look = f'fill="{fill}" fill-opacity="{TINT}" stroke="{fill}"'
        self.add(f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height}" {look}/>', first, end)

    def text(self, x: float, y: float, words: str, first: int = 0, end: int | None = None) -> None:
        self.add(f'<text x="{x:.4g}" y="{y:.4g}" xml:space="preserve">{escape(words)}</text>', first, end)

    def svg(self) -> str:
        rules = ["text{font:11px monospace;fill:currentColor}[class^=f]{animation:0s step-end infinite}"]
        for first, end in sorted(self._spans - {(0, self.num_frames)}):
            name, is_last = f"f{first}-{end}", end == self.num_frames
            start, stop = 100 * first / self.num_frames, 100 * end / self.num_frames
            before = "0%{opacity:0}" if first else ""
            keys = f"{before}{start:.4g}%{{opacity:1}}{stop:.4g}%{{opacity:{int(is_last)}}}"
            rules.append(f"@keyframes {name}{{{keys}}}.{name}{{animation-name:{name}}}")
            if not is_last:
                rules.append(f"@media(prefers-reduced-motion){{.{name}{{opacity:0}}}}")
        rules.append(f"[class^=f]{{animation-duration:{self.num_frames * self.seconds:.4g}s}}")
        rules.append("@media(prefers-reduced-motion){[class^=f]{animation-name:none!important}}")
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" aria-label="{escape(self.alt)}"'
        paper = '<rect class="paper" width="100%" height="100%"/>'
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        return f"{head} {size}><style>{COLOURS}{''.join(rules)}</style>{paper}{''.join(self._parts)}</svg>\n"


class Watching(DenseAttention):
    """Keeps the weights of a layer's attention, [num_heads, num_tokens, num_tokens]."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def __call__(self, layer: int, q: Queries, k: Keys, v: Keys, **options: object) -> Queries:
        if layer == self.layer:
            scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
            self.weights = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        return super().__call__(layer, q, k, v)


def draw_attention() -> Movie:
    """How much each new token attends to those before it, whose keys and values are kept."""
    recorder = Recorder()
    LLM(tracer=recorder, dtype="float32").generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=10), use_tqdm=False
    )
    [request] = recorder.of(RequestAdded)
    new = recorder.of(TokenAppended)
    ids = [*request.prompt_token_ids, *(token.token_id for token in new)]
    texts = [*request.tokens, *(token.token for token in new)]
    watching, num_prompt = Watching(layer=1), len(request.tokens)
    with torch.no_grad():
        load_model(Checkpoint.open("tiny-gpt2"))(torch.tensor(ids), torch.arange(len(ids)), watching)
    weights: Tensor = watching.weights[0]
    movie = Movie(190, len(new), "Attention: arcs from each new token back to the tokens before it, whose keys and values stay")
    movie.text(8, 18, "Attention: a new token looks back")
    ends = list(accumulate((CHAR * len(text) for text in texts), initial=8))
    for at, (left, right) in enumerate(pairwise(ends)):
        first = max(at - num_prompt + 1, 0)  # the frame in which the token is there
        middle = (left + right) / 2
        movie.text(left, 120, texts[at], first)
        movie.box(left + 2, 132, right - left - 4, BLUE, first, height=12)
        movie.box(left + 2, 148, right - left - 4, PURPLE, first, height=12)
        if at < num_prompt - 1 or at == len(ids) - 1:
            continue
        for to in range(at + 1):
            width = 8 * float(weights[at, to])
            target = (ends[to] + ends[to + 1]) / 2
            top = 104 - 0.3 * (middle - target)
            if width > 0.2:
                arc = f'<path d="M{middle:.4g} 106Q{(middle + target) / 2:.4g} {top:.4g} {target:.4g} 106" fill="none" '
                movie.add(f'{arc}stroke="{ORANGE}" stroke-width="{width:.1f}"/>', first, first + 1)
    movie.text(8, 180, "keys (blue) and values (purple) are kept: the KV cache")
    return movie


def spans(values: Iterable[T]) -> Iterator[tuple[int, int, T]]:
    """The first frame, the frame after the last, and the value, of each run of equal values of successive frames."""
    first = 0
    for value, run in groupby(values):
        end = first + len(list(run))
        yield first, end, value
        first = end


def draw_paging() -> Movie:
    """The blocks of two sequences that begin alike, in every step."""
    recorder, _ = record_demo(DEMOS["sharing"])
    tables: dict[str, tuple[int, ...]] = {"0": (), "1": ()}
    states = []  # the block tables in each step
    written: dict[int, int] = {}  # slot -> the step that writes it
    for event in recorder.events:
        if isinstance(event, BlocksShared | BlocksAllocated):
            tables[event.sequence_id] += event.blocks
        elif isinstance(event, BlocksFreed):
            tables[event.sequence_id] = ()
        elif isinstance(event, StepScheduled):
            states.append(dict(tables))
        elif isinstance(event, BatchBuilt):
            written |= {slot: len(states) - 1 for slot in event.slot_mapping if slot not in written}
    block_size, colours = DEMOS["sharing"].engine["block_size"], {"0": BLUE, "1": ORANGE}
    movie = Movie(
        190, len(states), "Paging: the block tables of two sequences, which share the blocks of their common beginning"
    )
    movie.text(8, 18, "Paging: memory in blocks of 8 tokens")
    for row, (name, colour) in enumerate(colours.items()):
        movie.box(8, 28 + 20 * row, 12, colour, height=12)
        for first, end, table in spans(state[name] for state in states):
            movie.text(26, 38 + 20 * row, f"block table {' '.join(map(str, table)) or '-'}", first, end)
    for place, block in enumerate(sorted({block for state in states for table in state.values() for block in table})):
        x, y = 8 + 66 * (place % 6), 92 + 48 * (place // 6)
        movie.text(x, y - 5, str(block))
        for first, end, held in spans(tuple(name for name in state if block in state[name]) for state in states):
            colour = GREY if not held else GREEN if len(held) == 2 else colours[held[0]]
            movie.box(x, y, 7 * block_size, colour, first, end)
            if len(held) == 2:
                movie.text(x + 22, y - 5, "×2", first, end)
            for slot in range(block_size):
                since = max(first, written.get(block * block_size + slot, end))
                if held and since < end:
                    movie.box(x + 7 * slot, y, 7, colour, since, end)
    movie.text(8, 182, "green: computed once, in both tables (prefix cache)")
    return movie


LENGTHS = (12, 4, 6, 9, 3, 7)  # tokens of six answers


def record_batches(groups: Iterable[slice]) -> list[tuple[str, ...]]:
    """The sequences of each step, if each group of the six requests is given to the engine after the one before."""
    recorder = Recorder()
    llm = LLM(tracer=recorder, dtype="float32", max_num_seqs=3)
    params = [SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for num in LENGTHS]
    for group in groups:
        llm.generate(["Once upon a time"] * len(params[group]), params[group], use_tqdm=False)
    return [step.sequence_ids for step in recorder.of(StepScheduled)]


def draw_continuous() -> Movie:
    """Six answers in batches of three that wait for their longest, and with a place taken as soon as it is free."""
    runs = {
        "static batches of 3": record_batches([slice(0, 3), slice(3, 6)]),
        "continuous batching": record_batches([slice(6)]),
    }
    num_frames = max(map(len, runs.values()))
    movie = Movie(190, num_frames, "Continuous batching: six answers need fewer steps if a free place is taken at once")
    for row, (name, steps) in enumerate(runs.items()):
        top = 8 + 90 * row
        movie.text(8, top + 10, f"{name}:")
        for frame in range(num_frames):
            movie.text(154, top + 10, f"{min(frame + 1, len(steps))} steps", frame, frame + 1)
        for frame, names in enumerate(steps):
            for name in names:
                movie.box(8 + 18 * frame, top + 16 + 11 * int(name), 17, FILLS[int(name)], frame, height=10)
    return movie


def draw_drafts() -> Movie:
    """What a draft model guesses in each step, and what of it is right."""
    recorder, _ = record_demo(DEMOS["drafts"])
    tokenizer = Tokenizer.load(Checkpoint.open("tiny-gpt2").path)
    drafts = {event.step: event.draft_token_ids[0] for event in recorder.of(TokensDrafted)}
    appended: list[list[TokenAppended]] = [[]]
    for event in recorder.events:
        if isinstance(event, TokenAppended):
            appended[-1].append(event)
        elif isinstance(event, StepTimed):
            appended.append([])
    num_steps = 7  # enough for three lines of text
    movie = Movie(
        190, 2 * num_steps, "Drafts: a small model guesses five tokens, and one step of the large one checks all", seconds=1
    )
    movie.text(8, 18, "Drafts: one step checks five guesses")
    column = line = 0

    def put(words: str, colour: str, first: int, end: int | None = None) -> None:
        nonlocal column, line
        if column + len(words) > 58:
            column, line = 0, line + 1
        x, y = 10 + CHAR * column, 34 + 24 * line
        movie.box(x, y, CHAR * len(words), colour, first, end)
        movie.text(x, y + 12, words, first, end)
        column += len(words)

    num_tokens = 0
    for step in range(num_steps):
        frame, guesses, tokens = 2 * step, drafts.get(step, ()), appended[step]
        before = column, line
        for guess in guesses:
            put(tokenizer.token_text(guess), GREY, frame, frame + 1)
        column, line = before
        for at, token in enumerate(tokens):
            put(token.token, GREEN if at < len(guesses) and guesses[at] == token.token_id else BLUE, frame + 1)
        movie.text(276, 18, f"step {step + 1}, tokens: {num_tokens}", frame, frame + 1)
        num_tokens += len(tokens)
        movie.text(276, 18, f"step {step + 1}, tokens: {num_tokens}", frame + 1, frame + 2)
    movie.text(8, 182, "grey: guessed, green: right, blue: the model's own")
    return movie


MOVIES = {"attention": draw_attention, "paging": draw_paging, "continuous": draw_continuous, "drafts": draw_drafts}

if __name__ == "__main__":
    for name, draw in MOVIES.items():
        (FOLDER / f"animation-{name}.svg").write_text(draw().svg(), encoding="utf-8")
