"""`parallelkit demo` with a vLLM engine: a server of its own, and who reads what it generates."""
