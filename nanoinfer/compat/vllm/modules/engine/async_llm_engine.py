from nanoinfer.async_llm import AsyncLLM as AsyncLLMEngine
