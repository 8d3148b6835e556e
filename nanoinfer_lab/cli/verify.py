"""`nanoinfer verify`: its options. ../verify.py compares, and is imported when the command runs, because it imports torch."""

from typing import Annotated

import typer

from nanoinfer.cli.commands import complete_models
from nanoinfer.cli.options import AsJson, Model, busy, expand_options, print_result
from nanoinfer.config import EngineArgs


@expand_options
def verify(
    *,
    model: Model = None,
    revision: Annotated[str | None, EngineArgs] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The checkpoint that transformers reads. Default: the model's own. A quantised model or a GGUF file needs it.",
            autocompletion=complete_models,
        ),
    ] = None,
    variants: Annotated[
        str | None, typer.Option(help="Some of float32, bfloat16, float16, int8, int4, with commas. Default: all but float16.")
    ] = None,
    device: Annotated[str, EngineArgs] = "auto",
    as_json: AsJson = False,
) -> None:
    """Compare a model, as it runs on this machine, with transformers: greedy tokens, log-probabilities, perplexity."""
    with busy("Starting"):
        from nanoinfer_lab.verify import examine, print_report

    report = examine(model, revision, against=against, variants=variants, device=device)
    print_result(report, as_json, print_report)
    if report.has_failed:
        raise typer.Exit(1)
