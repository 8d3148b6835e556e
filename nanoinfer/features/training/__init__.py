"""For trainers: models whose forward pass has the sampler's bits, with gradients by torch."""
