"""From logits to token ids: a visible list of stages (sampler.py, stages.py), then one draw (draw.py)."""
