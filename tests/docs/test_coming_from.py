"""docs/coming_from.md names the test that holds each line."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_line_names_a_test_that_exists():
    rows = [line for line in (ROOT / "docs/coming_from.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows if not row.startswith("| what you know")]
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    assert len(named) >= 10
    assert [row for row in named if len(row) != 1 or row[0] not in defined] == []
