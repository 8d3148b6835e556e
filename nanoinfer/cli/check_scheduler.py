"""`nanoinfer check-scheduler`: walk every schedule of a small world, with a scheduler and a block manager of one's own."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nanoinfer.cli.options import AsJson, expand_options, import_modules, print_result
from nanoinfer.config import class_named
from nanoinfer.errors import InvalidTypeError, InvalidValueError, suggest


@expand_options
def check_scheduler(
    *,
    scheduler: Annotated[
        str | None, typer.Argument(metavar="MODULE:CLASS", help="A subclass of Scheduler. Default: the engine's own.")
    ] = None,
    block_manager_cls: Annotated[
        str | None, typer.Option(metavar="MODULE:CLASS", help="A subclass of BlockManager. Default: the engine's own.")
    ] = None,
    world: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER", help="A size of the world, such as num_requests=2 or async_scheduling=1. May be repeated."
        ),
    ] = None,
    html: Annotated[Path, typer.Option(help="Path of the HTML replay of a run that breaks a promise.")] = Path("trace.html"),
    as_json: AsJson = False,
) -> None:
    """Check every schedule of three requests, four blocks and two places: no block lost, no request starved, no wrong token.

    If a promise is broken, print a shortest run that breaks it, and write a page that replays it. Takes a minute or two.
    """
    from nanoinfer.scheduling.block_manager import BlockManager
    from nanoinfer.scheduling.scheduler import Scheduler
    from nanoinfer.testing.schedules import BrokenPromiseError, World, explore, replay
    from nanoinfer.tracing import Recorder, StepScheduled

    def print_seen(seen: dict[str, float]) -> None:
        counts = f"{seen['num_states']:,} states, {seen['num_transitions']:,} transitions"
        print(f"{counts}, no promise broken. {seen['seconds']:.0f} s")

    import_modules(None, scheduler, block_manager_cls)
    scheduler_class = class_named("MODULE:CLASS", scheduler) or Scheduler
    manager_class = class_named("block_manager_cls", block_manager_cls) or BlockManager
    for given, base in (scheduler_class, Scheduler), (manager_class, BlockManager):
        if not issubclass(given, base):
            raise InvalidTypeError(f"{given.__name__} must be a subclass of nanoinfer's {base.__name__}")
    sizes = replace(World(), **dict(map(_size, world or ())))
    with Console(stderr=True).status("Exploring") as status:
        try:
            seen = explore(
                scheduler_class,
                manager_class,
                sizes,
                lambda seen: status.update(f"Exploring: {seen.num_states:,} states after {seen.num_events} events"),
            )
            return print_result(seen._asdict(), as_json, print_seen)
        except BrokenPromiseError as broken:
            error = broken
    recorder = Recorder()
    replay(scheduler_class, manager_class, sizes, error.events, recorder)
    print(error)
    if recorder.of(StepScheduled):
        recorder.to_html(html)
        print(f"{html} replays it in a browser, from the disk", file=sys.stderr)
    raise typer.Exit(1)


def _size(given: str) -> tuple[str, Any]:
    """Return a name and a number of NAME=NUMBER."""
    from nanoinfer.testing.schedules import World

    name, _, number = given.partition("=")
    known = [field.name for field in fields(World)]
    if name not in known:
        raise InvalidValueError(f"--world has no {name!r}; {suggest(name, known)}")
    if not number.isdecimal():
        raise InvalidValueError(f"--world must be NAME=NUMBER, got {given!r}")
    return name, int(number)
