"""The commands that examine: this machine, the models on it, and one model. Each imports torch when it runs."""

from functools import partial
from typing import Annotated

import typer

from nanoinfer.cli.commands import complete_models
from nanoinfer.cli.options import AsJson, Model, busy, expand_options, print_result
from nanoinfer.config import EngineArgs


@expand_options
def doctor(
    *,
    model: Model = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="List each attention backend, and what is compiled of the model.")
    ] = False,
    bits: Annotated[
        bool, typer.Option("--bits", help="Compare tokens and log-probabilities in float32 with the published ones.")
    ] = False,
    prefix_cache_dir: Annotated[str | None, EngineArgs] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Only remove the kernels, packed weights and prefixes that are kept on disk.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a bug report needs: this machine, and what the engine will use on it. Check each attention backend."""
    if clear:
        from nanoinfer.cli.doctor import print_removed, remove_cached

        return print_result(remove_cached(prefix_cache_dir), as_json, print_removed)
    with busy("Examining this machine"):
        from nanoinfer.cli.doctor import examine, print_report

        with_model = kernels or model is not None
        report = examine(model, with_model=with_model, with_bits=bits, prefix_cache_dir=prefix_cache_dir)
    print_result(report, as_json, partial(print_report, with_kernels=kernels))
    if any(check.failed for check in report.checks) or report.has_other_bits:
        raise typer.Exit(1)


@expand_options
def models(*, as_json: AsJson = False) -> None:
    """List the bundled models and those in the Hugging Face cache."""
    with busy("Reading the models' headers"):
        from nanoinfer.cli.inspect import installed_models, print_models

        found = installed_models()
    print_result(found, as_json, print_models)


@expand_options
def inspect(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A folder, a .gguf file, a hub name or a bundled model.", autocompletion=complete_models
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    dtype: Annotated[str, EngineArgs] = "auto",
    users: Annotated[int, typer.Option(min=1, help="Sequences at a time, for the memory they take.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each. Default: the model's maximum.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a checkpoint is, whether it can be loaded, and its memory."""
    from nanoinfer.cli.inspect import examine, print_inspection

    found = examine(model, revision, dtype=dtype, num_users=users, num_tokens=tokens)
    print_result(found, as_json, print_inspection)
    if found.unsupported_reason is not None:
        raise typer.Exit(1)
