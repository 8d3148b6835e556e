"""Checks of a user's own classes, for a user's own tests. nanoinfer_lab.testing has them."""

from nanoinfer_lab.testing import check_proposer as check_proposer
from nanoinfer_lab.testing import check_scheduler as check_scheduler
