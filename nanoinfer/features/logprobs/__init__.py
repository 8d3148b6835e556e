"""The log-probabilities of a prompt's tokens, by a reader of its rows."""
