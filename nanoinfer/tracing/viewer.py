"""Make an HTML page of events that replays a generation, or two side by side. It needs no network and no other file.

In: the events as plain dicts, like the lines of Recorder.to_jsonl. Out: page/replay.html with its style sheet, its script and
the events inserted. The script draws the timeline, the block pool, the bars, the intervals. A notebook shows the page in a
frame. page/comparison.html has two of these pages in frames, in which the tokens that differ are marked. Sequences of the two
runs belong together if they are the same answer to the same prompt, in the order in which the requests were added.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = ("elements.js", "recording.js", "timeline.js", "step.js", "token.js", "moving.js")  # in the order in which they run


def page(rows: Iterable[Row], *, at: str = "", differences: dict[str, dict[int, str | None]] | None = None) -> str:
    """Return the page of some events.

    Args:
        rows: the events as dicts {"event": its class, its fields ...}.
        at: where the page opens, such as "step=17&token=4". The fragment of an address has precedence.
        differences: for a page of a comparison, by sequence and position, the texts of the other run's differing tokens.
    """
    code = {"/* STYLE */": _read("colours.css") + _read("replay.css"), "/* SCRIPT */": "\n".join(map(_read, _SCRIPTS))}
    values = {
        "/* EVENTS */ []": as_script([_shortened(row) for row in rows]),
        "/* DIFFERENCES */ null": as_script(differences),
        "/* START */": at,
    }
    return _fill(_fill(_read("replay.html"), code), values)


def _fill(template: str, parts: dict[str, str]) -> str:
    """Fill the template's placeholders. Inserted text is not searched again."""
    assert all(template.count(place) == 1 for place in parts)
    return re.sub("|".join(map(re.escape, parts)), lambda match: parts[match[0]], template)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def as_script(value: object) -> str:
    """Return a literal of JavaScript. Texts in it may contain "</script>"."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def frame(page: str) -> str:
    """Return an HTML element that contains the whole page, whose scripts cannot reach the notebook around it."""
    source = page.replace("&", "&amp;").replace("'", "&#39;")  # JSON is full of double quotes
    style = "width: 100%; height: 800px; border: 0"
    return f"<iframe sandbox='allow-scripts' style='{style}' srcdoc='{source}'></iframe>"


def _shortened(value: object) -> object:
    """Return the value with floats rounded to nine digits, and with integers beyond JavaScript's range as strings.

    Nine digits distinguish all float32 values. More digits would be an eighth of the page.
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
    """Return the page of two runs, whose events are dicts {"event": its class, its fields ...}."""
    events = [list(run) for run in runs]
    answers = [_answers(run) for run in events]
    pairs = [(answers[0][key], answers[1][key]) for key in answers[0] if key in answers[1]]
    tokens = [_tokens(run) for run in events]
    frames = []
    for side, run in enumerate(events):
        other = 1 - side
        matched = {pair[side]: _differences(tokens[side][pair[side]], tokens[other][pair[other]]) for pair in pairs}
        frames.append(page(run, differences=matched))
    data = {
        "names": names,
        "pages": frames,
        "runs": [_facts(run) for run in events],
        "pairs": [_pair(pair, tokens[0][pair[0]], tokens[1][pair[1]]) for pair in pairs],
    }
    code = {"/* COLOURS */": _read("colours.css"), "/* ELEMENTS */": _read("elements.js")}
    return _fill(_fill(_read("comparison.html"), code), {"/* COMPARISON */ {}": as_script(data)})


def _answers(events: list[Row]) -> dict[tuple[tuple[int, ...], int, int], str]:
    """Return {(prompt, number of earlier requests with it, index of the answer): sequence id}, in order of the requests."""
    sequences = defaultdict(list)
    for sequence_id in _tokens(events):
        request_id, _, answer = sequence_id.partition(".")
        sequences[request_id].append((int(answer or 0), sequence_id))
    answers, num_added = {}, Counter[tuple[int, ...]]()
    for event in events:
        if event["event"] == "RequestAdded":
            prompt = tuple(event["prompt_token_ids"])
            for number, sequence_id in sorted(sequences[event["request_id"]]):
                answers[prompt, num_added[prompt], number] = sequence_id
            num_added[prompt] += 1
    return answers


def _tokens(events: list[Row]) -> dict[str, dict[int, Row]]:
    """Return {sequence id: {position: the event of the token there}}."""
    tokens: dict[str, dict[int, Row]] = defaultdict(dict)
    for event in events:
        if event["event"] == "TokenAppended":
            tokens[event["sequence_id"]][event["position"]] = event
    return tokens


def _differences(tokens: dict[int, Row], others: dict[int, Row]) -> dict[int, str | None]:
    """Return {position: the text of the other run's token, or None if it has none} for tokens that differ."""
    found: dict[int, str | None] = {}
    for position, event in tokens.items():
        other = others.get(position)
        if other is None or other["token_id"] != event["token_id"]:
            found[position] = other["token"] if other else None
    return found


def _pair(pair: tuple[str, str], left: dict[int, Row], right: dict[int, Row]) -> Row:
    """Describe two sequences that belong together: lengths, the number of equal tokens, the first position that differs."""
    different = sorted({*_differences(left, right), *_differences(right, left)})
    num_equal = len({*left, *right}) - len(different)
    return {"ids": pair, "numTokens": [len(left), len(right)], "numEqual": num_equal, "first": next(iter(different), None)}


def _facts(events: list[Row]) -> Row:
    """Return the figures of a run."""
    scheduled = [event for event in events if event["event"] == "StepScheduled"]
    return {
        "steps": len(scheduled),
        "most tokens in a step": max(sum(event["num_new_tokens"]) for event in scheduled),
        "tokens drawn": sum(event["event"] == "TokenAppended" for event in events),
    }
