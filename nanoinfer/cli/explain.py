"""`nanoinfer explain`: record a generation, print a line for each token, and write the HTML replay.

A line has the model's probability of the token, the stages of sampling, the draw and the text that was shown. Recorder.to_html
draws the same in more detail. With --demo the run is one of demos.py, and the moments to look at are printed, too.
"""

from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanoinfer.cli import options
from nanoinfer.cli.demos import DEMOS, Demo
from nanoinfer.errors import InvalidValueError, NanoinferError
from nanoinfer.tracing import Recorder, StageApplied, TokenAppended, TokenDrawn


@options.expand_options
def explain(
    *,
    context: typer.Context,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="The texts to continue, together; - reads standard input.", metavar="PROMPT...")
    ] = None,
    engine: options.EngineOptions,
    block_size: Annotated[int, typer.Option(help="Tokens per block of the KV cache; small ones show more.")] = 16,
    sampling: options.SamplingOptions,
    max_tokens: options.MaxTokens = 32,
    demo: Annotated[
        str | None, typer.Option(help=f"A prepared run: {', '.join(DEMOS)}. Takes --html and --jsonl, and no other option.")
    ] = None,
    html: Annotated[Path, typer.Option(help="Path of the HTML replay.")] = Path("trace.html"),
    jsonl: Annotated[Path | None, typer.Option(help="Path for the events, too, one line of JSON each.")] = None,
) -> None:
    """Explain each token: print a table, and write an HTML page that replays the generation."""
    if html == jsonl:
        raise InvalidValueError(f"--html and --jsonl must be two files, got {html} for both; name another")
    for path in (html, jsonl):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidValueError(f"cannot write {path}: there is no such folder; give another path")
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
        options.print_error(NanoinferError(f"prompt {index}: {error}"))
    if recorder.of(TokenAppended):
        Console().print(token_table(recorder))
        _write(recorder.to_html, html, "replays it in a browser, from the disk")
    if jsonl:
        _write(recorder.to_jsonl, jsonl, "has the events; Recorder.from_jsonl reads them")
    if prepared:
        print("What to look at:")
        for step, sequence_id, description in prepared.find(recorder):
            print(f"- Step {step}: {description}\n  {html.absolute().as_uri()}#step={step}&token={sequence_id}")
    if errors:
        raise typer.Exit(1)


def find_demo(name: str, context: typer.Context) -> Demo:
    """Return the demo of a name. Raises: InvalidValueError, also if the command line has options that the demo sets."""
    if name not in DEMOS:
        raise InvalidValueError(f"--demo must be one of {', '.join(DEMOS)}, got {name!r}")
    given = {one.name: one.opts[0] for one in context.command.params if one.name is not None}
    sources = {option: context.get_parameter_source(one) for one, option in given.items()}
    others = [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if refused := [option for option in others if option not in ("--demo", "--html", "--jsonl")]:
        raise InvalidValueError(f"--demo is a prepared run and takes --html and --jsonl only; leave out {', '.join(refused)}")
    return DEMOS[name]


def _write(write: Callable[[Path], None], path: Path, what: str) -> None:
    try:
        write(path)
    except OSError as error:
        raise NanoinferError(f"cannot write {path} ({error.strerror}); give another path") from error
    print(f"{path} {what}")


def token_table(recorder: Recorder) -> Table:
    """Make a table of the tokens of every sequence, in order.

    The column `left` has the number of ids to draw from, then the number after each stage that dropped some. The recorder must
    have recorded stages.
    """
    stages: dict[tuple[str, int], list[StageApplied]] = {}
    for stage_event in recorder.of(StageApplied):
        applied = stages.setdefault((stage_event.sequence_id, stage_event.position), [])
        if stage_event.stage == "model" and all(one.before == one.after for one in stage_event.candidates):
            applied.clear()  # at the first stage, because a token may be drawn twice, and the last draw counts
        applied.append(stage_event)
    draws: dict[tuple[str, int], TokenDrawn] = {(one.sequence_id, one.position): one for one in recorder.of(TokenDrawn)}
    table = options.new_table("at", "token", "p", "left", "u", "interval", "text")
    appended = sorted(recorder.of(TokenAppended), key=lambda event: [int(part) for part in event.sequence_id.split(".")])
    for sequence_id, events in groupby(appended, key=lambda event: event.sequence_id):
        table.add_row("", Text(f"sequence {sequence_id}", style="bold"))
        for event in events:
            draw, applied = draws[sequence_id, event.position], stages[sequence_id, event.position]
            p = next(one.after for one in applied[0].candidates if one.token_id == event.token_id)
            left = [str(applied[0].num_left)]
            left += [f"{b.stage.removeprefix('keep_')} {b.num_left}" for a, b in pairwise(applied) if a.num_left != b.num_left]
            table.add_row(
                str(event.position),
                Text(repr(event.token)),
                f"{p:.3f}",
                " > ".join(left),
                "greedy" if draw.u is None else f"{draw.u:.3f}",
                f"{draw.low:.3f} - {draw.high:.3f}",
                Text(_shown_text(event)),
            )
        table.add_section()
    return table


def _shown_text(event: TokenAppended) -> str:
    shown = repr(event.text) if event.text else ""
    if event.held or event.num_held_ids:
        shown += f" (held: {event.held!r})" if event.held else " (held: half a character)"
    if event.finish_reason:
        reason = event.finish_reason if event.stop_reason is None else f"{event.finish_reason}, {event.stop_reason!r}"
        shown += f" (end: {reason})"
    return shown.strip()
