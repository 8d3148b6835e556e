"""Run a model on several ranks (torch.distributed)."""
