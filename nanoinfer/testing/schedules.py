"""Every schedule of a small world: nanoinfer_lab/testing/schedules.py."""

from nanoinfer_lab.testing.schedules import Abort as Abort
from nanoinfer_lab.testing.schedules import Arrive as Arrive
from nanoinfer_lab.testing.schedules import Explored as Explored
from nanoinfer_lab.testing.schedules import InvariantError as InvariantError
from nanoinfer_lab.testing.schedules import Reset as Reset
from nanoinfer_lab.testing.schedules import RunStep as RunStep
from nanoinfer_lab.testing.schedules import World as World
from nanoinfer_lab.testing.schedules import check_scheduler as check_scheduler
from nanoinfer_lab.testing.schedules import replay as replay
