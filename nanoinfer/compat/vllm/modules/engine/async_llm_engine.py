from nanoinfer import AsyncLLM as AsyncLLMEngine
