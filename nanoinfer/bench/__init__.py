"""Measurements of nanoinfer and, in the same run, of transformers. cli/bench.py is the command."""
