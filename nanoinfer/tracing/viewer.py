"""Events -> one HTML page that replays a generation. It needs no network and no other file.

In: the events as plain dicts, like the lines of Recorder.to_jsonl. Out: the page: viewer.html with the events inserted. Its
script draws the rest: the timeline, the block pool, the bars, the intervals. A notebook shows the page in a frame.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_TEMPLATE = Path(__file__).with_name("viewer.html")
_PLACE = "/* EVENTS */ []"
_PLACE_OF_START = "/* START */"
_PLACE_OF_DIFFERENCES = "/* DIFFERENCES */ null"


def page(
    rows: Iterable[dict[str, Any]], *, at: str = "", differences: dict[str, dict[int, str | None]] | None = None
) -> str:
    """The page of some events.

    Args:
        rows: Dicts {"event": its class, its fields ...}.
        at: Where it opens, such as "step=17&token=4". An address with a # has precedence.
        differences: For a page of a comparison: by sequence and position, the texts of the other run's tokens that differ.
    """
    template = _TEMPLATE.read_text(encoding="utf-8")
    assert all(template.count(place) == 1 for place in (_PLACE, _PLACE_OF_START, _PLACE_OF_DIFFERENCES))
    template = template.replace(_PLACE_OF_START, at).replace(_PLACE_OF_DIFFERENCES, _as_script(differences))
    return template.replace(_PLACE, _as_script([_shortened(row) for row in rows]))


def _as_script(value: Any) -> str:
    """A literal of JavaScript. A text in it may contain "</script>"."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def frame(page: str) -> str:
    """An HTML element that contains the whole page. Its scripts cannot reach the notebook around it."""
    source = page.replace("&", "&amp;").replace("'", "&#39;")  # single quotes: JSON is full of double ones
    style = "width: 100%; height: 800px; border: 0"
    return f"<iframe sandbox='allow-scripts' style='{style}' srcdoc='{source}'></iframe>"


def _shortened(value: Any) -> Any:
    """The value with floats rounded to nine digits, and with integers beyond JavaScript's range as strings.

    Nine digits distinguish all float32 values. More would be an eighth of the page.
    """
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, int) and abs(value) > 2**53:
        return str(value)
    if isinstance(value, dict):
        return {name: _shortened(part) for name, part in value.items()}
    return [_shortened(part) for part in value] if isinstance(value, list | tuple) else value
