"""Branch and bound, and the problems that it serves."""
