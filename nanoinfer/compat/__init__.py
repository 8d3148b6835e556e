"""Other engines' names: those of vLLM."""
