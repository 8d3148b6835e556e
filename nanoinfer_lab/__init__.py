"""What teaches and measures: the course of tasks, the benchmarks, and the stories of the bundled models."""
