"""The style of all figures: SVG, one palette for light and dark pages, a caption, and a text for those who cannot see.

Importing this file gives matplotlib's plots the style. A cell that draws ends with `show(caption, alt)`, which stores the
figure as SVG. Diagrams are made on a `canvas` from `box`, `row`, `label` and `arrow`, or whole by `block_tables` and
`stacked_bars`.

A figure brings its own background, which is dark where the reader's settings ask for it, and so do text and axes in `INK`.
The colours `BLUE` to `GREY` are the same on both: a line has a contrast of 3 to both backgrounds. A box is tinted with its
colour, so that its text in `INK` has a contrast of 4.5 or more. Nothing is told by colour alone: lines also differ in their
dashes. `PAPER` is the background, for markers that hide a line, and an image (`imshow`) fades from it to blue.
"""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from cycler import cycler
from IPython import get_ipython
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

Colour = str | tuple[str, float]  # a name, or a name and an opacity

INK, PAPER = "#24292f", "#ffffff"  # text and background on a light page
DARK_INK, DARK_PAPER = "#e6e9ee", "#171b21"  # the same on a dark one
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f86d6", "#d07818", "#1f9a63", "#dc5a48", "#a869c9", "#868d97"
TINT = 0.3  # the opacity of a box's fill

STYLE = {
    "axes.prop_cycle": cycler(
        color=[BLUE, ORANGE, GREEN, RED, PURPLE, GREY], linestyle=["-", "--", "-.", ":", (0, (5, 1)), "-"]
    ),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "hatch.linewidth": 0.6,
    "image.aspect": "auto",
    "image.cmap": "fade",
    "image.interpolation": "none",  # squares with sharp edges
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "nanoinfer",  # the same figure has the same ids in every run
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), PAPER),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "hatch.color"), GREY),
}
if "fade" not in mpl.colormaps:
    mpl.colormaps.register(LinearSegmentedColormap.from_list("fade", [(BLUE, 0.0), (BLUE, 1.0)]))
plt.rcParams.update(STYLE)

COLOURS = (
    f".drawing{{color:{INK}}}.drawing .paper{{fill:{PAPER}}}"
    f"@media(prefers-color-scheme:dark){{.drawing{{color:{DARK_INK}}}.drawing .paper{{fill:{DARK_PAPER}}}}}"
)


def svg(figure: Figure, caption: str, alt: str) -> str:
    """A figure as SVG whose text, axes and background follow the reader's colour scheme, with a caption below."""
    figure.draw_without_rendering()  # applies a layout
    edges = figure.get_tightbbox()  # in inches
    lines = textwrap.fill(caption, int(edges.width * 15))
    figure.text(edges.x0 / figure.get_figwidth(), (edges.y0 - 0.12) / figure.get_figheight(), lines, va="top")
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", pad_inches=0.12)
    picture = file.getvalue()
    picture = re.sub(r"<metadata>.*?</metadata>\s*", "", picture[picture.index("<svg") :], flags=re.DOTALL)
    picture = re.sub(rf'style="([^"]*)fill: {PAPER};? ?', r'class="paper" style="\1', picture).replace(INK, "currentColor")
    picture = re.sub(r"\s*(<!--.*?-->)?\s*\n\s*", " ", picture)
    picture = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d{3})\d+", r"\1", tag[0]), picture)  # digits that nobody sees
    root = f'<svg class="drawing" role="img" aria-label="{escape(alt)}" style="max-width:100%;height:auto"'
    return picture.replace("<svg", root, 1).replace("<defs>", f"<style>{COLOURS}</style>\n <defs>", 1)


def show(caption: str, alt: str) -> None:
    """End a cell's figure: show it as SVG, and close it.

    Args:
        caption: what to see in it, in a sentence or two. It stands below the figure.
        alt: what is drawn, for a reader who does not see it.
    """
    picture: dict[str, Any] = {"image/svg+xml": svg(plt.gcf(), caption, alt), "text/plain": alt}
    plt.close()
    if get_ipython():  # not in a solution
        display(picture, raw=True)


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
    figure = plt.figure(figsize=(width * scale, height * scale))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return ax


def box(ax: Axes, x: float, y: float, text: str = "", *, width: float = 1, height: float = 1, fill: Colour = "none") -> Box:
    """A box with text in its middle, tinted with its fill. Without a fill its line is dashed: an empty place."""
    colour, opacity = (fill, TINT) if isinstance(fill, str) else fill
    is_empty = fill == "none"
    line = {"edgecolor": GREY if is_empty else colour, "linestyle": "--" if is_empty else "-", "linewidth": 1}
    ax.add_patch(Rectangle((x, y), width, height, facecolor="none" if is_empty else (colour, opacity), **line))
    label(ax, x + width / 2, y + height / 2, text)
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
    ax.text(x, y, text, ha=ha, va=va, fontsize=size)


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], *, colour: str = GREY, bend: float = 0, width: float = 1.2
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
        blocks.append(row(ax, 6, y, texts, fill=[held if text or held == "none" else (held, 0.08) for text in texts])[0])
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
        ax.barh(range(len(names)), lengths, left=left, label=part, edgecolor=PAPER)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
