"""The two models bundled, `tiny-qwen3` and `tiny-gpt2`, and all that made them.

Each folder is a checkpoint in the Hugging Face hub's own format (config, tokenizer, fp32 safetensors), so anything that
reads the hub reads them. They tell short children's stories and know nothing else. What makes them worth watching is that the
truth is known: the stories come from a grammar that can say how likely any text is, and where it stops being a story.

Read in this order:

    grammar.py       rules and a cast -> a text; a text -> its probability, and the place where it leaves the grammar
    sentences.py     the rules: openings, days, endings, and the words that all share; plots.py has the twelve plots
    stories.py       the cast: heroes, places, things; write(), read(), hero_is_right()
    documents.py     stories and chats as token ids: the tokenizer, the chat template
    train.py         python -m nanoinfer.bundled.stories.train: the two models, the courses, the loop
    measure.py       the loss beside the grammar's entropy, stories by temperature, the model card
"""
