"""`parallelkit demo` on torch: two ranks train a small language model, a third process follows."""
