"""Linear layers in 8 or 4 bits, which LLM(quantization=...) asks for."""
