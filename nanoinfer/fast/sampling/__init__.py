"""Routes of the sampler, which give the tokens of its stages in less time. Each device's accelerate.py lists its routes."""
