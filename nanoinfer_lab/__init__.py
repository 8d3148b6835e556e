"""What measures and checks: benchmarks, a simulator of serving, checks of schedules and drafts, the bundled models' stories."""
