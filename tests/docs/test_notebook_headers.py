"""The header of every notebook is what notebooks/header.py writes, and what it links to exists."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("header", ROOT / "notebooks" / "header.py")
header = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(header)
STEMS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_every_notebook_and_no_other_has_an_entry():
    assert sorted(header.NOTEBOOKS) == STEMS


@pytest.mark.parametrize("stem", STEMS)
def test_the_header_is_the_one_that_is_written(stem):
    source = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4).cells[0].source
    assert source == header.with_header(stem, source), "run: python notebooks/header.py"


@pytest.mark.parametrize("stem", STEMS)
def test_what_a_header_links_to_exists(stem):
    targets = re.findall(r"\]\(([^)]+)\)", header.header_of(stem))
    here = [
        target.removeprefix(f"{header.REPOSITORY}/blob/main/") for target in targets if target.startswith(header.REPOSITORY)
    ]
    files = [ROOT / "notebooks" / target for target in targets if "//" not in target] + [ROOT / target for target in here]
    assert len(files) >= 3
    assert [file for file in files if not file.exists()] == []


def test_a_notebook_needs_only_earlier_ones():
    numbers = [header.number_of(stem) for stem in header.NOTEBOOKS]
    for at, (stem, entry) in enumerate(header.NOTEBOOKS.items()):
        assert set(entry.needs) <= set(numbers[:at]), stem


def test_the_public_address_is_in_one_place():
    sources = [*(ROOT / "notebooks").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "nanoinfer").rglob("*.py")]
    address = "github.com/" + "nanoinfer"
    assert [path.name for path in sources if address in path.read_text(encoding="utf-8")] == ["header.py"]
