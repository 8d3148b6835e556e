"""Two recordings -> one HTML page that replays both side by side, and marks the tokens that differ.

In: the events of two runs as plain dicts. Out: page/comparison.html with two pages of viewer.py in frames. Sequences of the
two runs belong together if they are the same answer to the same prompt, in the order in which the requests were added.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from nanoinfer.tracing import viewer

Row = dict[str, Any]


def page(runs: tuple[Iterable[Row], Iterable[Row]], names: tuple[str, str]) -> str:
    """The page of two runs. The events are dicts {"event": its class, its fields ...}."""
    events = [list(run) for run in runs]
    answers = [_answers(run) for run in events]
    pairs = [(answers[0][key], answers[1][key]) for key in answers[0] if key in answers[1]]
    tokens = [_tokens(run) for run in events]
    frames = []
    for side, run in enumerate(events):
        other = 1 - side
        matched = {pair[side]: _differences(tokens[side][pair[side]], tokens[other][pair[other]]) for pair in pairs}
        frames.append(viewer.page(run, differences=matched))
    data = {
        "names": names,
        "pages": frames,
        "runs": [_facts(run) for run in events],
        "pairs": [_pair(pair, tokens[0][pair[0]], tokens[1][pair[1]]) for pair in pairs],
    }
    template = (viewer.FOLDER / "comparison.html").read_text(encoding="utf-8")
    return viewer.fill(template, {"/* COLOURS */": viewer.colours(), "/* COMPARISON */ {}": viewer.as_script(data)})


def _answers(events: list[Row]) -> dict[Any, str]:
    """{(prompt, number of earlier requests with this prompt, number of the answer): sequence id}, in order of the requests."""
    sequences = defaultdict(list)
    for sequence_id in _tokens(events):
        request_id, _, answer = sequence_id.partition(".")
        sequences[request_id].append((int(answer or 0), sequence_id))
    answers, num_added = {}, Counter[Any]()
    for event in events:
        if event["event"] == "RequestAdded":
            prompt = tuple(event["prompt_token_ids"])
            for number, sequence_id in sorted(sequences[event["request_id"]]):
                answers[prompt, num_added[prompt], number] = sequence_id
            num_added[prompt] += 1
    return answers


def _tokens(events: list[Row]) -> dict[str, dict[int, Row]]:
    """{sequence id: {position: the event of the token there}}."""
    tokens: dict[str, dict[int, Row]] = defaultdict(dict)
    for event in events:
        if event["event"] == "TokenAppended":
            tokens[event["sequence_id"]][event["position"]] = event
    return tokens


def _differences(tokens: dict[int, Row], others: dict[int, Row]) -> dict[int, str | None]:
    """{position: the text of the other run's token, None if it has none} where the token is another one."""
    found: dict[int, str | None] = {}
    for position, event in tokens.items():
        other = others.get(position)
        if other is None or other["token_id"] != event["token_id"]:
            found[position] = other["token"] if other else None
    return found


def _pair(pair: tuple[str, str], left: dict[int, Row], right: dict[int, Row]) -> Row:
    """Two sequences that belong together: their lengths, the number of equal tokens and the first position that differs."""
    different = sorted({*_differences(left, right), *_differences(right, left)})
    num_equal = len({*left, *right}) - len(different)
    return {"ids": pair, "numTokens": [len(left), len(right)], "numEqual": num_equal, "first": next(iter(different), None)}


def _facts(events: list[Row]) -> Row:
    """What a run needed."""
    scheduled = [event for event in events if event["event"] == "StepScheduled"]
    return {
        "steps": len(scheduled),
        "most tokens in a step": max(sum(event["num_new_tokens"]) for event in scheduled),
        "tokens drawn": sum(event["event"] == "TokenAppended" for event in events),
    }
