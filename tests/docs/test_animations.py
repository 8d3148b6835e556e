"""The animations of the site's first page show recorded runs, are small, and move by their own style sheet."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib as mpl
import pytest

ROOT = Path(__file__).parents[2]
NAMES = re.findall(r"pictures/animation-(\w+)\.svg", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def animations():
    sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "notebooks")]
    with mpl.rc_context():  # the style of the figures is not for other tests
        import animations
    del sys.path[:2]
    return animations


def test_there_are_four_small_pictures_without_scripts():
    assert sorted(NAMES) == ["attention", "continuous", "drafts", "paging"]
    for name in NAMES:
        text = (ROOT / "docs" / "pictures" / f"animation-{name}.svg").read_text(encoding="utf-8")
        root = ET.fromstring(text)
        assert len(text) < 40_000
        assert root.get("aria-label")
        assert "script" not in {one.tag.rpartition("}")[2] for one in root.iter()}
        assert text.count("@keyframes") > 5
        assert "prefers-color-scheme:dark" in text
        assert "prefers-reduced-motion" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_animation_shows_what_the_run_does(animations, name):
    stored = (ROOT / "docs" / "pictures" / f"animation-{name}.svg").read_text(encoding="utf-8")
    drawn = animations.MOVIES[name]().svg()
    assert NUMBER.sub("", drawn) == NUMBER.sub("", stored)
    # The last digit of an attention weight may differ on another processor.
    assert [float(one) for one in NUMBER.findall(drawn)] == pytest.approx(
        [float(one) for one in NUMBER.findall(stored)], abs=0.11
    )
