"""The commands bench, simulate, verify and check-scheduler."""
