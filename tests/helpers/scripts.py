"""Imports a script of docs/ or notebooks/, which finds those beside it."""

import importlib
import sys
from pathlib import Path
from unittest.mock import patch

import matplotlib as mpl

ROOT = Path(__file__).parents[2]


def load(name):
    """Import docs/NAME.py or notebooks/NAME.py. Its style of figures is not for other tests."""
    folders = [str(ROOT / folder) for folder in ("docs", "notebooks")]
    with mpl.rc_context(), patch.object(sys, "path", [*folders, *sys.path]):
        return importlib.import_module(name)
