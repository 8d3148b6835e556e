"""`nanoinfer models`: the bundled models and those in the Hugging Face cache. It needs no network and reads no weights."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from rich.console import Console

from nanoinfer.cli.options import new_table
from nanoinfer.errors import NanoinferError
from nanoinfer.models.checkpoint import BUNDLED, Checkpoint, bundled_models
from nanoinfer.models.loader import on_meta


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine.

    name: what --model takes.
    architecture: of config.json, "" where it has none.
    unsupported_reason: None if the model can be loaded.
    """

    name: str
    architecture: str
    num_parameters: int
    num_bytes: int
    unsupported_reason: str | None


def local_models() -> list[LocalModel]:
    """Find the models on this machine, in the order of their names, the bundled ones first."""
    return [_examine(name, folder, num_bytes) for name, folder, num_bytes in [*_bundled(), *sorted(_cached())]]


def print_table(models: list[LocalModel]) -> None:
    """Print a row for each model, and below the table why a model cannot be loaded."""
    table = new_table("model", "architecture", "parameters", "MB", "supported")
    table.columns[0].no_wrap = True  # to be copied
    for model in models:
        parameters = f"{model.num_parameters / 1e6:,.1f} M" if model.num_parameters else ""
        is_supported = "no" if model.unsupported_reason else "yes"
        table.add_row(model.name, model.architecture, parameters, f"{model.num_bytes / 1e6:,.1f}", is_supported)
    Console().print(table)
    for model in models:
        if model.unsupported_reason:
            print(f"{model.name}: {model.unsupported_reason}")


def _bundled() -> Iterator[tuple[str, Path, int]]:
    for name in bundled_models():
        yield name, BUNDLED / name, sum(path.stat().st_size for path in (BUNDLED / name).iterdir())


def _cached() -> Iterator[tuple[str, Path, int]]:
    """The name, folder and size of each model in the cache: its branch main, or its newest revision."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:  # nothing was downloaded yet
        return
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            revision = max(repository.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
            yield repository.repo_id, revision.snapshot_path, repository.size_on_disk


def _examine(name: str, folder: Path, num_bytes: int) -> LocalModel:
    architecture, num_parameters, reason = "", 0, None
    try:
        checkpoint = Checkpoint.open(str(folder))
        architecture = ", ".join(map(str, checkpoint.config.get("architectures") or ()))
        num_parameters = sum(weight.numel() for weight in on_meta(checkpoint)[0].parameters())
    except NanoinferError as error:
        reason = str(error).partition("\n")[0].partition("; ")[0].replace(f"{folder}{os.sep}", "")
    return LocalModel(name, architecture, num_parameters, num_bytes, reason)
