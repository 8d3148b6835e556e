from nanoinfer.compat.vllm.engine import VLLMEngine as LLMEngine
