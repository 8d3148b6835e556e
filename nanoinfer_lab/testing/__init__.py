"""Checks of a user's own classes, for a user's own tests.

schedules.py explores every schedule of a small world. machines.py draws long runs with Hypothesis. proposers.py checks drafts.
"""

from typing import TYPE_CHECKING

from nanoinfer_lab.testing.schedules import check_scheduler as check_scheduler

if TYPE_CHECKING:
    from nanoinfer_lab.testing.proposers import check_proposer as check_proposer
else:

    def __getattr__(name: str) -> object:
        if name != "check_proposer":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from nanoinfer_lab.testing.proposers import check_proposer  # imports torch, which schedules.py does without

        return check_proposer
