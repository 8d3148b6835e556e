"""From logits to token ids: a visible list of stages, then one draw.

batch.py turns the parameters of each row into tensors, with state.py's token counts and n-grams. stages.py holds the stages as
pure functions. draw.py draws the token. sampler.py holds the list of stages, and tries the routes that it is given (routes.py),
which find the same tokens in less time. logprobs.py computes log-probabilities, and stage_trace.py emits trace events.
"""
