"""LoRA adapters of single requests."""
