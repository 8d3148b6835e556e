"""For trainers: models whose forward pass has the sampler's bits, and whose gradients are torch's."""
