"""How the bundled models were made: documents from the grammar of nanoinfer_lab.stories, a training loop, a model card.

documents.py   stories and chats as token ids: the tokenizer, the chat template
train.py       python -m tools.stories.train: the two models, the courses, the loop
measure.py     the loss compared with the grammar's entropy, stories by temperature, the model card
"""
