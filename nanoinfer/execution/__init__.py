"""From a plan to sampled tokens: the packed batch, the model's step and the executor."""
