"""How a model is spread: one module an axis, and the context that puts them in order."""
