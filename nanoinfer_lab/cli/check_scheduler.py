"""`nanoinfer check-scheduler`: walk every schedule of a small world, with a scheduler and a block manager of one's own."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nanoinfer.cli.options import AsJson, check_writable, expand_options, import_modules, print_result
from nanoinfer.config import class_named
from nanoinfer.errors import InvalidTypeError, InvalidValueError, suggest


@expand_options
def check_scheduler(
    *,
    classes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODULE:CLASS...",
            help="A subclass of Scheduler, of BlockManager, or one of each. Default: the engine's own.",
        ),
    ] = None,
    world: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER", help="A size of the world, such as num_requests=2 or async_scheduling=1. May be repeated."
        ),
    ] = None,
    html: Annotated[Path, typer.Option(help="Path of the HTML replay of a violation.")] = Path("trace.html"),
    as_json: AsJson = False,
) -> None:
    """Check every schedule of three requests, four blocks and two places: no block lost, no request starved, no wrong token.

    If an invariant is violated, print a shortest run that violates it, and write a page that replays it. Takes a minute or two.
    """
    from nanoinfer.features.tracing import Recorder, StepScheduled
    from nanoinfer.scheduling.block_manager import BlockManager
    from nanoinfer.scheduling.scheduler import Scheduler
    from nanoinfer_lab.testing import schedules

    def print_seen(seen: dict[str, float]) -> None:
        counts = f"{seen['num_states']:,} states, {seen['num_transitions']:,} transitions"
        print(f"{counts}, no invariant violated. {seen['seconds']:.0f} s")

    check_writable(html)
    import_modules(None, *classes or ())
    given = [class_named("MODULE:CLASS", name) or type(None) for name in classes or ()]
    schedulers = [cls for cls in given if issubclass(cls, Scheduler)] or [Scheduler]
    managers = [cls for cls in given if issubclass(cls, BlockManager)] or [BlockManager]
    if len(schedulers) > 1 or len(managers) > 1 or not {*given} <= {*schedulers, *managers}:
        names = ", ".join(cls.__name__ for cls in given)
        raise InvalidTypeError(f"MODULE:CLASS must be a subclass of Scheduler, of BlockManager, or one of each, got {names}")
    checked = schedulers[0], managers[0]
    sizes = replace(schedules.World(), **dict(map(_size, world or ())))
    with Console(stderr=True).status("Exploring, a minute or two with the default world") as status:
        try:
            seen = schedules.check_scheduler(
                *checked,
                sizes,
                lambda seen: status.update(f"Exploring: {seen.num_states:,} states after {seen.num_events} events"),
            )
            return print_result(seen._asdict(), as_json, print_seen)
        except schedules.InvariantError as broken:
            error = broken
    recorder = Recorder()
    schedules.replay(*checked, sizes, error.events, recorder)
    print(error)
    if recorder.of(StepScheduled):
        recorder.to_html(html)
        print(f"{html} replays it in a browser, from the disk", file=sys.stderr)
    raise typer.Exit(1)


def _size(given: str) -> tuple[str, Any]:
    """Return a name and a number of NAME=NUMBER."""
    from nanoinfer_lab.testing.schedules import World

    name, _, number = given.partition("=")
    known = [field.name for field in fields(World)]
    if name not in known:
        raise InvalidValueError(f"--world has no {name!r}; {suggest(name, known)}")
    if not number.isdecimal():
        raise InvalidValueError(f"--world must be NAME=NUMBER, got {given!r}")
    return name, int(number)
