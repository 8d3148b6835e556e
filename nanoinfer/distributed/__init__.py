"""One model on several ranks (torch.distributed)."""
