"""Checkpoints other than safetensors in floats: GGUF, packed integers, fused experts."""
