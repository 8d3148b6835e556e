"""Every schedule of a small world: nanoinfer_lab/testing/schedules.py."""

import warnings
from typing import TYPE_CHECKING

from nanoinfer_lab.testing.schedules import Abort as Abort
from nanoinfer_lab.testing.schedules import Arrive as Arrive
from nanoinfer_lab.testing.schedules import Explored as Explored
from nanoinfer_lab.testing.schedules import InvariantError as InvariantError
from nanoinfer_lab.testing.schedules import Reset as Reset
from nanoinfer_lab.testing.schedules import RunStep as RunStep
from nanoinfer_lab.testing.schedules import World as World
from nanoinfer_lab.testing.schedules import check_scheduler as check_scheduler
from nanoinfer_lab.testing.schedules import replay as replay

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:  # the old name of InvariantError, for one version
        if name != "BrokenPromiseError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn("BrokenPromiseError is now called InvariantError", DeprecationWarning, stacklevel=2)
        return InvariantError
