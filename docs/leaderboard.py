"""Check leaderboard.jsonl, and write its table, LEADERBOARD.md: `python docs/leaderboard.py`.

Nobody can repeat another machine's times, but a part of each line is deterministic. The ladder's versions are those of
nanoinfer_lab/bench/ladder.py, and the bytes that a version reads for each token are the same everywhere, so the share of the
bandwidth by the tokens per second is too, up to the machine's bandwidth. A game is played again.
"""

import json
import sys
from pathlib import Path
from typing import Any

import scheduler_game

from nanoinfer_lab.bench.ladder import ENGINE, PLAIN

ROOT = Path(__file__).parents[1]
LINES, PAGE = ROOT / "leaderboard.jsonl", ROOT / "LEADERBOARD.md"
REPEATED = ("a batch", "the engine: pages", "compiled layers", "fast sampling")  # versions that read the same bytes per token
TOLERANCE = 0.15  # of their ratio, in which shares are rounded
HEAD = """\
# Leaderboard

What readers' machines reach. A line of [leaderboard.jsonl](leaderboard.jsonl) is a result, and `python docs/leaderboard.py`
checks what can be repeated and writes this page. To add yours, append a line and open a pull request:

- `ladder`: of `nanoinfer bench ladder --json`, each rung as [version, tokens per second, share of the bandwidth]. Say which
  machine.
- `game`: a trace of the [scheduler game](docs/scheduler_game.md), your four choices, and the goodput.

"""


def faults_of_ladder(entry: dict[str, Any]) -> list[str]:
    """Return what cannot be right in a ladder."""
    rungs = {version: (rate, share) for version, rate, share in entry["rungs"]}
    if list(rungs) != [*PLAIN, *ENGINE]:
        return [f"its versions are {', '.join(rungs)}, and those of the ladder are {', '.join([*PLAIN, *ENGINE])}"]
    found = [f"{version}: {share} is no share" for version, (_, share) in rungs.items() if not 0 < share < 4]
    bytes_per_token = [rungs[version][1] / rungs[version][0] for version in REPEATED]
    if max(bytes_per_token) > min(bytes_per_token) * (1 + TOLERANCE):
        found.append(f"share by tokens per second must be the same for {', '.join(REPEATED)}, got {bytes_per_token}")
    return found


def faults_of_game(entry: dict[str, Any]) -> list[str]:
    """Return what cannot be right in a game, which is played again."""
    traces = {trace.name: trace for trace in scheduler_game.make_traces()}
    choice = tuple(entry["choice"])
    if entry["trace"] not in traces or choice not in scheduler_game.CHOICES:
        return [f"there is no such trace or choice: {entry['trace']}, {choice}"]
    goodput = scheduler_game.play(traces[entry["trace"]], choice)["goodput"]
    return [] if goodput == entry["goodput"] else [f"the goodput is {goodput}, not {entry['goodput']}"]


def page(entries: list[dict[str, Any]]) -> str:
    """Write the page: the ladders by their fastest version, and the best game of each trace."""
    rows = [
        "| who | machine | model | fastest version | tokens per second | share of the bandwidth |",
        "|---|---|---|---|---|---|",
    ]
    ladders = [(max(entry["rungs"], key=lambda rung: rung[1]), entry) for entry in entries if entry["kind"] == "ladder"]
    for (version, rate, share), entry in sorted(ladders, key=lambda pair: -pair[0][1]):
        rows.append(f"| {entry['who']} | {entry['machine']} | {entry['model']} | {version} | {rate} | {share:.0%} |")
    rows += ["", "| trace | who | choices | goodput |", "|---|---|---|---|"]
    games = sorted(
        (entry for entry in entries if entry["kind"] == "game"), key=lambda entry: (entry["trace"], -entry["goodput"])
    )
    for entry in games:
        rows.append(f"| {entry['trace']} | {entry['who']} | {', '.join(map(str, entry['choice']))} | {entry['goodput']} |")
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    entries = [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]
    for number, entry in enumerate(entries, 1):
        for fault in faults_of_game(entry) if entry["kind"] == "game" else faults_of_ladder(entry):
            sys.exit(f"line {number}: {fault}")
    PAGE.write_text(page(entries), encoding="utf-8")


if __name__ == "__main__":
    main()
