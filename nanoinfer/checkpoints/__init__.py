"""The two models in the box: `tiny-qwen3` and `tiny-gpt2`, about half a million weights each.

Each folder is a checkpoint in the Hugging Face hub's own format (config, tokenizer, fp32 safetensors), so anything that
reads the hub reads them. They tell short children's stories and know nothing else: good for watching an engine work.

`stories.py` makes the text they learned from; `python -m nanoinfer.checkpoints.train` makes them again in minutes.
"""
