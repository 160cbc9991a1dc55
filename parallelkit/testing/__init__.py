"""Tools for testing parallelkit and its plugins; nothing here is needed at run time."""
