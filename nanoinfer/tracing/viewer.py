"""Events -> one HTML page that replays a generation: no network, no other file, works from a disk.

In: the events as plain dicts, as they stand in the lines of Recorder.to_jsonl. Out: the page, which is viewer.html with the
events in it. All else (the timeline, the block pool, the bars, the ruler) is drawn by its own script.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_TEMPLATE = Path(__file__).with_name("viewer.html")
_PLACE = "/* EVENTS */ []"


def page(rows: Iterable[dict[str, Any]]) -> str:
    """rows: {"event": its class, its fields ...}."""
    template = _TEMPLATE.read_text(encoding="utf-8")
    assert template.count(_PLACE) == 1
    events = json.dumps([_shortened(row) for row in rows], ensure_ascii=False, separators=(",", ":"))
    return template.replace(_PLACE, events.replace("<", "\\u003c"))  # "<" would end the script, where a text has "</script>"


def _shortened(value: Any) -> Any:
    """Floats to nine digits, which tell every float32 apart (the others would be an eighth of the page), and integers that are
    too long for JavaScript's numbers as text.
    """
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, int) and abs(value) > 2**53:
        return str(value)
    if isinstance(value, dict):
        return {name: _shortened(part) for name, part in value.items()}
    return [_shortened(part) for part in value] if isinstance(value, list | tuple) else value
