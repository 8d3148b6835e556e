"""Give a prompt's tokens the same bits however the prompt is cut into chunks (batch_invariant=True)."""
