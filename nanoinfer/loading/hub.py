"""Find a model of the hub in its cache, and download it if it is not there.

In: a name that is no file or folder of this machine. Out: a path, or an error that explains the failure and what to try.
"""

import difflib
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from nanoinfer.errors import CheckpointNotFoundError, shown
from nanoinfer.loading.folders import bundled_models, list_bundled, list_folder

_NOT_NEEDED = ["*/*", "consolidated*.safetensors"]  # folders of other formats, and Mistral's own second copy of the weights


def download(model: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the folder of a hub model, with the files that match one of the patterns."""
    path = Path(model).expanduser()
    if path.is_absolute() or model.startswith(".") or path.suffix == ".gguf":
        hint = f"{_did_you_mean(model)}give a checkpoint's folder, a .gguf file on this machine, or a hub name"
        kind = "file" if path.suffix == ".gguf" else "folder"
        raise CheckpointNotFoundError(f"there is no {kind} {shown(model)}; {hint}")
    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED))
        has_weights = any(name.endswith((".safetensors", ".bin")) for name in list_folder(folder))
        if constants.HF_HUB_OFFLINE and "*.safetensors" in patterns and not has_weights:
            raise LocalEntryNotFoundError("only the small files were downloaded before")
        return folder
    except HFValidationError as error:
        raise CheckpointNotFoundError(
            f"{shown(model)} is neither a folder nor a possible hub name (owner/name); {_did_you_mean(model)}{list_bundled()}"
        ) from error
    except Exception as error:  # the hub's own errors, and those of its HTTP library without a network
        reason, hint = _explain(error, model)
        raise CheckpointNotFoundError(
            f"{shown(model)} is no folder here, and the hub did not give it (revision {(revision or 'main')[:100]}): {reason}; "
            f"{_did_you_mean(model)}{hint}, or use a folder; {list_bundled()}"
        ) from error


def _explain(error: Exception, model: str) -> tuple[str, str]:
    """Return why a hub's model cannot be downloaded, and a hint."""
    log_in = "`hf auth login`, or set HF_TOKEN"
    if constants.HF_HUB_CACHE.startswith("~"):
        return "the hub keeps models in the home folder, and this user has none", "set HF_HOME to a folder for models"
    if isinstance(error, PermissionError):
        return f"{shown(constants.HF_HUB_CACHE)} cannot be written", "set HF_HOME to a folder that can be"
    if isinstance(error, GatedRepoError):
        page = f"{constants.ENDPOINT}/{model}"
        return "it is gated, and this account has no access", f"accept its conditions at {page} and log in with {log_in}"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such model, or it is private", f"check the name, and for a private one log in with {log_in}"
    if isinstance(error, RevisionNotFoundError):
        return "it has no such revision", "check the name of the branch, tag or commit"
    if isinstance(error, LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        offline = "HF_HUB_OFFLINE=1 is set, and the hub's cache does not have it, or only a part of it"
        return offline, "check the name, unset HF_HUB_OFFLINE to download it"
    if isinstance(error, LocalEntryNotFoundError):
        return "it cannot be reached", "check the name and the network"
    reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    return reason, "check the name and the network (a download continues where it stopped)"


def _did_you_mean(model: str) -> str:
    """Return the beginning of a hint: a bundled, cached or local model with a similar name, or ""."""
    cached = [name.removeprefix("models--").replace("--", "/") for name in list_folder(Path(constants.HF_HUB_CACHE))]
    local = [str(Path(model).with_name(name)) for name in list_folder(Path(model).expanduser().parent)]
    candidates = {*bundled_models(), *cached, *local} - {model}
    close = difflib.get_close_matches(model, sorted(candidates), n=1, cutoff=0.8)
    return f"did you mean {shown(close[0])}? Otherwise " if close else ""
