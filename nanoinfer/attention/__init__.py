"""Attention and the paged KV cache: one interface (base.py), its definition (dense.py, reference.py) and its backends."""
