"""`nanoinfer explain`: record a generation, write the HTML replay, and print a line for each of the first tokens.

A line shows the model's probability of the token, the stages of sampling, the draw and the released text. Recorder.to_html
draws the same in more detail. With --demo the run is one of demos.py, whose moments to look at are printed, too.
"""

import json
import sys
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from nanoinfer.cli import options
from nanoinfer.cli.commands import complete_from, print_error
from nanoinfer.errors import InvalidValueError
from nanoinfer.features.tracing import Recorder, StageApplied, TokenAppended, TokenDrawn
from nanoinfer.sampling_params import SamplingParams
from nanoinfer_lab.cli.demos import DEMOS, Demo


@options.expand_options
def explain(
    *,
    context: typer.Context,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="The texts to continue, together; - reads standard input.", metavar="PROMPT...")
    ] = None,
    engine: options.EngineOptions,
    block_size: Annotated[int, typer.Option(help="Tokens per block; small blocks show more.")] = 8,
    sampling: options.SamplingOptions,
    max_tokens: Annotated[int, SamplingParams] = 32,
    demo: Annotated[
        str | None,
        typer.Option(
            help=f"A prepared run: {', '.join(DEMOS)}. Takes --html and --json, and no other option.",
            autocompletion=complete_from(*DEMOS),
        ),
    ] = None,
    html: Annotated[Path, typer.Option(help="Path of the HTML replay.")] = Path("trace.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Explain each token: print a table, and write an HTML page that replays the generation."""
    options.check_writable(html)
    recorder = Recorder(stages=True)
    prepared = find_demo(demo, context) if demo is not None else None
    if prepared:
        engine = options.EngineOptions(dtype="float32", kv_cache_memory=prepared.kv_cache_memory)
        llm = options.load_llm(engine, **prepared.engine, tracer=recorder)
        texts, params = prepared.prompts, prepared.params
    elif prompts:
        llm = options.load_llm(engine, block_size=block_size, tracer=recorder)
        texts = [options.read_standard_input() if text == "-" else text for text in prompts]
        params = options.resolve_sampling_params(llm, sampling, max_tokens=max_tokens)
    else:
        raise InvalidValueError("there is nothing to explain; give a prompt or --demo")
    outputs = llm.generate(texts, params, use_tqdm=False)
    errors = {index: output.outputs[0].error for index, output in enumerate(outputs) if output.outputs[0].error}
    for index, error in errors.items():
        print_error(f"prompt {index}: {error}")
    tokens = token_rows(recorder)
    if as_json:
        print(json.dumps(tokens, indent=1))
    remarks = sys.stderr if as_json else sys.stdout
    if tokens:
        recorder.to_html(html)
        print(f"{html} replays it in a browser: {html.absolute().as_uri()}", file=remarks)
    if tokens and not as_json:
        print()
        print_tokens(tokens)
        print(LEGEND)
    if not prepared:
        print("nanoinfer explain --demo preemption shows what happens when no block is free.", file=remarks)
    else:
        print("What to look at:", file=remarks)
        for step, sequence_id, description in prepared.find(recorder):
            print(f"- Step {step}: {description}\n  {html.absolute().as_uri()}#step={step}&token={sequence_id}", file=remarks)
    if errors:
        raise typer.Exit(1)


def find_demo(name: str, context: typer.Context) -> Demo:
    """Return the demo with this name. Raises: InvalidValueError, also if the command line has options that the demo sets."""
    if name not in DEMOS:
        raise InvalidValueError(f"--demo must be one of {', '.join(DEMOS)}, got {name!r}")
    given = {option.name: option.opts[0] for option in context.command.params if option.name is not None}
    sources = {option: context.get_parameter_source(parameter) for parameter, option in given.items()}
    others = [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if refused := [option for option in others if option not in ("--demo", "--html", "--json")]:
        raise InvalidValueError(f"--demo is a prepared run and takes --html and --json only; leave out {', '.join(refused)}")
    return DEMOS[name]


MAX_LINES = 12  # of the table, which shows the first tokens. The page has all

LEGEND = """\
p: the model's probability of the token. left: the ids to draw from, then those after each stage of sampling. u: the random
number. interval: the token's share of what is left; the token whose interval holds u is drawn.
"""


def token_rows(recorder: Recorder) -> list[dict[str, Any]]:
    """Return a dict for each token of every sequence, in order. The recorder must have recorded stages."""
    stages: dict[tuple[str, int], list[StageApplied]] = {}
    for stage_event in recorder.of(StageApplied):
        applied = stages.setdefault((stage_event.sequence_id, stage_event.position), [])
        if stage_event.stage == "model" and all(candidate.before == candidate.after for candidate in stage_event.candidates):
            applied.clear()  # a token may be drawn twice, and only the last draw counts
        applied.append(stage_event)
    draws: dict[tuple[str, int], TokenDrawn] = {(draw.sequence_id, draw.position): draw for draw in recorder.of(TokenDrawn)}
    appended = sorted(recorder.of(TokenAppended), key=lambda event: [int(part) for part in event.sequence_id.split(".")])
    rows = []
    for event in appended:
        draw, applied = draws[event.sequence_id, event.position], stages[event.sequence_id, event.position]
        changed = [after for before, after in pairwise(applied) if before.num_left != after.num_left]
        rows.append(
            {
                "sequence": event.sequence_id,
                "at": event.position,
                "token_id": event.token_id,
                "token": event.token,
                "p": next(candidate.after for candidate in applied[0].candidates if candidate.token_id == event.token_id),
                "left": {stage.stage.removeprefix("keep_"): stage.num_left for stage in (applied[0], *changed)},
                "u": draw.u,
                "interval": [draw.low, draw.high],
                "text": _shown_text(event),
            }
        )
    return rows


def print_tokens(tokens: list[dict[str, Any]]) -> None:
    """Print a table of the first of token_rows."""
    rows: list[list[str | Text]] = []
    for sequence_id, of_sequence in groupby(tokens, key=itemgetter("sequence")):
        rows.append(["", Text(f"sequence {sequence_id}", style="bold")])
        for row in of_sequence:
            first, *after = row["left"].items()
            left = " > ".join([str(first[1]), *(f"{stage} {num}" for stage, num in after)])
            u = "greedy" if row["u"] is None else f"{row['u']:.3f}"
            interval = " - ".join(f"{bound:.3f}" for bound in row["interval"])
            rows.append([str(row["at"]), Text(repr(row["token"])), f"{row['p']:.3f}", left, u, interval, Text(row["text"])])
        rows.append([])
    headings = ("at", "token", "p", "left", "u", "interval", "text")
    ends = [num for num in range(len(rows), 0, -1) if len(rows[num - 1]) > 2]  # after a token, not after a heading
    num_rows = next(num for num in ends if num == 2 or len(options.table_lines(headings, rows[:num])) <= MAX_LINES)
    options.print_table(headings, rows[:num_rows])
    if num_left := len(tokens) - sum(len(row) > 2 for row in rows[:num_rows]):
        print(f"{num_left} more tokens are in the page, and in the output of --json.\n")


def _shown_text(event: TokenAppended) -> str:
    shown = repr(event.text) if event.text else ""
    if event.held or event.num_held_ids:
        shown += f" (held: {event.held!r})" if event.held else " (held: half a character)"
    if event.finish_reason:
        reason = event.finish_reason if event.stop_reason is None else f"{event.finish_reason}, {event.stop_reason!r}"
        shown += f" (end: {reason})"
    return shown.strip()
