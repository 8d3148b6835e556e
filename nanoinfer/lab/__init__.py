"""What teaches and measures: the course of tasks, and the benchmarks."""
