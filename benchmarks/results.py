"""Read results.jsonl, and write its tables between the marks of pages: `python -m benchmarks.results`.

`python -m benchmarks.results history` prints the rows of older builds, and what history.jsonl has: sections of figures that no
page shows any more, each with how they were measured. `history SAMPLER` prints the sections with this word in their title.

A line is a row that was measured on one machine. Of kind "speed": nanoinfer and another engine on a workload, each as [median,
lowest, highest]. `python -m benchmarks.compare --results` appends it. Of kind "perplexity": a variant of a model, and the model
in float32. Of kind "form": the perplexities of one form of a model's GGUF file here and in llama.cpp. `release` is the version
that was measured, without ".dev", or null for a build between two releases. What was not recorded is null. A page has `<!--
python -m benchmarks.results: TABLE -->` before a table and `<!-- end -->` after it.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nanoinfer

ROOT = Path(__file__).parents[1]
LINES = ROOT / "benchmarks" / "results.jsonl"
HISTORY = LINES.with_name("history.jsonl")
PAGES = ("BENCHMARKS.md", "docs/supported.md")
BLOCK = re.compile(r"(<!-- python -m benchmarks\.results: ([\w ]+) -->\n\n)(?:(?!python -m ).)*?(<!-- end -->)", re.DOTALL)
LEAST_RUNS = 5  # of each engine, for a ratio in bold
RELEASE = nanoinfer.__version__.partition(".dev")[0]


@dataclass(frozen=True, slots=True)
class Speed:
    """One row beside another engine.

    Attributes:
        unit: "tokens/s", of which more is better, or "ms" or "s", of which less is better.
        runs: Interleaved runs of each engine. None: not recorded.
        nanoinfer: The median, the lowest and the highest figure. None: not recorded.
        other: The same of the other engine.
        note: How the row differs from the others, or "".
    """

    machine: str
    date: str
    commit: str | None
    release: str | None
    model: str
    dtype: str
    workload: str
    baseline: str
    unit: str
    runs: int | None
    nanoinfer: tuple[float, float | None, float | None]
    other: tuple[float, float | None, float | None]
    note: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What is measured: machine, model, dtype, workload, and the engine without its version."""
        return self.machine, self.model, self.dtype, self.workload, re.sub(r"( of llama-cpp-python)? \d\S*$", "", self.baseline)

    @property
    def is_older_build(self) -> bool:
        return self.release != RELEASE

    @property
    def ratio(self) -> float:
        """Nanoinfer's speed divided by the other engine's."""
        ratio = self.nanoinfer[0] / self.other[0]
        return ratio if self.unit == "tokens/s" else 1 / ratio

    @property
    def differs(self) -> bool:
        """Whether the ranges of enough runs do not overlap."""
        _, low, high = self.nanoinfer
        _, other_low, other_high = self.other
        if low is None or high is None or other_low is None or other_high is None or (self.runs or 0) < LEAST_RUNS:
            return False
        return low > other_high or other_low > high

    def show(self, figure: tuple[float, float | None, float | None]) -> str:
        median, low, high = figure
        return f"{median:,} {self.unit}" + (f" ({low:,} to {high:,})" if low is not None else "")

    def show_ratio(self) -> str:
        return f"**{self.ratio:.2f}**" if self.differs else f"{self.ratio:.2f}"


@dataclass(frozen=True, slots=True)
class Perplexity:
    """A variant of a model, such as "int4". float32: the perplexity of the model in float32 on the same text."""

    machine: str
    date: str
    commit: str | None
    release: str | None
    model: str
    text: str
    variant: str
    float32: float
    perplexity: float

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.text, self.variant


@dataclass(frozen=True, slots=True)
class Form:
    """A form of GGUF files, such as "Q5_0", of the same model. Perplexities: in llama.cpp, as in the file, and rounded."""

    date: str
    model: str
    text: str
    form: str
    llama_cpp: float
    bfloat16: float
    int8: float
    int4: float

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.text, self.form


def read() -> list[Speed | Perplexity | Form]:
    """Read every line, the oldest first."""
    found: list[Speed | Perplexity | Form] = []
    for line in LINES.read_text(encoding="utf-8").splitlines():
        fields: dict[str, Any] = json.loads(line)
        kind = {"speed": Speed, "perplexity": Perplexity, "form": Form}[fields.pop("kind")]
        found.append(kind(**{name: _tuple(value) for name, value in fields.items() if name != "versions"}))
    return sorted(found, key=lambda one: one.date)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _newest(kind: type) -> dict[tuple[str, ...], Any]:
    """Return the newest line of everything that was measured."""
    return {one.key: one for one in read() if isinstance(one, kind)}


def _markdown(head: Sequence[str], rows: list[list[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def _speeds(chosen: Callable[[Speed], bool]) -> str:
    head = ("machine", "model, dtype", "workload", "nanoinfer", "other", "ratio", "runs", "other engine", "measured")
    rows = []
    speeds = (one for one in read() if isinstance(one, Speed) and chosen(one))
    for one in sorted(speeds, key=lambda one: (one.machine, one.baseline)):
        measured = f"{one.date}, {one.commit}" if one.commit else one.date
        engine = re.sub(r"(\d)[-+]\S*$", r"\1", one.baseline)  # without the build's name
        engine += f", {one.note}" if one.note else ""
        figures = [one.show(one.nanoinfer), one.show(one.other), one.show_ratio(), str(one.runs or "")]
        rows.append([one.machine, f"{one.model}, {one.dtype}", one.workload, *figures, engine, measured])
    return _markdown(head, rows)


def current() -> str:
    """The newest line of each row that this release was measured in."""
    newest = list(_newest(Speed).values())
    return _speeds(lambda one: not one.is_older_build and one in newest)


def processors() -> str:
    """GPT-2's newest ratios to OpenVINO: a row for each machine, dtype and load, a column for each workload."""
    rows: dict[tuple[str, str, str], dict[str, Speed]] = {}
    for (machine, model, dtype, workload, engine), one in _newest(Speed).items():
        workload, _, load = workload.partition(", ")
        if model == "GPT-2" and engine == "OpenVINO GenAI" and load in ("", "busy"):
            rows.setdefault((machine, dtype, load or "quiet"), {})[workload] = one
    head = ("machine", "dtype", "load", *(columns := ("A", "B16", "B64", "C", "D", "E")), "measured")
    cells = []
    for row, found in sorted(rows.items()):
        dates = sorted({one.date for one in found.values()})
        ratios = [found[name].show_ratio() if name in found else "" for name in columns]
        cells.append([*row, *ratios, " to ".join(dict.fromkeys((dates[0], dates[-1])))])
    return _markdown(head, cells)


def history(words: str = "") -> str:
    """The rows of older builds and those that were measured again, and the sections of history.jsonl.

    Args:
        words: words of a section's title, in any case. Empty: all sections.
    """
    newest = list(_newest(Speed).values())
    rows = _speeds(lambda one: one.is_older_build or one not in newest)
    sections = [json.loads(line) for line in HISTORY.read_text(encoding="utf-8").splitlines()]
    sections[0]["parts"].append(rows)
    shown = [
        "\n\n".join(part if isinstance(part, str) else _markdown(part["columns"], part["rows"]) for part in section["parts"])
        for section in sections
    ]
    found = zip(sections, shown, strict=True)
    return "\n\n".join(f"## {one['title']}\n\n{text}" for one, text in found if words.lower() in one["title"].lower())


def perplexity() -> str:
    """The perplexity of every variant, and in brackets its ratio to that of float32. A row for each model and text."""
    newest = list(_newest(Perplexity).values())
    variants = list(dict.fromkeys(one.variant for one in newest))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for one in newest:
        row = rows.setdefault((one.model, one.text, f"{one.float32:,}", one.date), {})
        row[one.variant] = f"{one.perplexity:,} ({one.perplexity / one.float32:.3f})"
    head = ("model", "text", "float32", *variants, "measured")
    return _markdown(head, [[*what, *(row.get(name, "") for name in variants), date] for (*what, date), row in rows.items()])


def forms() -> str:
    """The perplexity of each form of GGUF files, in llama.cpp and here. A table for each text and date."""
    head = ("form", "llama.cpp", "as in the file, bfloat16", "int8", "int4", "int4 to llama.cpp")
    tables: dict[str, list[list[str]]] = {}
    for one in _newest(Form).values():
        figures = [f"{figure:.3f}" for figure in (one.llama_cpp, one.bfloat16, one.int8, one.int4)]
        rows = tables.setdefault(f"Perplexity of {one.text}, measured on {one.date}:", [])
        rows.append([one.form, *figures, f"{one.int4 / one.llama_cpp:.2f}"])
    return "\n\n".join(f"{caption}\n\n{_markdown(head, rows)}" for caption, rows in tables.items())


TABLES: dict[str, Callable[[], str]] = {
    "current": current,
    "processors": processors,
    "perplexity": perplexity,
    "forms": forms,
}


def with_tables(text: str) -> str:
    """Return a page with its tables written anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n\n{match[3]}", text)


def main(*words: str) -> None:
    if words[:1] == ("history",):
        print(history(" ".join(words[1:])))
        return
    for name in PAGES:
        page = ROOT / name
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
