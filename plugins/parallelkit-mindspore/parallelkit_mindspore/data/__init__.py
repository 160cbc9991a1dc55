"""What `parallelkit_mindspore.loader` is made of: pipelines, their samplers, streams, seeds."""
