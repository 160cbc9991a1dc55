"""Parallel contexts over MindSpore."""
