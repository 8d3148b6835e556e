from nanoinfer.engine.prompts import PromptType, TextPrompt, TokensPrompt
