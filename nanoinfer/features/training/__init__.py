"""For trainers: new weights in place, pauses, memory given back, log-probabilities of given tokens."""
