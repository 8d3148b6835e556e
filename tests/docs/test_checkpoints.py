"""The table of checkpoints that have run is that of its lines, which a run of `make test-real` renews."""

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def checkpoints(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import checkpoints

    return checkpoints


def test_the_table_is_up_to_date(checkpoints):
    text = checkpoints.PAGE.read_text(encoding="utf-8")
    assert checkpoints.with_table(text, checkpoints.read(checkpoints.LINES)) == text, "run: python docs/checkpoints.py"


def test_a_run_replaces_the_lines_of_the_same_form_and_machine_and_keeps_the_others(checkpoints, monkeypatch, tmp_path):
    line = {"model": "A", "form": "folder", "revision": "1", "date": "2026-01-01", "machine": "X", "equal": "4 of 4"}
    line["perplexity"] = {"float32": 2.0, "int4": 2.126}
    run, lines, page = tmp_path / "run.jsonl", tmp_path / "lines.jsonl", tmp_path / "page.md"
    lines.write_text("".join(json.dumps(line | change) + "\n" for change in ({}, {"machine": "Y"})))
    run.write_text(json.dumps(line | {"revision": "2"}) + "\n")
    page.write_text("before\n<!-- python docs/checkpoints.py -->\nolder\n<!-- end -->\nafter\n")
    monkeypatch.setattr(checkpoints, "LINES", lines)
    monkeypatch.setattr(checkpoints, "PAGE", page)
    checkpoints.main(str(run))
    row = "| form | tokens equal | perplexity |\n|---|---|---|\n| folder | 4 of 4 | float32 2.00, int4 2.13 |"
    captions = ["A, 2, 2026-01-01, X", "A, 1, 2026-01-01, Y"]
    tables = "\n\n".join(f"{caption}:\n\n{row}" for caption in captions)
    assert page.read_text() == f"before\n<!-- python docs/checkpoints.py -->\n{tables}\n<!-- end -->\nafter\n"
