"""The tasks of an evaluation: one class a kind."""
