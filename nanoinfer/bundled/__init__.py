"""The bundled models, `tiny-qwen3` and `tiny-gpt2`, and the grammar and the training script that made them.

The folders `tiny-qwen3` and `tiny-gpt2` are checkpoints in the format of the Hugging Face hub: config, tokenizer, fp32
safetensors. The models write short children's stories and know nothing else. The stories come from a grammar that gives the
exact probability of any text, and the place where a text stops being a story. So the models can be measured against the truth.

Read the files of stories/ in this order:

    grammar.py       rules and a cast -> a text. A text -> its probability, and the place where it leaves the grammar.
    sentences.py     the rules: openings, days, endings, and the words they share
    plots.py         the rules of the twelve plots
    __init__.py      the cast: heroes, places, things. write(), read(), hero_is_right().
    documents.py     stories and chats as token ids: the tokenizer, the chat template
    train.py         python -m nanoinfer.bundled.stories.train: the two models, the courses, the loop
    measure.py       the loss beside the grammar's entropy, stories by temperature, the model card
"""
