"""Checks of a user's own classes, for a user's own tests. machines.py has those that need Hypothesis."""

from nanoinfer.testing.proposers import check_proposer as check_proposer
