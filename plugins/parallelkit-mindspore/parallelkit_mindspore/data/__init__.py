"""Loaders over MindSpore data sets and plain ones."""
