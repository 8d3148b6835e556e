"""Beam search, by plans of its own."""
