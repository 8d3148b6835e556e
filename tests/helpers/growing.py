"""Tokens for a sequence, without a scheduler."""


def grow(seq, *token_ids):
    """Append tokens that are not in the cache."""
    seq.token_ids += token_ids
    seq.num_tokens = len(seq.token_ids)
