from nanoinfer.prompts import PromptType, TextPrompt, TokensPrompt
