"""The commands explain, bench, simulate, verify and check-scheduler."""
