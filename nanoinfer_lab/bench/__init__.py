"""Measurements of nanoinfer for its users. cli/bench.py is the command. benchmarks/ in the repository compares engines."""
