"""What is shown to people: the paper's figures, with their data."""
