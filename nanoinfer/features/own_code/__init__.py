"""A user's own logits processors, with vLLM's interface."""
