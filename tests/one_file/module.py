"""Loads one_file/engine.py, or a changed text of it, as a module of its own."""

import sys
from itertools import count
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "one_file"
FILE = FOLDER / "engine.py"
NUMBERS = count()


def load(source: str | None = None) -> ModuleType:
    """Return the module. source: the text to run in the place of the file's."""
    module = ModuleType(f"engine_in_one_file_{next(NUMBERS)}")
    module.__file__ = str(FILE)
    sys.modules[module.__name__] = module  # where dataclasses look for the annotations' names
    exec(compile(source or FILE.read_text(encoding="utf-8"), str(FILE), "exec"), vars(module))
    return module


def changed(old: str, new: str) -> str:
    """Return the file's text with one place changed."""
    source = FILE.read_text(encoding="utf-8")
    assert source.count(old) == 1, f"the file has {source.count(old)} times {old!r}"
    return source.replace(old, new)
