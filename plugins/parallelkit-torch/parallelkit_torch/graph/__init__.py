"""Graph mode seen from outside: what `torch.compile` compiled, where it broke, what it costs."""
