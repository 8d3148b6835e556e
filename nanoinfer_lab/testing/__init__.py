"""Checks of a user's own classes, for a user's own tests. nanoinfer.testing passes them on.

schedules.py explores every schedule of a small world. machines.py draws long runs with Hypothesis. proposers.py checks drafts.
"""

from nanoinfer_lab.testing.proposers import check_proposer as check_proposer
from nanoinfer_lab.testing.schedules import check_scheduler as check_scheduler
