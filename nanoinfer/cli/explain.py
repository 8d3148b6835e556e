"""A recorded generation in a terminal: a line for each token, from the model's opinion to the text that was let out.

In: a Recorder(stages=True). Out: a rich table. Recorder.to_html draws the same and more.
"""

from itertools import groupby, pairwise

from rich.table import Table
from rich.text import Text

from nanoinfer.tracing import Recorder, StageApplied, TokenAppended, TokenDrawn


def token_table(recorder: Recorder) -> Table:
    """The tokens of every sequence, in order. `left`: how many ids there were to draw from, and how many each
    stage left that took some."""
    stages: dict[tuple[str, int], list[StageApplied]] = {}
    for event in recorder.of(StageApplied):
        seen = stages.setdefault((event.sequence_id, event.position), [])
        if event.stage == "model" and all(one.before == one.after for one in event.candidates):
            seen.clear()  # the first; a token that was drawn again begins again
        seen.append(event)
    draws: dict[tuple[str, int], TokenDrawn] = {(one.sequence_id, one.position): one for one in recorder.of(TokenDrawn)}
    table = Table("at", "token", "p", "left", "u", "interval", "text")
    appended = sorted(recorder.of(TokenAppended), key=lambda event: [int(part) for part in event.sequence_id.split(".")])
    for sequence_id, events in groupby(appended, key=lambda event: event.sequence_id):
        table.add_row("", Text(f"sequence {sequence_id}", style="bold"))
        for event in events:
            draw, seen = draws[sequence_id, event.position], stages[sequence_id, event.position]
            p = next(one.after for one in seen[0].candidates if one.token_id == event.token_id)
            left = [str(seen[0].num_left)]
            left += [f"{b.stage.removeprefix('keep_')} {b.num_left}" for a, b in pairwise(seen) if a.num_left != b.num_left]
            table.add_row(
                str(event.position),
                Text(repr(event.token)),
                f"{p:.3f}",
                " > ".join(left),
                "greedy" if draw.u is None else f"{draw.u:.3f}",
                f"{draw.low:.3f} - {draw.high:.3f}",
                Text(_let_out(event)),
            )
        table.add_section()
    return table


def _let_out(event: TokenAppended) -> str:
    told = repr(event.text) if event.text else ""
    if event.held or event.num_held_ids:
        told += f" (held: {event.held!r})" if event.held else " (held: half a character)"
    if event.finish_reason:
        why = event.finish_reason if event.stop_reason is None else f"{event.finish_reason}, {event.stop_reason!r}"
        told += f" (end: {why})"
    return told.strip()
