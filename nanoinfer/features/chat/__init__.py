"""Messages to a prompt, and an answer to a message: templates, tools and reasoning."""
