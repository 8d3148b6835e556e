"""The events inside a page that replays a generation."""

import json
import re
from pathlib import Path
from typing import Any


def events_of(page: Path) -> list[dict[str, Any]]:
    found = re.search(r"^const EVENTS = (.*);$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    events: list[dict[str, Any]] = json.loads(found[1])
    return events
