"""Names from elsewhere: vLLM's, and the old paths of modules that have moved."""
