from nanoinfer import AsyncLLM
