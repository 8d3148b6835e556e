"""What a request or an engine's argument asks for: a folder for each. The core does not know them."""
