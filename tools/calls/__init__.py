"""How tiny-tools was made: conversations with tools, and what trains and measures the model.

documents.py   conversations as messages and as token ids: the tokenizer, the chat template
train.py       python -m tools.calls.train: the model, the loop of tools.stories.train, the share of right calls, the model card
"""
