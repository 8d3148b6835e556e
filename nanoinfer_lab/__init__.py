"""What measures and checks: benchmarks, a simulator of serving, checks of schedules, and the bundled models' stories."""
