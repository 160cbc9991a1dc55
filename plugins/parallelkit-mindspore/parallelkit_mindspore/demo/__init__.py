"""`parallelkit demo` on MindSpore: its language model, how it is trained, and a follower."""
