"""Formats besides plain safetensors: GGUF, GPTQ, AWQ, compressed-tensors, FP8, all experts in one tensor, LoRA to merge."""
