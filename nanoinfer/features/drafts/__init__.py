"""Speculative decoding: sources of draft tokens, and the plans that have them."""
