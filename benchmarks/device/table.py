"""Write the lines of a run as a block of Markdown, for BENCHMARKS.md."""

import datetime
import statistics
from collections import defaultdict

from benchmarks.device.processes import OTHER, THIS, Line

NO_COLUMN = ("part", "tree", "what", "text", "state", "seconds")


def block_of(lines: list[Line]) -> str:
    """Write a table for each part, with the medians of repeated results.

    With another tree, a cell has this tree's figure, in brackets the other's, and the ratio: this one divided by the other.
    """
    written = [f"## {lines[0]['what']}, {datetime.date.today()}"]
    for part in dict.fromkeys(line["part"] for line in lines):
        of_part = [line for line in lines if line["part"] == part]
        [state] = [line["state"] for line in of_part if "state" in line] or ["done"]
        written += ["", f"**{part}**" if state == "done" else f"**{part}**: {state}"]
        rows: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
        for line in of_part:
            if "what" in line:
                rows[line["what"]][line["tree"]].append(line)
        if columns := list(dict.fromkeys(name for line in of_part for name in line if name not in NO_COLUMN)):
            written += ["", f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
            written += [f"| {what} | {' | '.join(_cell(trees, name) for name in columns)} |" for what, trees in rows.items()]
        for line in of_part:
            if line.get("text"):
                written += ["", "```text", *line["text"].splitlines(), "```"]
    return "\n".join(written) + "\n"


def _cell(trees: dict[str, list[Line]], column: str) -> str:
    ours, theirs = ([line[column] for line in trees.get(tree, []) if column in line] for tree in (THIS, OTHER))
    if not ours or not isinstance(ours[0], int | float) or isinstance(ours[0], bool):
        return str(ours[0]) if ours else ""
    median = statistics.median(ours)
    if not theirs or not (other := statistics.median(theirs)):
        return f"{median:,.4g}"
    return f"{median:,.4g} ({other:,.4g}: {median / other:.2f})"
