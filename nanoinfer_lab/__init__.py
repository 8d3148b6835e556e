"""What measures and checks: benchmarks, a simulator of serving, checks of schedules and drafts, and the bundled stories."""
