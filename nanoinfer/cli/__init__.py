"""The command `nanoinfer`: generate, chat, serve, batch, models, inspect and doctor."""
