"""A budget for the tokens of reasoning."""
