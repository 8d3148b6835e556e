"""Random loads of a Scheduler and a BlockManager: nanoinfer_lab/testing/machines.py."""

from nanoinfer_lab.testing.machines import Load as Load
from nanoinfer_lab.testing.machines import check_random_loads as check_random_loads
