"""Diagrams of the notebooks in one style: boxes, rows of tokens, arrows, block tables, stacked bars.

A figure is readable on a light and on a dark page: its background is transparent, lines and free text have a grey with contrast
to both, and text in a box is dark on a fill. `plt.rcParams.update(STYLE)` gives plots the same look.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

Colour = str | tuple[str, float]  # a name, or a name and an opacity

INK = "#808080"  # contrast 3.9 to white, 4.8 to #111
TEXT = "#111111"  # in a box
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#6cb4e6", "#eba63a", "#5dbb94", "#e8785a", "#c48ac4", "#b4b4b4"

STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.framealpha": 0,
    "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, RED, PURPLE, GREY]),
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color", "hatch.color"), INK
    ),
}


@dataclass(frozen=True)
class Box:
    """A drawn box. (x, y) is its lower left corner. The properties are points for arrows."""

    x: float
    y: float
    width: float
    height: float

    @property
    def top(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def left(self) -> tuple[float, float]:
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width, self.y + self.height / 2


def canvas(width: float, height: float, scale: float = 0.5) -> Axes:
    """An empty drawing area of width x height units, one unit being `scale` inches."""
    figure = plt.figure(figsize=(width * scale, height * scale), facecolor="none")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return ax


def box(ax: Axes, x: float, y: float, text: str = "", *, width: float = 1, height: float = 1, fill: Colour = "none") -> Box:
    """A box with text in its middle. Without a fill its line is dashed and its text grey: an empty place."""
    is_empty = fill == "none"
    line = {"edgecolor": INK, "linestyle": "--" if is_empty else "-", "linewidth": 1}
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, **line))
    ax.text(x + width / 2, y + height / 2, text, color=INK if is_empty else TEXT, ha="center", va="center", fontsize=9)
    return Box(x, y, width, height)


def row(
    ax: Axes,
    x: float,
    y: float,
    texts: Sequence[str],
    *,
    width: float = 1,
    height: float = 1,
    fill: str | Sequence[Colour] = BLUE,
) -> list[Box]:
    """Boxes side by side. fill: one for all, or one for each."""
    fills = [fill] * len(texts) if isinstance(fill, str) else fill
    return [
        box(ax, x + i * width, y, text, width=width, height=height, fill=one)
        for i, (text, one) in enumerate(zip(texts, fills, strict=True))
    ]


def label(ax: Axes, x: float, y: float, text: str, *, ha: str = "center", va: str = "center", size: float = 9) -> None:
    """Free text."""
    ax.text(x, y, text, color=INK, ha=ha, va=va, fontsize=size)


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], *, colour: str = INK, bend: float = 0, width: float = 1.2
) -> None:
    """An arrow. bend: 0 is straight, 0.3 a clear curve, to the other side if negative."""
    shape = {"arrowstyle": "-|>", "mutation_scale": 10, "connectionstyle": f"arc3,rad={bend}", "shrinkA": 1, "shrinkB": 1}
    ax.add_patch(FancyArrowPatch(start, end, color=colour, linewidth=width, **shape))


def block_tables(tables: Mapping[str, Sequence[int]], pool: Sequence[Sequence[str]]) -> Axes:
    """Draw block tables on the left, the pool on the right, and an arrow from each entry to its block.

    Args:
        tables: block ids by sequence. Each sequence gets a colour.
        pool: the text in every slot, by block. "" is a slot without a token: pale in a block that a sequence holds, dashed in a
            free block.
    """
    fills = dict(zip(tables, (BLUE, ORANGE, GREEN, PURPLE, RED), strict=False))
    owner = {block: name for name, table in tables.items() for block in table}
    block_size, num_entries = len(pool[0]), sum(map(len, tables.values()))
    height = max(len(pool), num_entries + len(tables) - 1) + 1.2
    ax = canvas(7 + block_size, height)
    blocks = []
    for block, texts in enumerate(pool):
        y = height - 2 - block
        held = fills[owner[block]] if block in owner else "none"
        blocks.append(row(ax, 6, y, texts, fill=[held if text or held == "none" else (held, 0.3) for text in texts])[0])
        label(ax, 6.2 + block_size, y + 0.5, str(block), ha="left")
    y = height - 2.0
    for name, table in tables.items():
        label(ax, 1.2, y + 0.5, name, ha="right")
        for block in table:
            entry = box(ax, 1.5, y, str(block), fill=fills[name])
            arrow(ax, entry.right, blocks[block].left, colour=fills[name])
            y -= 1
        y -= 1
    label(ax, 2, height - 0.5, "block tables")
    label(ax, 6 + block_size / 2, height - 0.5, "pool")
    return ax


def stacked_bars(ax: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """One horizontal bar per name, cut into parts. parts: the lengths by label, one per bar."""
    left = [0.0] * len(names)
    for part, lengths in parts.items():
        ax.barh(range(len(names)), lengths, left=left, label=part, edgecolor=INK)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
