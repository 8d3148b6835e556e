"""The header and the picture of every notebook are what notebooks/header.py writes, and what it links to exists."""

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat
import pytest

from nanoinfer_course.learn import track

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("header", ROOT / "notebooks" / "header.py")
header = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(header)
MAP = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
STEMS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9d]*.ipynb"))


def test_the_files_names_are_in_the_courses_order():
    assert list(header.NOTEBOOKS) == sorted(STEMS, key=lambda stem: (stem[0], int(re.search(r"\d+", stem)[0]), stem))


@pytest.mark.parametrize("stem", STEMS)
def test_the_header_is_the_one_that_is_written(stem):
    source = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4).cells[0].source
    assert source == header.with_header(stem, source), "run: python notebooks/header.py"


@pytest.mark.parametrize("stem", STEMS)
def test_what_a_header_links_to_exists(stem):
    targets = re.findall(r"\]\(([^)]+)\)", header.header_of(stem, None))
    files = [ROOT / "notebooks" / target for target in targets]
    assert len(files) >= 5
    assert [file for file in files if not file.exists()] == []


@pytest.fixture
def growing(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    before = set(sys.modules)
    yield importlib.import_module("growing")
    for name in {"growing", "drawing", "header"} - before:
        del sys.modules[name]


def test_the_pictures_are_those_that_are_written(growing):
    written = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "notebooks" / "pictures").glob("*.svg")}
    assert written == {header.number_of(stem): growing.picture_of(stem) for stem in STEMS}, "run: python notebooks/header.py"


def test_every_part_of_the_picture_is_shown_by_a_notebook(growing):
    last = list(header.NOTEBOOKS)[-1]
    assert set(header.known_parts(last)) == set(growing.PLACES)
    root = ET.fromstring(growing.picture_of(last))
    kinds = [rect.get("class") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    num_lit = len(header.NOTEBOOKS[last].parts)
    assert [kinds.count(kind) for kind in ("lit", "known", "later")] == [num_lit, len(growing.PLACES) - num_lit, 0]
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sorted(texts) == sorted([*growing.PLACES, "the next step"])


def test_the_minutes_are_those_that_reading_takes():
    """About 160 words, 8 lines of code or 20 lines of output in a minute, and figures."""
    for stem, entry in header.NOTEBOOKS.items():
        cells = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4).cells
        prose = " ".join(cell.source.split(header.MARK)[0] for cell in cells if cell.cell_type == "markdown")
        code = [cell for cell in cells if cell.cell_type == "code"]
        figures = [cell for cell in code if "figure" in cell.metadata.get("tags", [])]
        num_lines = sum(len(cell.source.split("\n")) for cell in code if cell not in figures)
        num_shown = sum(output.get("text", "").count("\n") for cell in code for output in cell.outputs)
        minutes = len(re.sub("<[^>]*>", "", prose).split()) / 160 + num_lines / 8 + num_shown / 20 + 0.7 * len(figures)
        assert 0.75 < entry.minutes / minutes < 1.25, (stem, minutes)


def test_the_map_has_the_tables_that_are_written_and_every_notebook():
    assert header.with_tables(MAP) == MAP, "run: python notebooks/header.py"
    assert sorted(re.findall(r"\]\((\S+)\.ipynb\)", MAP)) == [*STEMS, "gpu"]


def test_the_three_hours_of_the_map_are_those_of_the_headers():
    text = " ".join(MAP.split())
    assert all(f"{header.number_of(stem)} ({what})" in text for stem, (what, _) in header.TRACK.items())
    minutes = sum(minutes for _, minutes in header.TRACK.values())
    assert f"in {minutes} minutes" in text
    assert minutes <= 150  # and half an hour for the tasks
    tasks = re.findall(r"`(\w+)`", text.split("eight functions of the engine with `nanoinfer learn`:")[1].split(".")[0])
    assert len(tasks) == 8
    assert set(tasks) <= set(track.NAMES)


def test_a_notebook_needs_only_earlier_ones():
    numbers = [header.number_of(stem) for stem in header.NOTEBOOKS]
    for at, (stem, entry) in enumerate(header.NOTEBOOKS.items()):
        assert set(entry.needs) <= set(numbers[:at]), stem
