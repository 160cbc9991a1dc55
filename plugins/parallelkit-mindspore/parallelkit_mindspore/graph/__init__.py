"""What graph mode makes of a function: `check_graph`, `compare_modes`."""
