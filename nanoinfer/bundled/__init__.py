"""The bundled models, `tiny-qwen3` and `tiny-gpt2`, and the grammar that wrote the stories on which they were trained.

The folders `tiny-qwen3` and `tiny-gpt2` are checkpoints in the format of the Hugging Face hub: config, tokenizer, fp32
safetensors. The models write short children's stories and know nothing else. The stories come from a grammar that gives the
exact probability of any text, and the place where a text stops being a story. So the models can be compared with the truth.

Read the files of stories/ in this order:

    grammar.py       rules and a cast -> a text. A text -> its probability, and the place where it leaves the grammar.
    rules.txt        the rules: openings, days, twelve plots, endings, and the words they share
    __init__.py      the cast: heroes, places, things. write(), read().

tools/stories in the repository trained the models and measured them.
"""
