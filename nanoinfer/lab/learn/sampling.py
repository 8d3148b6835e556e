"""The tasks between the logits and a token."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nanoinfer.lab.learn.check import Case, Task, calling
from nanoinfer.lab.learn.workbook import Function, Version
from nanoinfer.sampling.batch import ParameterColumns, SamplingBatch, StageEntries, TokenEntries

_STAGES = "nanoinfer.sampling.stages"
_DRAW = "nanoinfer.sampling.draw"
INF = float("inf")


def _logits(seed: int, rows: int, vocab: int, *, ties: bool = False) -> Tensor:
    """Return random logits, some of them dropped. ties: whether few values occur."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    if ties:
        logits = logits.round()
    dropped = torch.rand(rows, vocab, generator=generator) < 0.2
    dropped[:, seed % vocab] = False  # at least one token is left
    return logits.masked_fill(dropped, -INF)


def batch_of(num_rows: int, entries: StageEntries | None = None, columns: ParameterColumns | None = None) -> SamplingBatch:
    """Return the argument of a stage for rows that are not drawn here."""
    u = torch.zeros(num_rows, dtype=torch.float64)
    return SamplingBatch(columns=columns or ParameterColumns(), entries=entries or StageEntries(), u=u)


def _words(logits: Tensor) -> str:
    return f"logits {[[float(f'{x:.4g}') for x in row] for row in logits.tolist()]}"


def _columns(values: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits, and a parameter for each row: first for a single row, then for several."""
    for seed in range(160):
        rows = 1 + seed // 40
        yield _logits(seed, rows, 2 + seed // 20), torch.tensor([values[(seed + row) % len(values)] for row in range(rows)])


def _temperature_cases() -> Iterator[Case]:
    for logits, column in _columns([0.5, 2.0, 1.0, 1.2e-38, 0.7]):

        def observe(version: Version, logits: Tensor = logits, column: Tensor = column) -> object:
            divided = version(logits.clone(), column)
            return divided.double().softmax(-1) if isinstance(divided, Tensor) else divided

        yield Case(f"temperature {column.tolist()}, {_words(logits)}", observe, exact=False)
    logits, temperature = torch.tensor([[1.234567, 0.1], [3.3, -0.7]]), torch.tensor([1.0, 0.5])
    yield Case(
        f"temperature [1.0, 0.5], {_words(logits)}: the bits of the row at temperature 1",
        lambda version: version(logits.clone(), temperature)[0],
    )


def _min_p_cases() -> Iterator[Case]:
    for logits, column in _columns([0.1, 0.5, 1.0, 0.0, 0.03]):
        batch = batch_of(len(column), columns=ParameterColumns(min_p=column))
        yield Case(f"min_p {column.tolist()}, {_words(logits)}", calling(logits, batch), exact=False)
    off = _logits(1, 2, 4)
    yield Case(f"no row has min_p, {_words(off)}", calling(off, batch_of(2)))


def _top_p_cases() -> Iterator[Case]:
    for seed in range(200):
        rows, vocab = 1 + seed // 60, 2 + seed // 30
        logits = _logits(seed, rows, vocab, ties=seed % 2 == 0)
        top_p = torch.tensor([[0.5, 0.9, 1.0, 0.0, 0.1][(seed + row) % 5] for row in range(rows)], dtype=torch.float64)
        total = torch.tensor([2**33 + seed] * rows) if seed % 7 == 6 else None
        words = f"top_p {top_p.tolist()}, total {None if total is None else total.tolist()}, {_words(logits)}"
        yield Case(words, calling(logits, top_p, total))


def _argmax_cases() -> Iterator[Case]:
    for seed in range(80):
        logits = _logits(seed, 1 + seed // 30, 2 + seed // 10, ties=True)
        yield Case(_words(logits), calling(logits))
    for row in ([-INF, -INF], [float("nan"), 1.0], [1.0, INF]):
        logits = torch.tensor([row])
        yield Case(_words(logits), calling(logits))


def _draw_cases() -> Iterator[Case]:
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        rows, vocab = 1 + seed // 80, 2 + seed // 25
        weights = torch.randint(0, 5, (rows, vocab), generator=generator)
        weights[:, seed % vocab] += 1
        choices = torch.tensor([0.0, 0.25, 0.5, 0.999999999, 1 - 2**-53], dtype=torch.float64)
        u = choices[torch.randint(0, 5, (rows,), generator=generator)]
        words = f"weights {weights.tolist()}, u {u.tolist()}"
        yield Case(words, calling(weights, u))
    large, u = torch.tensor([[2**25 + 1, 2**25]]), torch.tensor([(2**25 + 0.5) / (2**26 + 1)], dtype=torch.float64)
    yield Case(f"weights {large.tolist()}, u {u.tolist()}: too large for fp32", calling(large, u))


def _penalty_cases() -> Iterator[Case]:
    """Yield cases of penalties, which read the counts of ids in the output. An id that only the prompt has counts 0."""
    for seed in range(120):
        rows, vocab = 1 + seed // 50, 2 + seed // 20
        logits = _logits(seed, rows, vocab)
        generator = torch.Generator().manual_seed(seed)
        present = (torch.rand(rows, vocab, generator=generator) < 0.5).nonzero()
        counts = torch.randint(0, 4, (len(present),), generator=generator)
        penalty = torch.tensor([[2.0, 0.5, 1.3][(seed + row) % 3] for row in range(rows)])
        words = f"penalty {penalty.tolist()}, (row, id) {present.tolist()} with counts {counts.tolist()}, {_words(logits)}"
        entries = StageEntries(token_counts=TokenEntries(present[:, 0], present[:, 1], counts))
        yield Case(words, calling(logits, batch_of(rows, entries, ParameterColumns(repetition_penalty=penalty))), False)
    off = _logits(1, 2, 4)
    yield Case(f"no row has a penalty, {_words(off)}", calling(off, batch_of(2)))
    entries = StageEntries(token_counts=TokenEntries(torch.tensor([0]), torch.tensor([0]), torch.tensor([1])))
    tiny = batch_of(1, entries, ParameterColumns(repetition_penalty=torch.tensor([1e-38])))
    yield Case("penalty 1e-38, logits [[9, 1]], id 0", calling(torch.tensor([[9.0, 1.0]]), tiny), False)


TASKS = [
    Task(
        "argmax",
        Function(_DRAW, "argmax"),
        "07",
        "the greedy token of each row.\n\nOf equal logits the lowest id wins. [2, 5, 5] gives 1, and [-inf, -inf] gives -1.",
        (
            "logits.max(dim=-1) returns values and ids, of equal values the first.",
            "torch.where(condition, a, b) puts in the -1.",
        ),
        _argmax_cases,
    ),
    Task(
        "temperature",
        Function(_STAGES, "divided"),
        "07",
        "make the distribution sharper or flatter.\n\ntemperature has one number per row, above 0. [2, 1] at 0.5: [0, -2].",
        (
            "Divide each row by its temperature: temperature.unsqueeze(-1) is a column.",
            "A tiny one, such as 1e-38, makes infinities of positive logits, and inf - inf is NaN. Subtract the largest first.",
            "A row at temperature 1 must keep its bits: subtract 0 there.",
        ),
        _temperature_cases,
    ),
    Task(
        "min_p",
        Function(_STAGES, "keep_min_p"),
        "07",
        "drop what is improbable beside the most probable token.\n\n"
        "batch.columns.min_p has one number per row. It is None if no row uses it: then the logits are returned as they are.",
        (
            "p / p_max = exp(logit - largest logit). The sum of the softmax is not needed.",
            "Drop what is strictly below min_p: masked_fill(condition, -inf).",
        ),
        _min_p_cases,
    ),
    Task(
        "top_p",
        Function(_STAGES, "drop_beyond"),
        "07",
        "keep the smallest set of tokens whose probabilities sum to at least top_p.\n\n"
        "Sums are of integer_weights(logits), which are exact. top_p is [batch]. Weights [5, 3, 2], top_p 0.6: two stay.",
        (
            "Sort falling and stable, so that of equal logits the lower id comes first.",
            "A token is dropped if the weights BEFORE it already sum to top_p * total. So the first always stays.",
            "Bring the dropped places back to the ids by scatter. A row with top_p = 1 drops nothing.",
        ),
        _top_p_cases,
    ),
    Task(
        "repetition_penalty",
        Function(_STAGES, "apply_repetition_penalty"),
        "07",
        "make ids that occurred less likely.\n\n"
        "batch.entries.token_counts lists the ids of prompt and output: its read(logits) gives their logits [entries], and\n"
        "write(logits, values) puts new values there. Its rows say to which row each entry belongs. None: nothing to do.",
        (
            "penalties[counts.rows] is the penalty of each entry.",
            "A negative logit becomes less likely by multiplying, a positive logit by dividing.",
            "A tiny penalty must not make infinity: clamp to the largest finite number.",
        ),
        _penalty_cases,
    ),
    Task(
        "draw",
        Function(_DRAW, "draw_from_weights"),
        "d4",
        "draw one id per row with one random number.\n\n"
        "thresholds(total, u) is floor(u * total), below total. Weights [7, 19, 2] and u = 0.5 have the threshold 14: id 1.",
        (
            "Cumulative sums, then the first id whose sum is larger than the threshold.",
            "torch.searchsorted(..., right=True) finds the first place that is larger. An id with weight 0 is never found.",
        ),
        _draw_cases,
    ),
]
