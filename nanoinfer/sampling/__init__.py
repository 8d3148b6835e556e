"""From logits to token ids: a visible list of stages, then one draw.

batch.py gathers what each row asked for; stages.py holds the pure functions; draw.py takes the token; sampler.py is the list.
"""
