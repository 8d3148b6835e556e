"""The cases of the tasks between the logits and a token."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nanoinfer.sampling.batch import SamplingBatch, TokenEntries, TokenMask
from nanoinfer_course.learn.check import Case, calling

INF = float("inf")


def _logits(seed: int, rows: int, vocab: int, *, ties: bool = False) -> Tensor:
    """Return random logits, some of them dropped. ties: whether few values occur."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 300).round() / 100
    if ties:
        logits = logits.round()
    dropped = torch.rand(rows, vocab, generator=generator) < 0.2
    dropped[:, seed % vocab] = False  # at least one token is left
    return logits.masked_fill(dropped, -INF)


def _of_batch(logits: Tensor, given: dict[str, object], *, exact: bool = False, **batch: Any) -> Case:
    """Return a case of a stage. given: the parts of the batch that it reads, by name. batch: fields of the batch."""
    u = torch.zeros(len(logits), dtype=torch.float64)
    made = SamplingBatch(**batch, u=u)
    return Case({"logits": logits, **given}, lambda version: version(logits.clone(), made), exact)


def _columns(values: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits, and a parameter for each row: first for a single row, then for several."""
    for seed in range(160):
        rows = 1 + seed // 40
        yield _logits(seed, rows, 2 + seed // 20), torch.tensor([values[(seed + row) % len(values)] for row in range(rows)])


def _temperature_cases() -> Iterator[Case]:
    def judge(divided: Any) -> object:
        return divided.double().softmax(-1)

    for logits, column in _columns([0.5, 2.0, 1.0, 1.2e-38, 0.7]):
        case = calling(logits=logits, temperature=column)
        yield Case(case.given, case.observe, exact=False, judge=judge)
    logits, temperature = torch.tensor([[1.234567, 0.1], [3.3, -0.7]]), torch.tensor([1.0, 0.5])
    case = calling("The bits of row 0 are compared.", logits=logits, temperature=temperature)
    yield Case(case.given, case.observe, picture=case.picture, judge=lambda divided: divided[0])


def _min_p_cases() -> Iterator[Case]:
    for logits, column in _columns([0.1, 0.5, 1.0, 0.0, 0.03]):
        yield _of_batch(logits, {"batch.min_p": column}, min_p=column)
    yield _of_batch(_logits(1, 2, 4), {"batch.min_p": None}, exact=True)


def _top_p_cases() -> Iterator[Case]:
    for seed in range(200):
        rows, vocab = 1 + seed // 60, 2 + seed // 30
        logits = _logits(seed, rows, vocab, ties=seed % 2 == 0)
        top_p = torch.tensor([[0.5, 0.9, 1.0, 1e-9, 0.1][(seed + row) % 5] for row in range(rows)], dtype=torch.float64)
        total = torch.tensor([2**33 + seed] * rows) if seed % 7 == 6 else None
        yield calling(logits=logits, top_p=top_p, total=total)
    half = torch.tensor([0.5], dtype=torch.float64)
    yield calling(
        "The first weight is exactly top_p of the total.", comes_last=True, logits=torch.zeros(1, 2), top_p=half, total=None
    )


def _argmax_cases() -> Iterator[Case]:
    for seed in range(80):
        yield calling(logits=_logits(seed, 1 + seed // 30, 2 + seed // 10, ties=True))
    for row in ([-INF, -INF], [float("nan"), 1.0], [1.0, INF]):
        yield calling(logits=torch.tensor([row]))


def _draw_cases() -> Iterator[Case]:
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        rows, vocab = 1 + seed // 80, 2 + seed // 25
        weights = torch.randint(0, 5, (rows, vocab), generator=generator)
        weights[:, seed % vocab] += 1
        choices = torch.tensor([0.0, 0.25, 0.5, 0.999999999, 1 - 2**-53], dtype=torch.float64)
        u = choices[torch.randint(0, 5, (rows,), generator=generator)]
        lines = ["".join(str(id) * weight for id, weight in enumerate(row)) for row in weights.tolist()]
        marks = [" " * int(number * len(line)) + "^" for number, line in zip(u.tolist(), lines, strict=True)]
        pairs = [f"  {line}\n  {mark}" for line, mark in zip(lines, marks, strict=True)]
        picture = "\n".join(["Each id, as often as its weight says, and where u falls:", *pairs])
        yield calling(picture, weights=weights, u=u)
    large, u = torch.tensor([[2**25 + 1, 2**25]]), torch.tensor([(2**25 + 0.5) / (2**26 + 1)], dtype=torch.float64)
    yield calling("The sum is too large for fp32.", comes_last=True, weights=large, u=u)


def _penalty_cases() -> Iterator[Case]:
    """Yield cases of penalties, which read the counts of ids in the output. An id that only the prompt has counts 0."""

    def case(logits: Tensor, entries: TokenEntries | None, penalty: Tensor | None) -> Case:
        given = {f"token_counts.{name}": entries and getattr(entries, name) for name in ("rows", "ids", "values")}
        given["repetition_penalty"] = penalty
        return _of_batch(logits, given, token_counts=entries, repetition_penalty=penalty)

    for seed in range(120):
        rows, vocab = 1 + seed // 50, 2 + seed // 20
        generator = torch.Generator().manual_seed(seed)
        present = (torch.rand(rows, vocab, generator=generator) < 0.5).nonzero()
        counts = torch.randint(0, 4, (len(present),), generator=generator)
        penalty = torch.tensor([[2.0, 0.5, 1.3][(seed + row) % 3] for row in range(rows)])
        yield case(_logits(seed, rows, vocab), TokenEntries(present[:, 0], present[:, 1], counts), penalty)
    some = TokenEntries(torch.tensor([0]), torch.tensor([0]), torch.tensor([1]))
    yield case(_logits(1, 2, 4), None, torch.tensor([2.0, 2.0]))
    yield case(_logits(1, 2, 4), some, None)
    yield case(torch.tensor([[9.0, 1.0]]), some, torch.tensor([1e-38]))


def _mask_cases() -> Iterator[Case]:
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        num_rows, vocab = 1 + seed // 15, 2 + seed // 12
        rows = torch.randperm(num_rows, generator=generator)[: 1 + seed % num_rows].sort().values
        forbidden = torch.rand(len(rows), vocab, generator=generator) < 0.5
        given: dict[str, object] = {"grammar.rows": rows, "grammar.forbidden": forbidden}
        yield _of_batch(_logits(seed, num_rows, vocab), given, exact=True, grammar=TokenMask(rows, forbidden))
    yield _of_batch(torch.ones(1, 2), {"batch.grammar": None}, exact=True)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "argmax": _argmax_cases,
    "temperature": _temperature_cases,
    "min_p": _min_p_cases,
    "top_p": _top_p_cases,
    "repetition_penalty": _penalty_cases,
    "token_mask": _mask_cases,
    "draw": _draw_cases,
}
