"""Properties of networks in the format of the verification competitions, and their verdicts."""
