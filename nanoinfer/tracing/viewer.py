"""Events -> one HTML page that replays a generation. It needs no network and no other file.

In: the events as plain dicts, like the lines of Recorder.to_jsonl. Out: page/replay.html with its style sheet, its script and
the events inserted. The script draws the timeline, the block pool, the bars, the intervals. A notebook shows the page in a
frame.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("page")
_SCRIPTS = ("recording.js", "timeline.js", "step.js", "token.js", "moving.js")  # in the order in which they run


def page(rows: Iterable[dict[str, Any]], *, at: str = "", differences: dict[str, dict[int, str | None]] | None = None) -> str:
    """The page of some events.

    Args:
        rows: Dicts {"event": its class, its fields ...}.
        at: Where it opens, such as "step=17&token=4". An address with a # has precedence.
        differences: For a page of a comparison: by sequence and position, the texts of the other run's tokens that differ.
    """
    code = {"/* STYLE */": colours() + _read("replay.css"), "/* SCRIPT */": "\n".join(map(_read, _SCRIPTS))}
    values = {
        "/* EVENTS */ []": as_script([_shortened(row) for row in rows]),
        "/* DIFFERENCES */ null": as_script(differences),
        "/* START */": at,
    }
    return fill(fill(_read("replay.html"), code), values)


def fill(template: str, parts: dict[str, str]) -> str:
    """Fill the template's placeholders. Inserted text is not searched again."""
    assert all(template.count(place) == 1 for place in parts)
    return re.sub("|".join(map(re.escape, parts)), lambda match: parts[match[0]], template)


def colours() -> str:
    """The style sheet's colours, which a page of a comparison shares with its frames."""
    return _read("colours.css")


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def as_script(value: Any) -> str:
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
