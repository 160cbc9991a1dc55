"""What `parallelkit_torch.loader` is made of: samplers, streams, seeds, loaders given by users."""
