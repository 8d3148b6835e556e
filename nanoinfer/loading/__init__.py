"""Checkpoints: files to a model and its tokenizer, and the bundled models."""
