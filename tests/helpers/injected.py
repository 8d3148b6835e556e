"""Changes of one place in a copy of the package, which a test must notice.

In: file of the package -> changes, each with what it is, the text of one place, and what replaces it.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "nanoinfer"
IGNORED = shutil.ignore_patterns("__pycache__", "bundled", "*.html")

Changes = list[tuple[str, str, str, str]]  # file, what, old, new


def changes_of(injected: dict[str, list[tuple[str, str, str]]]) -> Changes:
    return [(file, *change) for file, changes in injected.items() for change in changes]


def check_places(changes: Changes) -> None:
    """Check that the text of each change is in one place of its file, and is replaced by another text."""
    for file, what, old, new in changes:
        assert (PACKAGE / file).read_text(encoding="utf-8").count(old) == 1, f"{what}: choose another line of {file}"
        assert new != old


def copy_package(folder: Path) -> None:
    shutil.copytree(PACKAGE, folder / "nanoinfer", ignore=IGNORED)


@contextmanager
def injected(tree: Path, file: str, old: str, new: str) -> Iterator[None]:
    """Change a file of the package's copy in `tree` for as long as the context lasts."""
    path = tree / "nanoinfer" / file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")
