"""Pictures of pages and notebooks: animations show recorded runs, the gallery is true, figures are readable in every scheme."""

import re
import xml.etree.ElementTree as ET

import matplotlib
import matplotlib.pyplot as plt
import pytest

from nanoinfer.features.tracing import StepScheduled, TokenAppended
from tests.helpers.scripts import ROOT, load

ANIMATIONS = re.findall(r"pictures/animation-(\w+)\.svg", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.slow
@pytest.mark.parametrize("name", ANIMATIONS)
def test_an_animation_is_small_has_no_script_and_shows_what_the_run_does(name):
    assert sorted(ANIMATIONS) == ["attention", "continuous", "drafts", "paging"]
    stored = (ROOT / "docs" / "pictures" / f"animation-{name}.svg").read_text(encoding="utf-8")
    root = ET.fromstring(stored)
    assert len(stored) < 40_000
    assert root.get("aria-label")
    assert "script" not in {one.tag.rpartition("}")[2] for one in root.iter()}
    assert "prefers-color-scheme:dark" in stored
    assert "prefers-reduced-motion" in stored
    drawn = load("animations").MOVIES[name]().svg()
    assert NUMBER.sub("", drawn) == NUMBER.sub("", stored)
    # The last digit of an attention weight may differ on another processor.
    numbers = ([float(number) for number in NUMBER.findall(text)] for text in (drawn, stored))
    assert next(numbers) == pytest.approx(next(numbers), abs=0.11)


@pytest.mark.long
def test_every_page_of_the_gallery_that_is_linked_is_written(tmp_path):
    linked = set(re.findall(r"\]\((\w+\.html)", load("gallery").write(tmp_path)))
    assert linked == {path.name for path in tmp_path.iterdir()}
    assert len(linked) == 6


@pytest.mark.slow
def test_the_compared_runs_of_the_gallery_have_equal_tokens_and_differ_in_steps():
    gallery = load("gallery")
    for name, comparison in gallery.COMPARISONS.items():
        runs = gallery.record_pair(comparison)
        tokens = [{(one.sequence_id, one.position): one.token_id for one in run.of(TokenAppended)} for run in runs]
        assert tokens[0] == tokens[1], name
        counts = [[sum(step.num_new_tokens) for step in run.of(StepScheduled)] for run in runs]
        if name == "batch":
            assert len(counts[0]) * 4 == len(counts[1])
        else:
            assert max(counts[0]) < 20 < 60 < max(counts[1])


# ---- figures of notebooks


@pytest.fixture(scope="module")
def drawing():
    backend, params = matplotlib.get_backend(), dict(plt.rcParams)
    matplotlib.use("agg")
    module = load("drawing")
    plt.rcParams.update(module.STYLE)
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


@pytest.mark.parametrize(("ink", "paper"), [("INK", "PAPER"), ("DARK_INK", "DARK_PAPER")])
def test_text_and_lines_have_contrast_on_light_and_dark(drawing, ink, paper):
    assert round(contrast(rgb("#777777"), rgb("#ffffff")), 2) == 4.48  # as WCAG says
    ink, paper = rgb(getattr(drawing, ink)), rgb(getattr(drawing, paper))
    assert contrast(ink, paper) >= 7
    for name in ("BLUE", "ORANGE", "GREEN", "RED", "PURPLE", "GREY"):
        colour = rgb(getattr(drawing, name))
        assert contrast(colour, paper) >= 3, name
        tint = [drawing.TINT * over + (1 - drawing.TINT) * below for over, below in zip(colour, paper, strict=True)]
        assert contrast(ink, tint) >= 4.5, name


def test_a_figure_is_an_svg_that_says_what_it_shows_and_follows_the_colour_scheme(drawing):
    ax = drawing.canvas(6, 2)
    drawing.arrow(ax, drawing.box(ax, 0, 0.5, "one").right, drawing.box(ax, 4, 0.5, "two", fill=drawing.BLUE).left)
    root = ET.fromstring(drawing.svg(plt.gcf(), "One leads to two. " * 8, 'A box "one" & an arrow'))
    assert root.get("aria-label") == 'A box "one" & an arrow'
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert (texts[:2], " ".join(texts[2:])) == (["one", "two"], ("One leads to two. " * 8).strip())
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
