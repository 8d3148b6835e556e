"""Cached blocks on disk: a prefix cache that outlives the process."""
