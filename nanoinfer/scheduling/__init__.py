"""Sequences, the blocks of the KV cache and the plan of a step, without tensors."""
