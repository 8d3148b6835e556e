"""The progress bar of everything that may take more than two seconds."""

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(description: str, total: int | None = None, *, steps: Iterable[Any] | None = None) -> tqdm:
    """Make a progress bar that appears in a terminal after two seconds. Iterating over it goes through the steps, if given."""
    return tqdm(steps, description, total, delay=2, leave=False, disable=None)
