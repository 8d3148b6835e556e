"""A model for trainers, whose forward pass has the sampler's bits, with gradients by torch."""
