from nanoinfer.llm import LLM
