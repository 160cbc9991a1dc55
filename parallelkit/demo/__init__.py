"""What `parallelkit demo` is whatever the framework and the engine. The models are the plugins'."""
