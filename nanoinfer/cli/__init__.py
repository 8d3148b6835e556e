"""The command `nanoinfer`: generate, chat, explain, serve, batch, models, inspect and doctor."""
