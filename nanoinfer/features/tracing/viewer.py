"""Make an HTML page of events that replays a generation, or two side by side. It needs no network and no other file.

In: the events as plain dicts, like the lines of Recorder.to_jsonl. Out: page/replay.html with its style sheet, its script and
the events inserted, or page/comparison.html, which has two of these pages in frames. Sequences of the two runs belong together
if they are the same answer to the same prompt, in the order in which the requests were added.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # an event: {"event": its class, its fields ...}

_FOLDER = Path(__file__).with_name("page")


def page(rows: Iterable[Row], *, differences: dict[str, dict[int, str | None]] | None = None) -> str:
    """Return the page of some events.

    differences: for a page of a comparison, by sequence and position, the texts of the other run's differing tokens.
    """
    values = {"/* EVENTS */ []": as_script([_shortened(row) for row in rows]), "/* DIFFERENCES */ null": as_script(differences)}
    return fill(_FOLDER / "replay.html", values)


def fill(template: Path, values: dict[str, str]) -> str:
    """Return a page: `/* name */` and `<!-- name -->` become the text of this file in page/, other placeholders their values.

    Inserted values are not searched again.
    """
    named = r"(?:/\*|<!--) (\w+\.(?:css|js|html)) (?:\*/|-->)"
    text = template.read_text(encoding="utf-8")
    page = re.sub(named, lambda match: (_FOLDER / match[1]).read_text(encoding="utf-8"), text)
    assert all(page.count(place) == 1 for place in values)
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], page)


def as_script(value: object) -> str:
    """Return a value as a JavaScript literal, which is safe even if a text contains "</script>"."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def frame(page: str) -> str:
    """Return an HTML element that contains the whole page, whose scripts cannot reach the notebook around it."""
    source = page.replace("&", "&amp;").replace("'", "&#39;")  # single quotes, because JSON has many double quotes
    style = "width: 100%; height: 800px; border: 0"
    return f"<iframe sandbox='allow-scripts' style='{style}' srcdoc='{source}'></iframe>"


def _shortened(value: object) -> object:
    """Return the value with floats rounded to nine digits, and with integers beyond JavaScript's range as strings.

    Nine digits distinguish all float32 values. More digits would add an eighth to the page.
    """
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, int) and abs(value) > 2**53:
        return str(value)
    if isinstance(value, dict):
        return {name: _shortened(part) for name, part in value.items()}
    return [_shortened(part) for part in value] if isinstance(value, list | tuple) else value


# ---- two runs


def comparison_page(runs: tuple[Iterable[Row], Iterable[Row]], names: tuple[str, str]) -> str:
    """Return the page of two runs."""
    events = [list(run) for run in runs]
    first, second = map(_answers, events)
    differences: tuple[dict[str, dict[int, str | None]], ...] = {}, {}  # each run's `differences` for page()
    pairs: list[Row] = []
    for key in (key for key in first if key in second):
        (left_id, left), (right_id, right) = first[key], second[key]
        ids, tokens = (left_id, right_id), (left, right)
        different = [at for at in sorted({*left, *right}) if left.get(at) != right.get(at)]
        for side, name in enumerate(ids):
            own, other = tokens[side], tokens[1 - side]
            differences[side][name] = {at: other[at][1] if at in other else None for at in different if at in own}
        pairs.append({"ids": ids, "first": next(iter(different), None)})
    data = {
        "names": names,
        "pages": [page(run, differences=found) for run, found in zip(events, differences, strict=True)],
        "pairs": pairs,
    }
    return fill(_FOLDER / "comparison.html", {"/* COMPARISON */ {}": as_script(data)})


Answer = tuple[str, dict[int, tuple[int, str]]]  # a sequence's id, and by position the ids and texts of its tokens


def _answers(events: list[Row]) -> dict[tuple[object, ...], Answer]:
    """Return {(prompt, number of earlier requests with this prompt, index of the answer): the answer}."""
    keys: dict[str, tuple[object, ...]] = {}  # request id -> the first two parts of a key
    num_added = Counter[tuple[int, ...]]()
    answers: dict[tuple[object, ...], Answer] = {}
    for event in events:
        if event["event"] == "RequestAdded":
            prompt = tuple(event["prompt_token_ids"])
            keys[event["request_id"]] = prompt, num_added[prompt]
            num_added[prompt] += 1
        elif event["event"] == "TokenAppended":
            request_id, _, number = event["sequence_id"].partition(".")
            _, tokens = answers.setdefault((*keys[request_id], number), (event["sequence_id"], {}))
            tokens[event["position"]] = event["token_id"], event["token"]
    return answers
