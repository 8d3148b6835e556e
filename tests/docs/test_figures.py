"""The notebooks' figures have one style: SVG with a caption and an alternative text, readable on light and dark pages."""

import ast
import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(scope="module")
def drawing():
    backend, params = matplotlib.get_backend(), dict(plt.rcParams)
    matplotlib.use("agg")
    spec = importlib.util.spec_from_file_location("drawing", FOLDER / "drawing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    plt.close("all")
    matplotlib.use(backend)
    plt.rcParams.update({name: params[name] for name in module.STYLE})


def rgb(colour):
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def contrast(one, other):
    """The ratio of WCAG 2, for two lists of red, green and blue in [0, 1]."""

    def luminance(channels):
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_is_that_of_wcag():
    assert round(contrast(rgb("#000000"), rgb("#ffffff")), 2) == 21
    assert round(contrast(rgb("#777777"), rgb("#ffffff")), 2) == 4.48


@pytest.mark.parametrize(("ink", "paper"), [("INK", "PAPER"), ("DARK_INK", "DARK_PAPER")])
def test_text_and_lines_have_contrast_on_light_and_dark(drawing, ink, paper):
    ink, paper = rgb(getattr(drawing, ink)), rgb(getattr(drawing, paper))
    assert contrast(ink, paper) >= 7
    for name in ("BLUE", "ORANGE", "GREEN", "RED", "PURPLE", "GREY"):
        colour = rgb(getattr(drawing, name))
        assert contrast(colour, paper) >= 3, name
        tint = [drawing.TINT * over + (1 - drawing.TINT) * below for over, below in zip(colour, paper, strict=True)]
        assert contrast(ink, tint) >= 4.5, name


def boxes(drawing):
    ax = drawing.canvas(6, 2)
    drawing.arrow(ax, drawing.box(ax, 0, 0.5, "one").right, drawing.box(ax, 4, 0.5, "two", fill=drawing.BLUE).left)
    return drawing.svg(plt.gcf(), "One leads to two. " * 8, 'A box "one" & an arrow')


def test_a_figure_is_an_svg_that_says_what_it_shows(drawing):
    root = ET.fromstring(boxes(drawing))
    assert root.get("aria-label") == 'A box "one" & an arrow'
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:2] == ["one", "two"]
    assert len(texts) > 3  # the caption has several lines
    assert " ".join(texts[2:]) == ("One leads to two. " * 8).strip()


def test_a_figure_that_is_drawn_again_is_the_same_file(drawing):
    assert boxes(drawing) == boxes(drawing)


def test_text_and_background_follow_the_colour_scheme(drawing):
    _, ax = plt.subplots(figsize=(3, 2))
    ax.plot([1, 2], "o-", markerfacecolor=drawing.PAPER, label="a line")
    ax.legend()
    before, _, rest = drawing.svg(plt.gcf(), "A line.", "A line that rises.").partition("<style>")
    style, _, after = rest.partition("</style>")
    assert f"@media(prefers-color-scheme:dark){{.drawing{{color:{drawing.DARK_INK}}}" in style
    for colour in (drawing.INK, drawing.PAPER):
        assert colour in style
        assert colour not in before + after  # else it would be the same on a dark page
    assert after.count('class="paper"') >= 3  # the background and two markers
    assert "currentColor" in after


def calls_in(source):
    return [ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def is_shown(source):
    """Whether a cell that makes a figure ends it with show(), in the style and with a caption."""
    calls = set(calls_in(source))
    return "plt.show" not in calls and ("show" in calls or not calls & {"plt.subplots", "plt.figure", "canvas", "block_tables"})


def test_a_figure_that_is_not_shown_with_a_caption_is_found():
    assert is_shown("ax = canvas(1, 2)\nshow('a', 'b')")
    assert is_shown("print(1)")
    for wrong in ("ax = canvas(1, 2)", "_, ax = plt.subplots()", "plt.figure()\nplt.show()", "show('a', 'b')\nplt.show()"):
        assert not is_shown(wrong)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[0-9d]*.ipynb")), ids=lambda path: path.stem)
def test_every_figure_of_a_notebook_has_a_caption_and_words_and_its_code_is_folded(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.source for cell in cells if not is_shown(cell.source)] == []
    for cell in cells:
        calls = calls_in(cell.source)
        fold = {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": ["figure"]}  # in Colab, Jupyter, the site
        assert cell.metadata == (fold if "show" in calls else {}), cell.source
        assert not ("show" in calls and "print" in calls), cell.source  # what is computed stays visible
